"""A kernel family of DeepGEMM's for SM100: what such families have in common."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jax_megamoe.config import Activation, MoEConfig
from jax_megamoe.formats import INTERLEAVE_8, Rounding
from jax_megamoe.plan import heuristics, limits, staging
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.kernel_family import FactorRule, Request
from jax_megamoe.plan.launch import Fill, KernelLaunch, LaunchPlan
from jax_megamoe.plan.operand import SYMMETRIC_BUFFER, Operand
from jax_megamoe.plan.problem import Problem, problem_of
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.plan.sm100 import LOCALITY_TABLE, Sm100Launch, locality_table
from jax_megamoe.plan.sm100_traits import Sm100Traits
from jax_megamoe.plan.symmetric_buffer import (
    READY_BYTES,
    READY_OFFSET,
    BufferLayout,
)

_TILE_HEIGHTS = (16, 32, 64, 128, 192, 240)


def own_name(activation: Activation) -> str:
    """The activation's own name: the kernel takes its parameters as arguments."""
    return activation.name


@dataclass(frozen=True, kw_only=True)
class Sm100Family:
    """One MegaMoE kernel of a source on SM100, or two that differ in the activation; see
    `KernelFamily`.

    Attributes:
        traits: of the kernel.
        variants: traits by activation, where that has a kernel of its own.
        mega_launch: the kernel from dispatch to combine; limits are not checked there.
        own_staging: the source's kernel before it; None: it has none.
        activation_name: the source's name of an activation, or why it has none.
        clears_ready_words: graph replays repeat the grid ids that the kernel marks ready words
            with, and it does not clear them itself.
    """

    name: str
    source: str
    recipes: tuple[str, ...]
    traits: Sm100Traits
    mega_launch: Callable[[Sm100Launch], KernelLaunch]
    variants: Mapping[str, Sm100Traits] = field(default_factory=dict[str, Sm100Traits])
    own_staging: Callable[[Sm100Traits, Problem, BufferLayout], KernelLaunch] | None = None
    activation_name: Callable[[Activation], str | Refusal] = own_name
    clears_ready_words: bool = False
    w13_layout: str = INTERLEAVE_8
    rounding: Rounding | None = None
    factors: FactorRule = "none"
    implementation: str = "deep_gemm"
    architecture: str = "sm100"

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether the device is of SM100's family."""
        return device.arch in limits.SM100_ARCHS

    def traits_of(self, config: MoEConfig) -> Sm100Traits:
        """Traits of the kernel that runs the config's activation."""
        return self.variants.get(config.activation.name, self.traits)

    def unsupported(self, config: MoEConfig) -> Refusal | None:
        """An activation or a precision of a shared expert that the kernel lacks."""
        name, traits = self.activation_name(config.activation), self.traits_of(config)
        if isinstance(name, Refusal):
            return name
        return next(limits.sm100_features(traits, self._problem(config, 1, 0)), None)

    def refusals(self, request: Request) -> Iterator[Refusal]:
        """Rules that a call breaks."""
        name = self.activation_name(request.config.activation)
        if isinstance(name, Refusal):
            yield name
        problem = self.problem(request)
        yield from limits.sm100_violations(self.traits_of(request.config), problem, request.device)
        staged = self._staged_by(problem, request)
        if isinstance(staged, Refusal):
            yield staged

    def refusals_of_any(self, request: Request) -> Iterator[Refusal]:
        """Rules that some call with 0 to max_num_tokens tokens breaks."""
        empty = replace(request, num_tokens=0)
        yield from self.refusals(empty)
        traits, device = self.traits_of(request.config), request.device
        problem = self.problem(empty)
        every = range(request.config.max_num_tokens + 1)
        for height in _TILE_HEIGHTS:
            for broken in limits.sm100_tile_violations(traits, problem, device, height):
                reached = (
                    heuristics.block_m(traits, replace(problem, num_tokens=num_tokens), device)
                    for num_tokens in every
                )
                if height in reached:
                    yield broken

    def plan(self, request: Request) -> LaunchPlan:
        """A fill where one is needed, a staging kernel, and the kernel from dispatch to combine."""
        traits, problem = self.traits_of(request.config), self.problem(request)
        launch = Sm100Launch(traits, problem, request.device)
        layout, mega, height = launch.layout, self.mega_launch(launch), launch.tiles.block_m
        steps: list[KernelLaunch | Fill] = []
        if self.clears_ready_words and problem.num_ranks > 1:
            steps.append(Fill(Operand(SYMMETRIC_BUFFER, READY_OFFSET), READY_BYTES))
        staged_by = self._staged_by(problem, request)
        if staged_by == "source":
            assert self.own_staging is not None
            steps.append(self.own_staging(traits, problem, layout))
        elif staged_by == "jax_megamoe":
            steps.append(
                staging.staging_launch(
                    problem, layout, mega, height, traits.staged_as, request.routing
                )
            )
        table = (LOCALITY_TABLE, locality_table(request.device.all_sms))
        return LaunchPlan(
            (*steps, mega),
            layout,
            problem.num_ranks,
            height,
            constants=(table,) if traits.locality_table else (),
            unstaged=staging.input_regions(problem, layout) if staged_by == "none" else (),
            scratch=staging.scratch(problem, mega) if staged_by == "jax_megamoe" else (),
        )

    def problem(self, request: Request) -> Problem:
        """The numbers of a call."""
        problem = self._problem(request.config, request.num_ranks, request.num_tokens)
        return replace(
            problem, stats=request.with_stats, l2_activation_scale=request.l2_activation_scale
        )

    def _problem(self, config: MoEConfig, num_ranks: int, num_tokens: int) -> Problem:
        name = self.activation_name(config.activation)
        has_factors = self.factors != "none"
        return replace(
            problem_of(config, num_ranks, num_tokens),
            activation=config.activation.name if isinstance(name, Refusal) else name,
            x_scales=has_factors,
            l1_alphas=has_factors,
            l2_alphas=has_factors,
            l2_act_scales=has_factors,
        )

    def _staged_by(self, problem: Problem, request: Request) -> str | Refusal:
        has_own = self.own_staging is not None
        return staging.chosen(problem, request.routing, request.staging_by, has_own=has_own)
