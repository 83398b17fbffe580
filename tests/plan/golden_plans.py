"""Golden launch records: from a record's `inputs` to what is planned for them, in its own form.

tests/golden/README.md describes the form. A record's own names stay inside this module.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import recorded_families
import recorded_options
from recorded_options import RecordedProblem

from jax_megamoe._checks import message
from jax_megamoe.plan import heuristics, limits, sm90_heuristics
from jax_megamoe.plan.arithmetic import float32
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import (
    sgl_sm90_fp8_block,
    sgl_sm100,
    sgl_sm100_bf16,
    sgl_sm100_mx,
    sgl_sm100_nvfp4,
    vllm_sm100_bf16,
    vllm_sm100_mx,
    vllm_sm100_nvfp4,
)
from jax_megamoe.plan.launch import (
    Bool,
    Float32,
    KernelArgument,
    KernelLaunch,
    Pointer,
    SymmetricBuffer,
    TensorMap,
    Uint32,
)
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.refusal import Refusal, missing, unfit
from jax_megamoe.plan.sm100 import Sm100Launch
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.sm100_traits import Sm100Traits
from jax_megamoe.plan.staging import MAX_STAGED_HIDDEN
from jax_megamoe.plan.symmetric_buffer import BufferLayout, sm90_layout, sm100_layout

Record = dict[str, Any]

_INPUT_SLICES = ("x", "x_sf", "topk_idx", "topk_weights")
_SHARED_SLICES = ("shared_l1_acts", "shared_l1_acts_sf", "shared_l2_acts", "shared_l2_acts_sf")
_RING_SLICES = ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")

_FAMILIES: Mapping[tuple[str, str, str], Sm100Family] = {
    ("sgl", "fp8_fp4_mega_moe", "fp8xfp4"): sgl_sm100_mx.FAMILY,
    ("sgl", "fp8_fp4_mega_moe", "fp8xfp8"): sgl_sm100_mx.FAMILY,
    ("sgl", "fp8_fp4_mega_moe", "mxf4xmxf4"): recorded_families.MXF4,
    ("sgl", "fp8_fp4_mega_moe", "nvfp4xnvfp4"): sgl_sm100_nvfp4.FAMILY,
    ("sgl", "bf16_mega_moe", "bf16xbf16"): sgl_sm100_bf16.FAMILY,
    ("vllm", "fp8_fp4_mega_moe", "fp8xfp4"): vllm_sm100_mx.FAMILY,
    ("vllm", "fp8_fp4_mega_moe", "fp8xfp8"): vllm_sm100_mx.FAMILY,
    ("vllm", "situ_mega_moe", "fp8xfp4"): vllm_sm100_mx.FAMILY,
    ("vllm", "situ_mega_moe", "fp8xfp8"): vllm_sm100_mx.FAMILY,
    ("vllm", "bf16_mega_moe", "bf16xbf16"): vllm_sm100_bf16.FAMILY,
    ("vllm", "nvfp4_mega_moe", "nvfp4"): vllm_sm100_nvfp4.FAMILY,
    ("vllm", "fp4_fp4_mega_moe", "fp4xfp4"): recorded_families.FP4_FP4,
}
_STAGING = {"pre_dispatch": "fp8_fp4_mega_moe", "pre_dispatch_sm90": "sm90_fp8_mega_moe"}

RECORDED_NAMES = {
    "x": "x_bf16",
    "w13_weight": "l1_weights",
    "w13_weight_scale": "l1_weights_sf",
    "w2_weight": "l2_weights",
    "w2_weight_scale": "l2_weights_sf",
    "shared_w13_weight": "shared_l1_weights",
    "shared_w13_weight_scale": "shared_l1_weights_sf",
    "shared_w2_weight": "shared_l2_weights",
    "shared_w2_weight_scale": "shared_l2_weights_sf",
}
"""What the records call the arrays that tensor maps describe."""


def record(inputs: Record) -> Record:
    """What this package plans for a golden record's inputs, in the form of its outputs.

    Of `nvcc_flags` only the architecture is the plan's.

    Raises:
        ValueError: sizes that DeepGEMM or its kernel refuses.
        NotImplementedError: a device, format, activation or option that cannot run.
    """
    broken = next(_violations(inputs), None)
    if broken is not None:
        raise broken.error()
    return unchecked_record(inputs)


def unchecked_record(inputs: Record) -> Record:
    """`record` by arithmetic alone: what DeepGEMM's host would send, whether or not it can run."""
    launch = _launch(inputs)
    attributes = [[8, launch.config.smem]] if launch.config.smem else []
    return buffer_record(inputs) | {
        "launches": [launch_record(launch, inputs["rank"])],
        "func_attrs": attributes,
    }


def buffer_record(inputs: Record) -> Record:
    """The buffer's part of a record: sizes, slices and the queried tile height."""
    problem, device, traits = problem_of(inputs), device_of(inputs), traits_of(inputs)
    layout = _layout(inputs)
    if traits is None:
        names = (*_INPUT_SLICES, *_RING_SLICES)
        alignment = sm90_heuristics.TOKEN_ALIGNMENT
    else:
        scales = ("x_scales",) if traits.tail == "scales" else ()
        names = (*_INPUT_SLICES, *_SHARED_SLICES, *_RING_SLICES, *scales)
        alignment = heuristics.TOKEN_ALIGNMENT
    record: Record = {
        "max_tokens_per_rank_aligned": layout.max_num_tokens,
        "token_alignment": alignment,
        "sym_buffer_bytes": layout.num_bytes,
        "slices": [_slice(name, layout, inputs.get("provider", "sgl")) for name in names],
    }
    if inputs["kernel"] not in _STAGING:
        height = None if traits is None else heuristics.block_m(traits, problem, device)
        record["block_m_query"] = height
    return record


def device_of(inputs: Record) -> DeviceSpec:
    return DeviceSpec(inputs["arch"], inputs["num_sms"])


def _kernel(inputs: Record) -> str:
    kernel: str = inputs["kernel"]
    return _STAGING.get(kernel, kernel)


def family_of(inputs: Record) -> Sm100Family | None:
    """The SM100 family; None for the SM90 kernel."""
    kernel = _kernel(inputs)
    if kernel == "sm90_fp8_mega_moe":
        return None
    provider, mma_type = inputs.get("provider", "sgl"), inputs["mma_type"]
    if (provider, kernel, inputs["activation"]) == ("vllm", "fp8_fp4_mega_moe", "situ"):
        kernel = "situ_mega_moe"
    if kernel == "nvfp4_mega_moe":
        mma_type = "nvfp4"  # its own entry point, which takes no such argument
    key = (provider, kernel, mma_type)
    if key not in _FAMILIES:
        known = sorted({known[2] for known in _FAMILIES if known[:2] == key[:2]})
        raise NotImplementedError(message("mma_type", f"one of {known}", repr(key[2])))
    return _FAMILIES[key]


def traits_of(inputs: Record) -> Sm100Traits | None:
    """Traits of the SM100 kernel; None for the SM90 kernel."""
    family = family_of(inputs)
    if family is None:
        return None
    traits = family.variants.get(inputs["activation"], family.traits)
    return recorded_options.with_capped(family, traits)


def problem_of(inputs: Record) -> RecordedProblem:
    """The numbers of a record; those a record does not have are DeepGEMM's defaults."""
    traits = traits_of(inputs)
    default = "fp8_block" if traits is None else next(iter(traits.weights))
    renamed = {
        "num_ranks": inputs["num_ranks"],
        "num_experts": inputs["num_experts"],
        "top_k": inputs["top_k"],
        "hidden_size": inputs["hidden"],
        "intermediate_size": inputs["intermediate"],
        "max_num_tokens": inputs["max_tokens_per_rank"],
        "num_tokens": inputs["num_tokens"],
        "weight_format": inputs.get("weight_dtype") or default,
        "num_shared_experts": inputs["num_shared_experts"],
        "shared_format": inputs["shared_dtype"],
        "x_scales": inputs.get("use_x_scales", False),
        "post_norm_eps": inputs.get("post_norm_eps") or 1e-6,
        "fp8_combine": "DG_USE_FP8_COMBINE" in inputs.get("env", {}),
    }
    same = (
        *("activation", "clamp", "alpha", "beta", "fast_math", "stats", "l1_alphas", "l2_alphas"),
        *("l2_act_scales", "l2_activation_scale", "post_norm", "post_norm_weight"),
        *("post_norm_weight_first", "global_num_tokens", "num_tokens_bound"),
    )
    return RecordedProblem(**renamed, **{name: inputs[name] for name in same if name in inputs})


def _violations(inputs: Record) -> Iterator[Refusal]:
    if inputs.get("weight_layout", "megamoe") != "megamoe":
        yield missing("weight_layout", "megamoe", inputs["weight_layout"])
    problem, traits = problem_of(inputs), traits_of(inputs)
    if traits is None:
        yield from limits.sm90_violations(problem, device_of(inputs))
    else:
        yield from limits.sm100_violations(traits, problem, device_of(inputs))
        if problem.post_norm and problem.num_shared_experts:
            yield missing("post_norm", "no fused shared experts", problem.num_shared_experts)
    if inputs["kernel"] in _STAGING and problem.hidden_size > MAX_STAGED_HIDDEN:
        yield unfit("hidden_size", f"at most {MAX_STAGED_HIDDEN}", problem.hidden_size)


def _layout(inputs: Record) -> BufferLayout:
    traits, problem = traits_of(inputs), problem_of(inputs)
    if traits is None:
        return sm90_layout(problem)
    layout = sm100_layout(traits, problem, inputs["num_sms"])
    return recorded_options.with_fp8_combine(layout) if problem.fp8_combine else layout


def _launch(inputs: Record) -> KernelLaunch:
    problem, device = problem_of(inputs), device_of(inputs)
    family, traits = family_of(inputs), traits_of(inputs)
    # DeepGEMM's launch counts the shared experts in the weights it is given, not in the buffer.
    problem = replace(problem, num_shared_experts=problem.fused_shared_experts)
    if inputs["kernel"] in _STAGING:
        if traits is None:
            factor = inputs["routed_scaling_factor"]
            return sgl_sm90_fp8_block.staging_launch(problem, _layout(inputs), factor)
        return sgl_sm100.staging_launch(traits, problem, _layout(inputs), inputs["expert_scales"])
    if family is None or traits is None:
        return sgl_sm90_fp8_block.mega_launch(problem, device)
    launch = family.mega_launch(Sm100Launch(traits, problem, device))
    return recorded_options.with_options(family, launch, problem)


def _slice(name: str, layout: BufferLayout, provider: str) -> Record:
    if name in layout:
        region = layout[name]
        return {
            "name": name,
            "dtype": region.dtype,
            "shape": list(region.shape),
            "strides": list(region.strides),
            "offset": region.offset if region.num_bytes else None,
        }
    if provider == "sgl":
        return {"name": name, "dtype": "int8", "shape": [0], "strides": [1], "offset": None}
    return {"name": name, "dtype": None}


def launch_record(launch: KernelLaunch, rank: int) -> Record:
    kernel, config = launch.kernel, launch.config
    attributes: list[Any] = [[4, list(config.cluster)]] if config.cluster != (1, 1, 1) else []
    if config.programmatic_serialization:
        attributes.append([6, 1])
    return {
        "entry": kernel.symbol,
        "include": kernel.header,
        "template_args": list(kernel.template_args),
        "float_values": {
            str(index): _float(text)
            for index, text in enumerate(kernel.template_args)
            if text.endswith(("f", "infinity()"))
        },
        "jit_name": PurePosixPath(kernel.header).stem,
        "nvcc_flags": [f"--gpu-architecture={kernel.arch}"],
        "grid": list(config.grid),
        "block": list(config.block),
        "smem": config.smem,
        "cluster": list(config.cluster),
        "launch_attrs": attributes,
        "args": [_argument_record(argument, rank) for argument in launch.arguments],
    }


def _float(text: str) -> float | str:
    return "inf" if text.endswith("infinity()") else float.fromhex(text.removesuffix("f"))


def _argument_record(argument: KernelArgument, rank: int) -> Record:
    record: Record = {"name": argument.name}
    match argument:
        case Pointer():
            record["ptr"] = _base(argument.operand, argument.name)
        case Bool():
            record["bool"] = argument.value
        case Uint32():
            record["u32"] = argument.value
        case Float32():
            record["f32"] = float(f"{float32(argument.value):.9g}")
        case SymmetricBuffer():
            record["sym"] = {
                "base": {"tensor": "sym_buffer", "offset": 0},
                "rank": rank,
                "offsets_are_peer_minus_self_then_zero": True,
            }
        case TensorMap():
            spec = argument.spec
            base = _base(spec.base, RECORDED_NAMES.get(spec.base.name, ""))
            record["tmap"] = {
                "base": base if all(spec.dims) else None,
                "dtype": spec.dtype,
                "dims": list(spec.dims),
                "strides": list(spec.strides),
                "box": list(spec.box),
                "elem_strides": [1] * len(spec.dims),
                "interleave": spec.interleave,
                "swizzle": spec.swizzle,
                "l2": spec.l2_promotion,
                "oob": spec.oob_fill,
            }
    return record


def _base(operand: Operand | None, name: str) -> Record | None:
    """A pointer's target; arrays have the record's own `name`."""
    if operand is None:
        return None
    tensor = "sym_buffer" if operand.name == SYMMETRIC_BUFFER else name
    return {"tensor": tensor, "offset": operand.offset}
