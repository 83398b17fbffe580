"""The flashinfer source's SM90 kernels of 4-bit experts: what both families share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import Rounding
from jax_megamoe.plan import limits, staging
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import flashinfer_launch
from jax_megamoe.plan.families.flashinfer_buffer import buffer_layout
from jax_megamoe.plan.families.flashinfer_heuristics import Schedule, WeightKind, schedule_changes
from jax_megamoe.plan.families.flashinfer_limits import size_violations
from jax_megamoe.plan.kernel_family import FactorRule, Request
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.problem import Problem, problem_of
from jax_megamoe.plan.refusal import Refusal, missing, unfit


@dataclass(frozen=True, kw_only=True)
class FlashInferFamily:
    """See `KernelFamily`.

    Attributes:
        kind: of weights, as its heuristics name it.
    """

    kind: WeightKind
    name: str
    recipes: tuple[str, ...]
    w13_layout: str
    source: str = flashinfer_launch.SOURCE
    implementation: str = "deep_gemm"
    architecture: str = "sm90"
    rounding: Rounding | None = None
    factors: FactorRule = "as_stored"

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether the device is a Hopper."""
        return device.arch == limits.SM90_ARCH

    def unsupported(self, config: MoEConfig) -> Refusal | None:
        """An activation but SwiGLU without parameters, or a fused shared expert."""
        activation, (recipe,) = config.activation, self.recipes
        if (activation.name, activation.alpha, activation.beta) != ("swiglu", 1.0, 0.0):
            got = f"{activation.name} of alpha {activation.alpha}, beta {activation.beta}"
            return missing("activation", f"swiglu of alpha 1, beta 0 for {recipe}", got)
        if config.num_shared_experts:
            expected = f"0 for {recipe}"
            got = config.num_shared_experts
            return missing("num_shared_experts", expected, got, "never fused")
        return None

    def refusals(self, request: Request) -> Iterator[Refusal]:
        """Rules that a call breaks."""
        device, (recipe,) = request.device, self.recipes
        if not self.runs_on(device):
            expected = f"compute capability 9.0 for {recipe}"
            yield missing("device", expected, device.arch / 10)
        lacking = self.unsupported(request.config)
        if lacking is not None:
            yield lacking
        problem = self.problem(request)
        yield from size_violations(self.kind, problem)
        if device.num_sms < 2:
            yield unfit("num_sms", "at least 2", device.num_sms)
        if self._schedule(problem, device) is None:
            expected = f"a schedule in {device.smem_capacity} bytes of shared memory"
            got = f"none for hidden_size {problem.hidden_size}, {problem.num_experts} experts"
            hint = "use fewer experts or a smaller hidden_size"
            yield unfit("shared memory", expected, got, hint)
        staged = self._staged_by(problem, request)
        if isinstance(staged, Refusal):
            yield staged

    def refusals_of_any(self, request: Request) -> Iterator[Refusal]:
        """Rules that some call with 0 to max_num_tokens tokens breaks."""
        yield from self.refusals(replace(request, num_tokens=0))
        sizes = flashinfer_launch.sizes_of(self.problem(request), request.device)
        most = request.config.max_num_tokens
        ends = {most, *schedule_changes(self.kind, sizes)}
        for num_tokens in sorted(ends | {end + 1 for end in ends}):
            if num_tokens <= most:
                yield from self.refusals(replace(request, num_tokens=num_tokens))

    def plan(self, request: Request) -> LaunchPlan:
        """A staging kernel, and the kernel from dispatch to combine."""
        problem, device = self.problem(request), request.device
        layout = buffer_layout(flashinfer_launch.sizes_of(problem, device))
        mega = flashinfer_launch.mega_launch(self.kind, problem, device, layout)
        schedule = self._schedule(problem, device)
        assert schedule is not None
        staged_by = self._staged_by(problem, request)
        steps = (mega,)
        if staged_by == "jax_megamoe":
            first = staging.staging_launch(
                problem, layout, mega, schedule.block_m, "kFp8Block", request.routing
            )
            steps = (first, mega)
        return LaunchPlan(
            steps,
            layout,
            problem.num_ranks,
            schedule.block_m,
            unstaged=staging.input_regions(problem, layout) if staged_by == "none" else (),
        )

    def problem(self, request: Request) -> Problem:
        """The numbers of a call."""
        problem = problem_of(request.config, request.num_ranks, request.num_tokens)
        return replace(problem, stats=request.with_stats)

    def _schedule(self, problem: Problem, device: DeviceSpec) -> Schedule | None:
        sizes = flashinfer_launch.sizes_of(problem, device)
        return flashinfer_launch.schedule(self.kind, sizes, device.smem_capacity)

    def _staged_by(self, problem: Problem, request: Request) -> str | Refusal:
        return staging.chosen(problem, request.routing, request.staging_by, has_own=False)
