"""Cells: calls of `mega_moe` by the kernels on the emulator, and how far they are from `reference`.

A cell says what differs from the smallest call. `families` lists kernel sources with the formats
that they have; `accepted` are README's cells, one call each. `grid.py` varies them.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import cases
import jax
import jax.numpy as jnp
import numpy as np
import tolerances
from cells_table import ACTIVATIONS, SIZES

import jax_megamoe as mm
from emulator.planned import Buffers
from emulator.standing_in import StandIn, standing_in
from jax_megamoe import check_supported
from jax_megamoe.launch import grouped
from jax_megamoe.plan import check_sizes
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.families import sources
from jax_megamoe.plan.launch import LaunchPlan, Pointer
from jax_megamoe.plan.refusal import Refusal

GROUPED = "humming"
"""The source of implementation ``grouped``."""
SHORT = {"clamped": "clamped swiglu", "gpt_oss": "GPT-OSS's swiglu"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One call.

    Attributes:
        form, source: of the weights and the kernel; `GROUPED` are the grouped products.
        arch: compute capability times ten; 0: of the source's kernel.
        activation: a key of `cells_table.ACTIVATIONS`.
        shared: precision of a fused shared expert, or "".
        tokens: rows of each rank.
        max_tokens: 0: as many as `tokens`, at least 32.
        unrouted: share of ids that are -1.
        idle_experts, idle_ranks: experts that nobody chooses; ranks whose rows choose none.
        mask: a third of the rows is padding.
        biases: of both matmuls; the mega kernels' are folded, the model is 64 columns less wide.
        replicas: experts beyond the logical ones, in a map given with the call.
        delay, seed, grid_id, exact_sums: of the machine.
    """

    form: str
    source: str
    activation: str = "swiglu"
    shared: str = ""
    num_shared: int = 1
    ranks: int = 1
    tokens: int = 33
    experts: int = 8
    top_k: int = 2
    hidden: int = 512
    intermediate: int = 256
    max_tokens: int = 0
    num_sms: int = 4
    unrouted: float = 0.0
    idle_experts: tuple[int, ...] = ()
    idle_ranks: tuple[int, ...] = ()
    mask: bool = False
    stats: bool = False
    biases: bool = False
    replicas: int = 0
    fast_math: bool = True
    reserved_sms: int = 0
    delay: float = 0.0
    seed: int = 1
    grid_id: int = 0
    smid_offset: int = 0
    exact_sums: bool = False
    arch: int = 0

    @property
    def device(self) -> DeviceSpec:
        """The device that the call is planned for."""
        return DeviceSpec(self.arch or _architecture(self.form, self.source), self.num_sms)

    @property
    def implementation(self) -> str:
        """As `mega_moe` names it."""
        return "grouped" if self.source == GROUPED else "deep_gemm"

    def config(self) -> mm.MoEConfig:
        """The layer. Raises ValueError for sizes that no config has."""
        return mm.MoEConfig(
            num_experts=self.experts + self.replicas,
            num_logical_experts=self.experts if self.replicas else None,
            top_k=self.top_k,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            max_num_tokens=self.max_tokens or max(32, self.tokens),
            weight_format=self.form,
            kernel_source=None if self.source == GROUPED else self.source,
            activation=ACTIVATIONS[SHORT.get(self.activation, self.activation)],
            num_shared_experts=self.num_shared if self.shared else 0,
            shared_format=self.shared or None,
            fast_math=self.fast_math,
            reserved_sms=self.reserved_sms,
        )

    def refusal(self) -> str:
        """Why the product refuses the call; empty if it does not."""
        if self.source == GROUPED:
            layout = grouped.layout_of(self.config(), self.device.arch)
            return str(layout) if isinstance(layout, Refusal) else ""
        left = dataclasses.replace(
            self.device, num_sms=self.num_sms - self.reserved_sms, reserved_sms=self.reserved_sms
        )
        try:
            check_supported(self.config(), left, self.ranks)
        except (NotImplementedError, ValueError) as error:
            return str(error)
        return ""

    def __str__(self) -> str:
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)[2:]
            if getattr(self, field.name) != field.default
        ]
        return " ".join([self.source, self.form, *changed])


@functools.cache
def _architecture(form: str, source: str) -> int:
    """The architecture that a source's kernel for a format is for; 100 if it has none."""
    config = mm.MoEConfig(**SIZES, weight_format=form)
    for arch in (100, 90):
        try:
            check_sizes(config, DeviceSpec(arch, 132), 1, source)
        except (NotImplementedError, ValueError):
            continue
        return arch
    return 100


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came out of a cell.

    Attributes:
        error, worst: relative error of all rows, and of the worst, against `reference`.
        equal: share of elements that are equal to its.
        block_m: tile height of the plan; 0: nothing was launched.
        executed: PTX instructions of warps.
        uninitialised: reads of memory that was never written (rows of tiles beyond the tokens).
        cuts: sums of its products were cut along K.
        exact: `error` with exact sums, where `error` is one of an H200's FP8 sums.
    """

    error: float
    worst: float
    equal: float
    block_m: int
    executed: int
    uninitialised: int
    cuts: bool = False
    exact: float | None = None


class CellFailure(AssertionError):
    """The kernel's output is not the cell's."""


def sums_like_hopper(cell: Cell) -> bool:
    """Whether 14 bits of a sum of FP8 products decide how far a cell is from `reference`."""
    return cell.device.arch == 90 and mm.RECIPES[cell.form].activations.name == "fp8_block"


def limit(cell: Cell, cuts: bool = False) -> tolerances.Agreement:
    """How far a cell may be from `reference`; `cuts`: sums of its products are cut along K."""
    if cell.source == GROUPED and cell.biases:
        return tolerances.EMULATED_GROUPED_BIASES
    if sums_like_hopper(cell) and not cell.exact_sums:
        return tolerances.EMULATED_FP8_SUMS
    if cell.source == GROUPED and cell.form == "nvfp4":
        return tolerances.EMULATED_GROUPED_NVFP4
    if cuts and not sums_like_hopper(cell):
        return tolerances.EMULATED_GROUPED_CUT
    return tolerances.EMULATED[cell.form]


def in_its_layout(cell: Cell, weights: mm.ExpertWeights) -> mm.ExpertWeights:
    """Parameters as the cell's implementation reads them."""
    if cell.source != GROUPED:
        return weights
    layout = grouped.layout_of(cell.config(), cell.device.arch)
    assert isinstance(layout, str)
    return mm.to_layout(weights, layout)


@functools.cache
def _inputs(cell: Cell) -> dict[str, Any]:
    """Arguments of `mega_moe` by name; rows of all ranks."""
    config, num_tokens = cell.config(), cell.tokens * cell.ranks
    x, ids, factors = cases.tokens(config, num_tokens)
    rng = np.random.default_rng(7)
    routed = np.asarray(ids).copy()
    routed[rng.random(routed.shape) < cell.unrouted] = -1
    routed[np.isin(routed, cell.idle_experts)] = -1
    for rank in cell.idle_ranks:
        routed[rank * cell.tokens : (rank + 1) * cell.tokens] = -1
    weights = cases.weights(config, biased=cell.biases and cell.source == GROUPED)
    arguments: dict[str, Any] = dict(
        x=x, topk_ids=jnp.asarray(routed), topk_weights=factors, weights=weights
    )
    if cell.biases and cell.source != GROUPED:
        filled_up = cases.filled_up(config, cell.hidden - 64)
        arguments["weights"] = mm.fold_biases(config, filled_up)
    arguments["weights"] = in_its_layout(cell, arguments["weights"])
    if cell.mask:
        arguments["padding_mask"] = jnp.asarray(rng.random(num_tokens) < 0.33)
    if cell.stats:
        arguments["return_stats"] = True
    if cell.replicas:
        placement = np.arange(config.num_experts) % cell.experts
        arguments["eplb"] = mm.replica_map(placement[::-1].copy(), cell.experts)
    return arguments


def forget() -> None:
    """Drops inputs and weights of earlier cells."""
    _inputs.cache_clear()
    cases.weights.cache_clear()


def call(cell: Cell, implementation: str) -> Any:
    """The cell's call of `mega_moe`, over a mesh where there are several ranks."""
    arguments = _inputs(cell)
    if cell.ranks > 1:
        arguments = arguments | dict(mesh=cases.ep_mesh(cell.ranks), axis="ep")
    return mm.mega_moe(**arguments, config=cell.config(), implementation=implementation)


def execute(cell: Cell, stand_in: StandIn, buffers: Buffers | None = None) -> Outcome:
    """Runs a cell by the kernels and by `reference`.

    Args:
        stand_in: for the cell's device, in force.
        buffers: symmetric buffers of an earlier cell with the same layout.

    Raises:
        EmulatorError: a kernel did something wrong.
        CellFailure: counts differ, or a value is not finite.
    """
    stand_in.device = cell.device
    settings = dict(delay=cell.delay, seed=cell.seed, grid_id=cell.grid_id,
                    smid_offset=cell.smid_offset, exact_sums=cell.exact_sums,
                    # FlashInfer's kernels count on lanes that diverged to meet again at once.
                    diverge=cell.source != "flashinfer")  # fmt: skip
    got = stand_in.run(lambda: call(cell, cell.implementation), buffers=buffers, settings=settings)
    want = _reference(cell)
    if cell.stats:
        if not np.array_equal(got[1], want[1]):
            raise CellFailure(f"{cell}: counts {got[1]}, expected {want[1]}")
        got, want = got[0], want[0]
    return _compared(cell, np.asarray(got), np.asarray(want), stand_in)


def _reference(cell: Cell) -> Any:
    """The same call by `reference`: all rows on one rank, but where a rank's row numbers count."""
    if cell.replicas:  # the replica of a choice follows from its row
        return jax.block_until_ready(call(cell, "reference"))
    config = dataclasses.replace(
        cell.config(), max_num_tokens=max(32, cell.ranks * cell.tokens), kernel_source=None
    )
    return jax.block_until_ready(
        mm.mega_moe(**_inputs(cell), config=config, implementation="reference")
    )


def _cuts(plan: LaunchPlan) -> bool:
    """Whether a product of a plan has locks, which tiles cut along K take turns by."""
    return any(
        isinstance(argument, Pointer) and argument.name == "locks" and argument.operand is not None
        for launch in plan.launches
        if launch.kernel.source == GROUPED
        for argument in launch.arguments
    )


def _compared(cell: Cell, got: np.ndarray, want: np.ndarray, stand_in: StandIn) -> Outcome:
    if not np.isfinite(got.astype(np.float32)).all():
        raise CellFailure(f"{cell}: not finite")
    holes = cell.unrouted or cell.mask or cell.idle_experts or cell.idle_ranks
    if want.size and not want.any() and not holes:
        raise CellFailure(f"{cell}: nothing but zeros to compare")
    rows = [cases.relative_error(g, w) for g, w in zip(got, want, strict=True)]
    runs = [*(run for _, run in stand_in.alone), stand_in.last]
    plans = [plan for plan, _ in stand_in.alone] + [c.plan for c in stand_in.captured.values()]
    machines = [run.machine for run in runs if run]
    names = ("shared", "tensor", "global")
    return Outcome(
        error=cases.relative_error(got, want),
        worst=max(rows, default=0.0),
        equal=float((got == want).mean()) if got.size else 1.0,
        block_m=max((plan.block_m for plan in plans), default=0),
        cuts=any(_cuts(plan) for plan in plans),
        executed=sum(machine.count("executed") for machine in machines),
        uninitialised=sum(m.count(f"uninitialised_{n}") for m in machines for n in names),
    )


def check(cell: Cell, stand_in: StandIn, buffers: Buffers | None = None) -> Outcome:
    """`execute`, and the cell's limit; where an H200's FP8 sums allow little else, with exact ones.

    Returns:
        What came out with an H200's sums.

    Raises:
        EmulatorError, CellFailure: the kernel is wrong.
    """
    if not sums_like_hopper(cell):
        return _check_one(cell, stand_in, buffers)
    exact = _check_one(dataclasses.replace(cell, exact_sums=True), stand_in, None)
    return dataclasses.replace(_check_one(cell, stand_in, buffers), exact=exact.error)


def _check_one(cell: Cell, stand_in: StandIn, buffers: Buffers | None) -> Outcome:
    outcome = execute(cell, stand_in, buffers)
    allowed = limit(cell, outcome.cuts)
    if outcome.error > allowed.norm or outcome.worst > allowed.token:
        raise CellFailure(f"{cell}: {outcome}, allowed {allowed}")
    return outcome


def families() -> list[tuple[str, str]]:
    """(format, source) of every kernel family."""
    return [
        (form, source)
        for form in mm.RECIPES
        for source in sources()
        if not Cell(form, source).refusal()
    ]


def accepted() -> Iterator[Cell]:
    """A call of each cell of README's table that the product accepts."""
    for form, source in families():
        allowed = mm.RECIPES[form]
        for name, activation in ACTIVATIONS.items():
            if activation.name not in allowed.functions:
                continue
            for shared in ("", *allowed.shared_formats):
                cell = Cell(form, source, activation=name, shared=shared)
                if not cell.refusal():
                    yield cell


def reuse(cell: Cell, stand_in: StandIn) -> list[Outcome]:
    """Calls of several sizes on one symmetric buffer, garbage where a call must write first.

    One of them routes nothing: the next must find the buffer as the first did.
    """
    outcomes: list[Outcome] = []
    buffers: Buffers | None = None
    sizes = ((16, 0.0), (130, 0.0), (2, 1.0), (34, 0.2), (16, 0.0))
    for i, (tokens, unrouted) in enumerate(sizes):
        changes = dict(tokens=tokens, unrouted=unrouted, max_tokens=130, seed=cell.seed + i)
        one = dataclasses.replace(cell, **changes)
        outcomes.append(check(one, stand_in, buffers))
        assert stand_in.last is not None
        buffers = stand_in.last.buffers
        buffers.poison()
    return outcomes


__all__ = ["Cell", "CellFailure", "Outcome", "accepted", "check", "execute", "families", "forget",
           "in_its_layout", "limit", "reuse", "standing_in"]  # fmt: skip
