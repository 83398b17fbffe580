"""Launches of this package's own kernels around grouped products, `launch/kernels/grouped.cuh`."""

from dataclasses import replace

from jax_megamoe.plan.arithmetic import ceil_div, cpp_bool
from jax_megamoe.plan.grouped import humming
from jax_megamoe.plan.grouped.call import GroupedLayer
from jax_megamoe.plan.grouped.rules import ROWS
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import Float32, KernelLaunch, Pointer, Uint32, optional
from jax_megamoe.plan.operand import Operand

_HEADER = "grouped.cuh"
_THREADS, _COMBINE_THREADS = 256, 128


def _pointer(name: str) -> Pointer:
    return Pointer(name, Operand(name))


def _own(
    layer: GroupedLayer, symbol: str, template: tuple[str, ...], types: tuple[str, ...]
) -> KernelSpec:
    """A kernel of this package's."""
    arch = humming.compiler_arch(layer.arch)
    return KernelSpec("jax_megamoe", arch, _HEADER, symbol, template, types)


def group(layer: GroupedLayer) -> KernelLaunch:
    """The first blocks sort or count, the others quantise."""
    threads = layer.sort_threads
    kernel = _own(
        layer,
        "group_tokens",
        (
            str(layer.hidden_size),
            str(threads),
            f"Rows::{ROWS[layer.activations][0]}",
            str(layer.num_experts),
            str(layer.block_m),
        ),
        (
            *("const uint4*", "const int32_t*", "const bool*", "const int32_t*", "const int32_t*"),
            *("int32_t*", "uint32_t*", "uint32_t*", "uint32_t*", "uint32_t*", "int32_t*"),
            *("uint32_t*", "int32_t*", "int32_t*", "void*", "float*", *["uint32_t"] * 6),
        ),
    )
    mapped, quantises = layer.max_replicas > 0, layer.activations != "bf16"
    scaled = layer.activations in ("nvfp4", "fp8_block")
    vectors = layer.num_tokens * layer.hidden_size // 8
    blocks = layer.num_tokens if layer.activations == "nvfp4" else ceil_div(vectors, threads)
    sorts = layer.sorters == 1
    tables = ("sorted_ids", "expert_ids", "num_slots")
    arguments = (
        *map(_pointer, ("x", "topk_ids")),
        optional("padding_mask", "padding_mask", layer.padding_mask),
        optional("logical_to_physical", "logical_to_physical", mapped),
        optional("num_replicas", "num_replicas", mapped),
        _pointer("row_experts"),
        optional("row_counts", "row_counts", not sorts),
        *(optional(n, n, sorts and not layer.in_slots) for n in tables),
        optional("locks", "locks", layer.cuts),
        *(optional(n, n, sorts and layer.in_slots) for n in ("row_slots", "expert_ends")),
        optional("stats", "stats", sorts and layer.stats),
        optional("rows", "token_rows", quantises),
        optional("row_scales", "token_scales", scaled),
        Uint32("num_tokens", layer.num_tokens),
        Uint32("top_k", layer.top_k),
        Uint32("num_logical", layer.num_logical),
        Uint32("max_replicas", layer.max_replicas),
        Uint32("num_locks", humming.num_locks(layer.num_sms) * layer.cuts),
        Uint32("num_sorters", layer.sorters),
    )
    config = LaunchConfig((layer.sorters + blocks * quantises, 1, 1), (threads, 1, 1))
    return KernelLaunch(kernel, config, arguments)


def place(layer: GroupedLayer) -> KernelLaunch:
    """Rows into the places that the counts of all blocks give them."""
    threads = layer.sort_threads
    kernel = _own(
        layer,
        "place_rows",
        (str(threads), str(layer.num_experts), str(layer.block_m), cpp_bool(layer.overlaps)),
        (
            *("const int32_t*", "const uint32_t*", *["uint32_t*"] * 4),
            *("int32_t*", "int32_t*", "uint32_t", "uint32_t"),
        ),
    )
    arguments = (
        *map(_pointer, ("row_experts", "row_counts")),
        *(optional(n, n, not layer.in_slots) for n in ("sorted_ids", "expert_ids", "num_slots")),
        *(optional(n, n, layer.in_slots) for n in ("row_slots", "expert_ends")),
        optional("stats", "stats", layer.stats),
        Uint32("num_rows", layer.rows),
        Uint32("num_sorters", layer.sorters),
    )
    config = LaunchConfig((layer.sorters, 1, 1), (threads, 1, 1))
    return KernelLaunch(
        kernel, replace(config, programmatic_serialization=layer.overlaps), arguments
    )


def gather(layer: GroupedLayer) -> KernelLaunch:
    """Tokens into the slots of their rows."""
    kernel = _own(
        layer,
        "gather_rows",
        (str(layer.hidden_size), str(_THREADS), cpp_bool(layer.overlaps)),
        ("const uint4*", "const int32_t*", "const uint32_t*", "uint4*", *["uint32_t"] * 2),
    )
    arguments = (
        *map(_pointer, ("x", "row_experts", "row_slots")),
        Pointer("rows", Operand("token_rows")),
        Uint32("num_rows", layer.rows),
        Uint32("top_k", layer.top_k),
    )
    vectors = layer.rows * layer.hidden_size // 8
    return KernelLaunch(kernel, _flat(vectors, _THREADS, layer.overlaps), arguments)


def activate(layer: GroupedLayer) -> KernelLaunch:
    early = layer.overlaps
    kernel = _own(
        layer,
        "activate_rows",
        (
            str(layer.intermediate_size),
            str(_THREADS),
            f"Rows::{ROWS[layer.activations][0]}",
            "Gated::kSitu" if layer.activation == "situ" else "Gated::kSwiglu",
            *map(cpp_bool, (layer.in_slots, layer.rounds, not layer.weighs_in_combine)),
            *map(cpp_bool, (layer.fast_math, early)),
        ),
        (
            *("const uint4*", "const int32_t*", "const uint32_t*", "const float*"),
            *("const float*", "const float4*"),
            *("const float*", "void*", "float*", "uint32_t", "uint32_t", "float", "float", "float"),
        ),
    )
    nvfp4, scaled = layer.activations == "nvfp4", layer.activations == "fp8_block"
    arguments = (
        *map(_pointer, ("h", "row_experts")),
        optional("row_slots", "row_slots", layer.in_slots),
        _pointer("topk_weights"),
        optional("token_scales", "token_scales", nvfp4),
        optional("bias", "w13_bias", layer.biases),
        optional("input_scale", "w2_input_scale", nvfp4),
        _pointer("hidden_rows"),
        optional("row_scales", "hidden_scales", scaled),
        Uint32("num_rows", layer.rows),
        Uint32("top_k", layer.top_k),
        Float32("clamp", -1.0 if layer.clamp is None else layer.clamp),
        Float32("alpha", layer.alpha),
        Float32("beta", layer.beta),
    )
    vectors = layer.rows * layer.intermediate_size // 8
    return KernelLaunch(kernel, _flat(vectors, _THREADS, early), arguments)


def combine(layer: GroupedLayer) -> KernelLaunch:
    early = layer.overlaps
    kernel = _own(
        layer,
        "combine_rows",
        (
            str(layer.hidden_size),
            str(_COMBINE_THREADS),
            str(layer.top_k),
            *map(cpp_bool, (layer.weighs_in_combine, early)),
        ),
        (
            *("const uint4*", "const int32_t*", "const uint32_t*", "const float*"),
            *("const float4*", "uint4*", "uint32_t"),
        ),
    )
    arguments = (
        *map(_pointer, ("outputs", "row_experts")),
        optional("row_slots", "row_slots", layer.in_slots),
        _pointer("topk_weights"),
        optional("bias", "w2_bias", layer.biases),
        _pointer("y"),
        Uint32("num_tokens", layer.num_tokens),
    )
    vectors = layer.num_tokens * layer.hidden_size // 8
    return KernelLaunch(kernel, _flat(vectors, _COMBINE_THREADS, early), arguments)


def _flat(vectors: int, threads: int, early: bool) -> LaunchConfig:
    """A thread for each eight values."""
    grid = (ceil_div(vectors, threads), 1, 1)
    return LaunchConfig(grid, (threads, 1, 1), programmatic_serialization=early)
