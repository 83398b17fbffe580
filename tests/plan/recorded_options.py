"""Options of DeepGEMM's kernels that only golden records have: no model here asks for them.

A norm after the experts, a combine in E4M3, SwiGLU with a cap after SiLU, and a known number of
tokens on all ranks. The planner plans without them; here they are put into its plans, so that it is
compared with these records too.
"""

from dataclasses import dataclass, replace

from jax_megamoe.plan.arithmetic import cpp_bool, cpp_float
from jax_megamoe.plan.launch import Float32, KernelArgument, KernelLaunch, Pointer
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_family import Sm100Family
from jax_megamoe.plan.sm100_traits import Sm100Traits
from jax_megamoe.plan.symmetric_buffer import BufferLayout, Region

CAPPED = "swiglustep"
"""SwiGLU whose cap comes after SiLU; vllm's kernels have a flag for it."""

_CAPPED_FLAG = {"vllm_sm100_mx": -5, "vllm_sm100_bf16": -5, "vllm_sm100_nvfp4": -11}
"""Place of that flag among the template arguments, by family."""

_FP8_COMBINE_FLAG = -9
_NORM = {"post_expert_norm_weight": "post_norm_weight", "post_expert_norm_gamma": "post_norm"}
"""The norm's gain: the argument's name, and the option that says whether it is there."""


@dataclass(frozen=True, kw_only=True)
class RecordedProblem(Problem):
    """A problem with a record's options.

    Attributes:
        post_norm: RMS-normalise each expert's output before the combine.
        post_norm_weight: whether that norm has a weight.
        post_norm_weight_first: whether the weight multiplies before the norm.
        post_norm_eps: the norm's epsilon.
        global_num_tokens: tokens of all ranks together, for the choice of tiles; None: num_tokens
            on every rank.
        fp8_combine: expert outputs travel back as E4M3 (sgl).
    """

    post_norm: bool = False
    post_norm_weight: bool = False
    post_norm_weight_first: bool = False
    post_norm_eps: float = 1e-6
    global_num_tokens: int | None = None
    fp8_combine: bool = False

    @property
    def all_tokens(self) -> int:
        known = self.global_num_tokens
        return super().all_tokens if known is None else known


def with_capped(family: Sm100Family, traits: Sm100Traits) -> Sm100Traits:
    """The kernel's traits with the activations of records."""
    if family.name not in _CAPPED_FLAG or "swiglu" not in traits.activation_names:
        return traits
    return replace(traits, activation_names=(*traits.activation_names, CAPPED))


def with_options(
    family: Sm100Family, launch: KernelLaunch, problem: RecordedProblem
) -> KernelLaunch:
    """The kernel's launch with a problem's options."""
    template = list(launch.kernel.template_args)
    names = {argument.name for argument in launch.arguments}
    if problem.activation == CAPPED:
        _set(template, _CAPPED_FLAG[family.name], cpp_bool(True))
    if "post_expert_norm_weight" in names:
        options = (problem.post_norm, problem.post_norm_weight_first, problem.post_norm_weight)
        for place, option in zip((-5, -4, -3), options, strict=True):
            _set(template, place, cpp_bool(option))
        template[-2] = cpp_float(problem.post_norm_eps)
    elif "post_expert_norm_gamma" in names:
        _set(template, -1, cpp_bool(problem.post_norm))
    if problem.fp8_combine:
        _set(template, _FP8_COMBINE_FLAG, cpp_bool(True))
    arguments = tuple(_argument(argument, problem) for argument in launch.arguments)
    kernel = replace(launch.kernel, template_args=tuple(template))
    return replace(launch, kernel=kernel, arguments=arguments)


def _set(template: list[str], place: int, flag: str) -> None:
    """Sets a flag that the planner leaves off."""
    assert template[place] == cpp_bool(False)
    template[place] = flag


def _argument(argument: KernelArgument, problem: RecordedProblem) -> KernelArgument:
    if isinstance(argument, Pointer) and argument.name in _NORM:
        has_gain = getattr(problem, _NORM[argument.name])
        return replace(argument, operand=Operand(argument.name) if has_gain else None)
    if isinstance(argument, Float32) and argument.name == "post_expert_norm_eps":
        return replace(argument, value=problem.post_norm_eps if problem.post_norm else 0.0)
    return argument


def with_fp8_combine(layout: BufferLayout) -> BufferLayout:
    """The buffer with expert outputs as E4M3 and a scale for 128 of them."""
    whole = layout["combine"]
    slots, tokens, hidden = whole.shape
    values = replace(whole, dtype="uint8")
    scales, columns = values.offset + values.num_bytes, hidden // 128
    strides = (max(1, tokens) * max(1, columns), max(1, columns), 1)
    factors = Region(scales, (slots, tokens, columns), strides, "uint8")
    saved = whole.num_bytes - values.num_bytes - factors.num_bytes
    regions: list[tuple[str, Region]] = []
    for name, region in layout.regions:
        if name == "combine":
            regions += [(name, values), ("combine_sf", factors)]
        else:
            moves = region.offset > whole.offset
            regions.append((name, replace(region, offset=region.offset - moves * saved)))
    return replace(layout, num_bytes=layout.num_bytes - saved, regions=tuple(regions))
