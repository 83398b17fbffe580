"""What a kernel family is: facts about the kernels of one source, and the plans of their calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from jax_megamoe.config import MoEConfig
from jax_megamoe.formats import Rounding
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.launch import LaunchPlan
from jax_megamoe.plan.refusal import Refusal
from jax_megamoe.plan.staging import Routing

FactorRule = Literal["none", "as_stored", "folded", "input_scale_apart"]
"""What becomes of NVFP4's float32 factors before a launch; `launch/factors.py` does it.

* ``none``: the weights have none.
* ``as_stored``: they are operands as they are.
* ``folded``: gate and up have one each, and the inverse of the second inputs' scale is a factor of
  its own that w2's factors take back.
* ``input_scale_apart``: the second inputs' scale is an operand of its own.
"""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One call on one rank, to be planned.

    Attributes:
        config: the layer; its num_shared_experts are to be fused.
        device: where.
        num_ranks: expert-parallel ranks.
        num_tokens: rows of each rank.
        with_stats: tokens per local expert are added to ``stats``.
        l2_activation_scale: the scale of every second input, where the launch has it by value;
            None: it is an operand.
        routing: what topk_ids are; None: physical ids, -1 where unrouted.
        staging_by: one of `staging.STAGINGS`; None: the family's choice.
    """

    config: MoEConfig
    device: DeviceSpec
    num_ranks: int
    num_tokens: int
    with_stats: bool = False
    l2_activation_scale: float | None = 1.0
    routing: Routing | None = None
    staging_by: str | None = None


class KernelFamily(Protocol):
    """Kernels of one source for one architecture that differ in sizes and options alone.

    A family is a constant of its own module in `plan/families/`, and a line of the registry there;
    nothing outside that module asks which family it is.
    """

    @property
    def name(self) -> str:
        """Of its module: ``"<source>_<architecture>_<format>"``."""
        ...

    @property
    def source(self) -> str:
        """Where the kernel comes from: a key of `compile.pins.DISTRIBUTIONS`."""
        ...

    @property
    def implementation(self) -> str:
        """The name that `mega_moe(implementation=)` has for it: who launches its plans."""
        ...

    @property
    def architecture(self) -> str:
        """``"sm90"`` or ``"sm100"``."""
        ...

    @property
    def recipes(self) -> tuple[str, ...]:
        """Names of the recipes that it runs."""
        ...

    @property
    def w13_layout(self) -> str:
        """The row order of w13 that it reads, ``ExpertWeights.layout``."""
        ...

    @property
    def rounding(self) -> Rounding | None:
        """Where it rounds; None: where its recipes say."""
        ...

    @property
    def factors(self) -> FactorRule:
        """What becomes of the weights' global scales."""
        ...

    def runs_on(self, device: DeviceSpec) -> bool:
        """Whether the device is of its architecture."""
        ...

    def unsupported(self, config: MoEConfig) -> Refusal | None:
        """What the kernel lacks of a config of one of its recipes on any device: an activation, a
        fused shared expert."""
        ...

    def refusals(self, request: Request) -> Iterator[Refusal]:
        """Rules that a call breaks, the one that a caller should see first first."""
        ...

    def refusals_of_any(self, request: Request) -> Iterator[Refusal]:
        """Rules that some call of the config with 0 to max_num_tokens tokens breaks."""
        ...

    def plan(self, request: Request) -> LaunchPlan:
        """The launches of a call that `refusals` lets pass."""
        ...
