"""A kernel family that no source has: BF16 on Hopper, two kernels a call, no symmetric buffer."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import INTERLEAVE_8, Rounding
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.kernel_family import FactorRule, Request
from jax_megamoe.plan.launch import KernelLaunch, LaunchPlan, Pointer, Uint32
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.refusal import Refusal, missing, unfit
from jax_megamoe.plan.symmetric_buffer import BufferLayout

MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class ToyFamily:
    """See `KernelFamily`."""

    name: str = "toy_sm90_bf16"
    source: str = "toy"
    implementation: str = "toy_gemms"
    architecture: str = "sm90"
    recipes: tuple[str, ...] = ("bf16",)
    w13_layout: str = INTERLEAVE_8
    rounding: Rounding | None = None
    factors: FactorRule = "none"

    def runs_on(self, device: DeviceSpec) -> bool:
        return device.arch == 90

    def unsupported(self, config: MoEConfig) -> Refusal | None:
        if config.num_shared_experts:
            return missing("num_shared_experts", "0 for the toy", config.num_shared_experts)
        return None

    def refusals(self, request: Request) -> Iterator[Refusal]:
        if not self.runs_on(request.device):
            yield missing("device", "a Hopper for the toy", request.device.arch / 10)
        broken = self.unsupported(request.config)
        if broken is not None:
            yield broken
        if request.num_tokens > MAX_TOKENS:
            yield unfit("num_tokens", f"at most {MAX_TOKENS}", request.num_tokens)

    def refusals_of_any(self, request: Request) -> Iterator[Refusal]:
        yield from self.refusals(replace(request, num_tokens=request.config.max_num_tokens))

    def plan(self, request: Request) -> LaunchPlan:
        layers = (("w13_weight", "hidden"), ("w2_weight", "y"))
        steps = tuple(self._layer(weight, out, request) for weight, out in layers)
        hidden = (request.num_tokens * request.config.top_k, request.config.intermediate_size)
        return LaunchPlan(
            steps,
            BufferLayout(0, request.num_tokens, ()),
            request.num_ranks,
            64,
            scratch=(("hidden", hidden, "bfloat16"),),
        )

    def _layer(self, weight: str, out: str, request: Request) -> KernelLaunch:
        types = ("const void*", "void*", "uint32_t")
        kernel = KernelSpec(self.source, "sm_90a", "toy/gemm.cuh", "toy_gemm", (), types)
        arguments = (
            Pointer("weight", Operand(weight)),
            Pointer("out", Operand(out)),
            Uint32("num_tokens", request.num_tokens),
        )
        config = LaunchConfig((request.device.num_sms, 1, 1), (128, 1, 1))
        return KernelLaunch(kernel, config, arguments)


FAMILY = ToyFamily()
