"""What every SM100 launch has in common: tensor maps, template arguments and launch shape.

Operands are swapped in these kernels: weight rows are the matrix multiply's M, tokens its N.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from jax_megamoe.plan import heuristics
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.expert_maps import expert_maps
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import (
    KernelArgument,
    KernelLaunch,
    Pointer,
    SymmetricBuffer,
    TensorMap,
    optional,
)
from jax_megamoe.plan.operand import Operand
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_traits import Sm100Traits
from jax_megamoe.plan.symmetric_buffer import BufferLayout, sm100_layout

LOCALITY_TABLE = "sm_locality_domains"


def locality_table(num_sms: int) -> bytes:
    """Memory domain of every SM, alternating by pairs: what DeepGEMM assumes without its probe.

    Kernels read it at the number of the SM they run on (%smid), so it needs an entry for each SM of
    the device, whatever number of them a launch uses.
    """
    return bytes(sm // 2 % 2 for sm in range(num_sms))


@dataclass(frozen=True)
class Sm100Launch:
    """One SM100 launch being planned.

    Attributes:
        traits: of the kernel.
        problem: what it computes.
        device: where.
    """

    traits: Sm100Traits
    problem: Problem
    device: DeviceSpec

    @cached_property
    def layout(self) -> BufferLayout:
        """The symmetric buffer's layout."""
        return sm100_layout(self.traits, self.problem, self.device.num_sms)

    @cached_property
    def tiles(self) -> heuristics.Tiles:
        """Tile heights, stages and shared memory."""
        return heuristics.tiles(self.traits, self.problem, self.device)

    def head(self) -> list[str]:
        """Template arguments every kernel starts with: sizes and the tile."""
        problem = self.problem
        numbers = [
            self.layout.max_num_tokens,
            problem.hidden_size,
            problem.intermediate_size,
            problem.num_experts,
            problem.num_shared_experts,
            problem.top_k,
            self.tiles.block_m,
            heuristics.BLOCK_N,
            self.traits.block_k,
        ]
        return list(map(str, numbers))

    def rings(self) -> list[str]:
        """Ring rows, and scale rows where there are scales."""
        ring = self.layout["l1_acts"].shape[0]
        scales = heuristics.scale_ring_tokens(self.traits, ring)
        return [str(ring), str(scales)] if scales else [str(ring)]

    def machine(self) -> list[str]:
        """Stages, pull size, threads, SMs and ranks."""
        numbers = [
            self.tiles.stages,
            self.tiles.pull_bytes,
            heuristics.DISPATCH_THREADS,
            heuristics.LOAD_THREADS,
            heuristics.EPILOGUE_THREADS,
            self.device.num_sms,
            self.problem.num_ranks,
        ]
        return list(map(str, numbers))

    def output(self) -> Pointer:
        """The result; null without tokens (the launch still has to happen)."""
        return optional("y", "y", self.problem.num_tokens > 0)

    def stats(self) -> Pointer:
        """The counter of tokens per local expert."""
        return optional("cumulative_local_expert_recv_stats", "stats", self.problem.stats)

    def maps(self) -> list[TensorMap]:
        """Tensor maps of the routed experts, then of the shared ones."""
        return expert_maps(self.traits, self.problem, self.layout, self.tiles)

    def locality(self) -> Pointer:
        """The table of SM locality domains, a constant of the plan."""
        return Pointer(LOCALITY_TABLE, Operand(LOCALITY_TABLE))

    def launch(
        self,
        template_args: list[str],
        arguments: list[KernelArgument],
        types: list[str],
        arch: str,
    ) -> KernelLaunch:
        """The launch, given the arguments and the C++ types of those that are not maps."""
        plain = iter(types)
        kernel = KernelSpec(
            self.traits.source,
            arch,
            self.traits.header,
            self.traits.symbol,
            tuple(template_args),
            tuple(self._type(argument, plain) for argument in arguments),
        )
        threads = (
            heuristics.DISPATCH_THREADS + heuristics.LOAD_THREADS + heuristics.EPILOGUE_THREADS
        )
        grid, cluster = (self.device.num_sms, 1, 1), (2, 1, 1)
        config = LaunchConfig(grid, (threads, 1, 1), cluster, self.tiles.smem)
        return KernelLaunch(kernel, config, tuple(arguments))

    def _type(self, argument: KernelArgument, plain: Iterator[str]) -> str:
        if isinstance(argument, TensorMap):
            return "cute::TmaDescriptor"
        if isinstance(argument, SymmetricBuffer):
            return f"deep_gemm::layout::SymBuffer<{self.problem.num_ranks}>"
        return next(plain)
