"""The flashinfer source's SM90 kernels of 4-bit experts: MXFP4 and NVFP4 weights, E4M3 tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax_megamoe._checks import message
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import flashinfer_launch
from jax_megamoe.plan.families.flashinfer_buffer import buffer_layout
from jax_megamoe.plan.families.flashinfer_heuristics import Schedule, WeightKind, schedule_changes
from jax_megamoe.plan.families.flashinfer_limits import size_violations
from jax_megamoe.plan.launch import KernelLaunch
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.symmetric_buffer import BufferLayout

SOURCE = "flashinfer"


@dataclass(frozen=True)
class FlashInferKernel:
    """One kernel.

    Attributes:
        kind: of weights.
        recipe: name of what it runs.
    """

    kind: WeightKind
    recipe: str

    def layout(self, problem: Problem, device: DeviceSpec) -> BufferLayout:
        """The symmetric buffer; the same for every number of tokens."""
        return buffer_layout(flashinfer_launch.sizes_of(problem, device))

    def tile_height(self, problem: Problem, device: DeviceSpec) -> int:
        """Rows of a tile."""
        chosen = self._schedule(problem, device)
        assert chosen is not None
        return chosen.block_m

    def launch(self, problem: Problem, device: DeviceSpec) -> KernelLaunch:
        """The kernel from dispatch to combine. Limits are not checked here."""
        layout = self.layout(problem, device)
        return flashinfer_launch.mega_launch(self.kind, problem, device, layout)

    def violations(self, problem: Problem, device: DeviceSpec) -> Iterator[Exception]:
        """Broken rules of a launch, NotImplementedError or ValueError, most general first."""
        if device.arch != 90:
            expected = f"compute capability 9.0 for {self.recipe}"
            yield NotImplementedError(message("device", expected, device.arch / 10))
        if (problem.activation, problem.alpha, problem.beta) != ("swiglu", 1.0, 0.0):
            got = f"{problem.activation} of alpha {problem.alpha}, beta {problem.beta}"
            expected = f"swiglu of alpha 1, beta 0 for {self.recipe}"
            yield NotImplementedError(message("activation", expected, got))
        if problem.num_shared_experts:
            expected = f"0 for {self.recipe}"
            yield NotImplementedError(
                message("num_shared_experts", expected, problem.num_shared_experts, "never fused")
            )
        yield from size_violations(self.kind, problem)
        if device.num_sms < 2:
            yield ValueError(message("num_sms", "at least 2", device.num_sms))
        if self._schedule(problem, device) is None:
            expected = f"a schedule in {device.smem_capacity} bytes of shared memory"
            hint = "use fewer experts or a smaller hidden_size"
            got = f"none for hidden_size {problem.hidden_size}, {problem.num_experts} experts"
            yield ValueError(message("shared memory", expected, got, hint))

    def all_violations(self, problem: Problem, device: DeviceSpec) -> Iterator[Exception]:
        """The same for any number of tokens up to max_num_tokens."""
        yield from self.violations(replace(problem, num_tokens=0), device)
        sizes = flashinfer_launch.sizes_of(problem, device)
        ends = {problem.max_num_tokens, *schedule_changes(self.kind, sizes)}
        for num_tokens in sorted(ends | {end + 1 for end in ends}):
            if num_tokens <= problem.max_num_tokens:
                yield from self.violations(replace(problem, num_tokens=num_tokens), device)

    def _schedule(self, problem: Problem, device: DeviceSpec) -> Schedule | None:
        sizes = flashinfer_launch.sizes_of(problem, device)
        return flashinfer_launch.schedule(self.kind, sizes, device.smem_capacity)


KERNELS: Mapping[str, FlashInferKernel] = MappingProxyType(
    {
        "mxfp4_block": FlashInferKernel("mxfp4", "mxfp4_block"),
        "nvfp4_block": FlashInferKernel("nvfp4", "nvfp4_block"),
    }
)
"""By the name of their recipe."""
