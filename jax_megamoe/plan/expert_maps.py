"""Tensor maps of the routed and of the shared experts of an SM100 launch."""

from dataclasses import dataclass

from jax_megamoe.plan.heuristics import BLOCK_N, Tiles
from jax_megamoe.plan.launch import TensorMap
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_traits import Activations, Sm100Traits, Weights
from jax_megamoe.plan.symmetric_buffer import (
    BufferLayout,
    shared_activations,
    shared_scale_block,
)
from jax_megamoe.plan.tensor_map import INT32, SWIZZLE_NONE, TensorMapSpec


@dataclass(frozen=True)
class _Experts:
    """One set of experts: the routed ones, or the fused shared ones as a single wide expert.

    Attributes:
        prefix: of the map's and region's names.
        operands: names of both layers' weights; their scales have the suffix ``_scale``.
        width: intermediate size.
        block_k: values along K that one stage loads.
    """

    prefix: str
    operands: tuple[str, str]
    activations: Activations
    weights: Weights
    scale_block: int
    block_k: int
    groups: int
    width: int


def expert_maps(
    traits: Sm100Traits, problem: Problem, layout: BufferLayout, tiles: Tiles
) -> list[TensorMap]:
    """Maps of the routed experts, then of the shared ones.

    Without fused shared experts the routed maps stand in for the shared ones, and so do the routed
    scale maps where shared experts have no scales but the kernel takes maps of them.
    """
    weights = traits.weights[problem.weight_format]
    routed = _Experts(
        "",
        ("w13_weight", "w2_weight"),
        traits.activations,
        weights,
        traits.scale_block,
        traits.block_k,
        problem.local_experts,
        problem.intermediate_size,
    )
    maps = _maps(routed, problem, layout, tiles)
    shared = dict(maps)
    if problem.num_shared_experts:
        shared |= _maps(_shared(traits, problem), problem, layout, tiles)
    if traits.shared_source == "caller":
        shared = {name: spec for name, spec in shared.items() if not name.endswith("_sf")}
    return [TensorMap(name, spec) for name, spec in maps.items()] + [
        TensorMap(f"shared_{name}", spec) for name, spec in shared.items()
    ]


def _shared(traits: Sm100Traits, problem: Problem) -> _Experts:
    block = shared_scale_block(traits, problem)
    acts = shared_activations(traits, problem)
    return _Experts(
        "shared_",
        ("shared_w13_weight", "shared_w2_weight"),
        acts,
        traits.shared[problem.shared_format or ""],
        block,
        traits.block_k if acts is traits.activations else 1024 // acts.bits,
        1,
        problem.num_shared_experts * problem.intermediate_size,
    )


def _maps(
    experts: _Experts, problem: Problem, layout: BufferLayout, tiles: Tiles
) -> dict[str, TensorMapSpec]:
    """Maps of both layers by name, in the order kernels take them."""
    acts, block = experts.activations, experts.scale_block
    sizes = ((2 * experts.width, problem.hidden_size), (problem.hidden_size, experts.width))
    maps: dict[str, TensorMapSpec] = {}
    for layer, operand, (rows, depth) in zip(("l1", "l2"), experts.operands, sizes, strict=True):
        name = f"{experts.prefix}{layer}_acts"
        base, tokens = _tokens(name, problem, layout)
        words = experts.block_k // (4 * block) if block else 0
        maps[f"{layer}_acts"] = _activation_map(
            base, acts, tokens, depth, (acts.box, tiles.block_m // 2, acts.swizzle)
        )
        if block:
            maps[f"{layer}_acts_sf"] = _scale_map(
                Operand(SYMMETRIC_BUFFER, layout[f"{name}_sf"].offset),
                layout[f"{name}_sf"].shape,
                (tiles.scale_m, words),
            )
        maps[f"{layer}_weights"] = _weight_map(
            experts.weights, operand, rows, depth, experts.groups
        )
        if block:
            maps[f"{layer}_weights_sf"] = _scale_map(
                Operand(f"{operand}_scale"),
                (rows, depth // (4 * block) * experts.groups),
                (BLOCK_N, words),
            )
        if layer == "l1":
            base, tokens = _tokens(f"{experts.prefix}l2_acts", problem, layout)
            maps["l1_output"] = _activation_map(
                base,
                acts,
                tokens,
                experts.width,
                (acts.output_box, tiles.store_m[0], acts.output_swizzle),
            )
    return maps


def _tokens(name: str, problem: Problem, layout: BufferLayout) -> tuple[Operand, int]:
    """Where a layer's token rows are, and how many."""
    if name in layout:
        return Operand(SYMMETRIC_BUFFER, layout[name].offset), layout[name].shape[0]
    return Operand("x"), problem.num_tokens


def _activation_map(
    base: Operand, acts: Activations, rows: int, depth: int, copy: tuple[int, int, int]
) -> TensorMapSpec:
    box_k, box_rows, swizzle = copy
    return TensorMapSpec(
        base,
        acts.map_dtype,
        (depth // acts.map_per_element, rows),
        (depth * acts.bits // 8,),
        (box_k, box_rows),
        swizzle,
    )


def _scale_map(base: Operand, shape: tuple[int, ...], box: tuple[int, int]) -> TensorMapSpec:
    return TensorMapSpec(base, INT32, shape, (4 * shape[0],), box, SWIZZLE_NONE)


def _weight_map(
    weights: Weights, operand: str, rows: int, depth: int, groups: int
) -> TensorMapSpec:
    row_bytes = depth * weights.bits // 8
    inner = depth // weights.map_per_element
    if weights.folded:
        dims, strides = (inner, rows * groups), (row_bytes,)
        box = (weights.box, BLOCK_N)
    else:
        dims = (inner, rows // 2, 2, groups)
        strides = (row_bytes, row_bytes * rows // 2, row_bytes * rows)
        box = (weights.box, BLOCK_N, 1, 1)
    return TensorMapSpec(Operand(operand), weights.map_dtype, dims, strides, box, weights.swizzle)
