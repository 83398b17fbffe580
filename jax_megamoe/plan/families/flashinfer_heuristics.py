"""FlashInfer's size choices for its SM90 FP4 kernels: tile, schedule, pool, shared memory.

Source: flashinfer-python 0.7.4's host code, read off recorded plans. What its host
refuses though its kernels can run it, `flashinfer_limits` decides anew.
"""

from dataclasses import dataclass, replace
from typing import Literal

from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.device import SM100_SHARED_MEMORY

BLOCK_K = 128
THREADS, DECODE_THREADS = 384, 256
POOL_MULTIPLE, POOL_PADDING = 384, 191
"""The pool is sized for tiles of up to 192 rows, whichever are used."""

_WAVES = ((1, 24), (8, 16), (16, 24))
"""MXFP4: most tokens, experts per wave; 48 above."""
_H20_SMS, _H200_SMS = 78, 132
_MAX_PUSHED_TOKENS, _MAX_PUSHED_TILE = 64, 24

WeightKind = Literal["mxfp4", "nvfp4"]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a plan depends on: one launch's sizes.

    Attributes:
        num_sms: blocks of the grid, one for each streaming multiprocessor.
        max_num_tokens: tokens per rank that the buffer holds.
        num_tokens: this call's tokens on this rank.
    """

    num_sms: int
    num_ranks: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    max_num_tokens: int
    num_tokens: int

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.num_ranks

    @property
    def pool_tokens(self) -> int:
        """Rows of received tokens, each expert padded to a tile."""
        received = self.num_ranks * self.max_num_tokens * min(self.top_k, self.local_experts)
        return align(received + self.local_experts * POOL_PADDING, POOL_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How a fused kernel runs a number of tokens: its template's choices.

    Attributes:
        block_m: rows of a tile.
        experts_per_wave: experts whose layer 1 runs before their layer 2 (static scheduler).
        stages: of the operand pipeline.
        swap_ab: weights are the tensor core's M, tokens its N.
        mode2_decoder: NVFP4: the order of the decoder's instructions.
        single_dispatch_warp: one of two dispatch warps routes.
        interleaved: blocks take tasks from counters; else waves of experts.
        rs_swap_ab: weights are decoded into registers.
        push_dispatch: the source rank writes rows into the owner's pool (NVFP4).
        no_clean_barrier: two pools alternate (NVFP4, with push).
    """

    block_m: int
    experts_per_wave: int
    stages: int
    swap_ab: bool
    mode2_decoder: bool
    single_dispatch_warp: bool
    interleaved: bool = True
    rs_swap_ab: bool = False
    push_dispatch: bool = False
    no_clean_barrier: bool = False

    @property
    def block_n(self) -> int:
        """Weight rows of a tile."""
        return 128 if self.block_m == 128 else 256

    @property
    def scale_columns(self) -> int:
        """Columns of layer 2's input that share a scale: a tile's gated columns."""
        return self.block_n // 2

    def decodes_apart(self, kind: WeightKind) -> bool:
        """Whether two more warpgroups decode the weights."""
        return kind == "mxfp4" and self.swap_ab and not self.rs_swap_ab and self.block_m >= 16

    def threads(self, kind: WeightKind) -> int:
        """Threads of a block."""
        return THREADS + (DECODE_THREADS if self.decodes_apart(kind) else 0)


def scale_pool_tokens(pool_tokens: int) -> int:
    """Rows that FlashInfer's host reserves for scales: 8-row tiles, each padded to 128."""
    return 16 * pool_tokens


def shared_memory(kind: WeightKind, sizes: Sizes, schedule: Schedule) -> int:
    """Bytes of dynamic shared memory that a fused kernel uses."""
    tile, width = schedule.block_m, schedule.block_n
    dispatch_rows = 1 if schedule.single_dispatch_warp else 2
    output = BLOCK_K * 64 if tile == 128 else tile * width // 2
    exchange = 2 * tile
    if schedule.swap_ab:
        output, exchange = max(output, 2 * tile * width), max(exchange, 8 * tile)
    packed = 8704 * width // 128 if kind == "mxfp4" else 80 * width
    ring = 4 if schedule.decodes_apart(kind) else 0
    scales = (2 if tile == 128 else 1) * align(4 * tile, 128)
    gemm = (
        align(4 * sizes.num_experts, 1024)
        + align(sizes.hidden_size * dispatch_rows, 1024)
        + (2048 if kind == "mxfp4" else 1024)
        + align(output + 4 * exchange, 1024)
        + schedule.stages * (128 * tile + packed + scales)
        + _decoded_tiles(kind, sizes, schedule) * 128 * width
    )
    combine = 48 * sizes.hidden_size // combine_chunks(sizes.hidden_size)
    barriers = 8 * (18 + 2 * schedule.stages + ring)
    tasks = 0 if kind == "nvfp4" and not schedule.interleaved else 96
    return max(gemm, combine) + barriers + tasks


def combine_chunks(hidden_size: int) -> int:
    """Parts in which a token's row is combined."""
    return 1 if hidden_size <= 4096 else 2


def _decoded_tiles(kind: WeightKind, sizes: Sizes, schedule: Schedule) -> int:
    """Tiles of decoded weights in shared memory."""
    if schedule.block_m == 128:
        return 2
    if kind == "mxfp4":
        return 2 if schedule.decodes_apart(kind) else 0 if schedule.rs_swap_ab else 1
    return 0 if schedule.rs_swap_ab and sizes.num_sms == _H20_SMS else schedule.stages


def _balanced(sizes: Sizes, tile: int) -> int:
    """Tokens of a rank at which an expert gets `tile` rows on average."""
    return tile * sizes.num_experts // (sizes.num_ranks * sizes.top_k)


def _most_swapped(sizes: Sizes) -> int:
    """Most tokens for which the MXFP4 kernel takes tokens as the tensor core's N."""
    return max(16, _balanced(sizes, 24) * _H20_SMS // sizes.num_sms)


def schedule_changes(kind: WeightKind, sizes: Sizes) -> tuple[int, ...]:
    """Numbers of tokens up to which one schedule holds: no other ends one."""
    if kind == "mxfp4":
        few = tuple(_balanced(sizes, tile) * 7 // 10 for tile in (8, 24, 32))
        return (*(most for most, _ in _WAVES), *few, _most_swapped(sizes))
    tuned = _geometry(sizes)
    ends = tuple(tile[0] for tile in _GENERAL_TILES)
    if tuned is None:
        return ends
    own = (*tuned.tiles, (tuned.registers,), *tuned.arms)
    return (*ends, *(end[0] for end in own))


def mxfp4_schedule(sizes: Sizes) -> Schedule:
    """The MXFP4 kernel's schedule. No tokens are scheduled as one is."""
    tokens = max(1, sizes.num_tokens)
    swap = tokens <= _most_swapped(sizes)
    tile = 64
    if swap:
        tile = next((b for b in (8, 24, 32) if tokens <= _balanced(sizes, b) * 7 // 10), 32)
    registers = swap and tile == 8 and (sizes.num_sms <= _H20_SMS or tokens > 16)
    wave = next((n for most, n in _WAVES if tokens <= most), 48)
    wave = min(wave, sizes.local_experts)
    while sizes.local_experts % wave:
        wave -= 1
    return Schedule(
        block_m=tile,
        experts_per_wave=wave,
        stages=8 if registers else 4 if tile == 8 else 3,
        swap_ab=swap,
        mode2_decoder=True,
        single_dispatch_warp=swap,
        rs_swap_ab=registers,
    )


@dataclass(frozen=True)
class _Tuned:
    """A geometry for which FlashInfer measured schedules on 8 ranks.

    Attributes:
        tiles: on 78 SMs: most tokens, tile, experts per wave.
        registers: on 78 SMs, most tokens with weights decoded into registers.
        arms: on 132 SMs: most tokens, scheduler.
        push: by SMs: most tokens, and whether pools alternate.
    """

    tiles: tuple[tuple[int, int, int], ...]
    registers: int
    arms: tuple[tuple[int, Literal["registers", "static", "interleaved"]], ...]
    push: dict[int, tuple[tuple[int, bool], ...]]


_TUNED = {
    (4096, 256, 6): _Tuned(
        ((8, 8, 16), (16, 8, 32), (64, 24, 32), (128, 24, 16)),
        128,
        ((35, "registers"), (64, "static")),
        {_H20_SMS: ((16, False), (64, True)), _H200_SMS: ((32, False),)},
    ),
    (7168, 384, 6): _Tuned(
        ((8, 8, 48), (16, 8, 24), (64, 24, 48), (191, 24, 16)),
        191,
        ((128, "registers"),),
        {_H20_SMS: ((16, True),), _H200_SMS: ((32, False), (64, True))},
    ),
    (6144, 384, 8): _Tuned(
        ((8, 8, 48), (16, 8, 24), (64, 24, 48), (144, 24, 16)),
        144,
        ((16, "registers"), (32, "interleaved"), (96, "registers")),
        {_H20_SMS: ((16, True), (32, False)), _H200_SMS: ((32, False),)},
    ),
}
"""By hidden size, experts and top-k."""

_UNTUNED_PUSH = ((32, False),)
# Most tokens, tile, experts per wave, stages, mode2 decoder, single dispatch warp.
_GENERAL_TILES = (
    (1, 8, 24, 4, True, True),
    (8, 8, 16, 4, True, True),
    (16, 8, 24, 4, True, True),
    (32, 16, 48, 3, True, False),
    (64, 24, 48, 3, False, True),
    (256, 64, 48, 3, True, False),
)
_LARGE_TILE = (0, 128, 48, 6, True, False)
# Tile, experts per wave, stages: taken in order where a schedule exceeds the shared memory.
_SMALLER = ((64, 48, 3), (24, 48, 3), (16, 48, 3), (8, 24, 3))


def nvfp4_schedule(
    sizes: Sizes,
    force_push: bool | None = None,
    force_rotation: bool | None = None,
    *,
    pushes: bool = True,
) -> Schedule | None:
    """The NVFP4 kernel's schedule; None: none fits the shared memory. No tokens are scheduled as
    one is.

    Args:
        sizes: of the launch.
        force_push: instead of the table of calls whose source pushes rows.
        force_rotation: instead of the table of calls whose pools alternate.
        pushes: False: rows are pulled, whatever the table says.
    """
    sizes = replace(sizes, num_tokens=max(1, sizes.num_tokens))
    force_push = force_push if pushes else False

    def finished(tile: int, wave: int, stages: int, mode2: bool, single: bool) -> Schedule:
        tiled = _tiled(sizes, tile, wave, stages, mode2, single)
        return _dispatch(sizes, _arm(sizes, tiled), force_push, force_rotation)

    chosen = _tuned_tile(sizes) or next(
        (t for t in _GENERAL_TILES if sizes.num_tokens <= t[0]), _LARGE_TILE
    )
    schedule = finished(*chosen[1:])
    first = schedule
    candidates = [(8, schedule.experts_per_wave, 3)] * (first.block_m == 8 and first.stages == 4)
    candidates += [c for c in _SMALLER if c[0] < first.block_m]
    for tile, wave, stages in candidates:
        if shared_memory("nvfp4", sizes, schedule) <= SM100_SHARED_MEMORY:
            break
        schedule = finished(tile, wave, stages, first.mode2_decoder, first.single_dispatch_warp)
    return schedule if shared_memory("nvfp4", sizes, schedule) <= SM100_SHARED_MEMORY else None


def _geometry(sizes: Sizes) -> _Tuned | None:
    key = sizes.hidden_size, sizes.num_experts, sizes.top_k
    return _TUNED.get(key) if sizes.num_ranks == 8 else None


def _tuned_tile(sizes: Sizes) -> tuple[int, int, int, int, bool, bool] | None:
    tuned = _geometry(sizes)
    if tuned is None or sizes.num_sms != _H20_SMS:
        return None
    found = next((t for t in tuned.tiles if sizes.num_tokens <= t[0]), None)
    return None if found is None else (*found, 6, True, True)


def _tiled(sizes: Sizes, tile: int, wave: int, stages: int, mode2: bool, single: bool) -> Schedule:
    wave = min(wave, sizes.local_experts)
    while sizes.local_experts % wave:
        wave += 1
    return Schedule(
        block_m=tile,
        experts_per_wave=wave,
        stages=stages,
        swap_ab=tile <= 32,
        mode2_decoder=mode2,
        single_dispatch_warp=single,
    )


def _arm(sizes: Sizes, schedule: Schedule) -> Schedule:
    """The schedule with the scheduler and decoder that FlashInfer measured as fastest."""
    tuned = _geometry(sizes)
    if tuned is None:
        return schedule
    arms = tuned.arms if sizes.num_sms == _H200_SMS else ((tuned.registers, "registers"),)
    arm = next((arm for most, arm in arms if sizes.num_tokens <= most), "interleaved")
    registers = arm == "registers" and schedule.swap_ab
    return replace(
        schedule,
        interleaved=arm != "static",
        rs_swap_ab=registers,
        mode2_decoder=schedule.mode2_decoder or registers,
    )


def _dispatch(
    sizes: Sizes, schedule: Schedule, force_push: bool | None, force_rotation: bool | None
) -> Schedule:
    """The schedule with its way of dispatching rows."""
    tuned = _geometry(sizes)
    table = _UNTUNED_PUSH if tuned is None else tuned.push.get(sizes.num_sms, _UNTUNED_PUSH)
    rows = next((rotates for most, rotates in table if sizes.num_tokens <= most), None)
    push = sizes.num_ranks == 8 and rows is not None if force_push is None else force_push
    rotates = bool(rows) if force_rotation is None else force_rotation
    rotates = rotates and push
    slots = sizes.local_experts * (2 if rotates else 1)
    room = sizes.pool_tokens // schedule.block_m // slots * schedule.block_m
    push = (
        push
        and schedule.interleaved
        and sizes.num_tokens <= _MAX_PUSHED_TOKENS
        and schedule.block_m <= _MAX_PUSHED_TILE
        and sizes.hidden_size % 1024 == 0
        and sizes.local_experts <= sizes.num_sms
        and sizes.num_tokens * sizes.num_ranks <= room
    )
    return replace(schedule, push_dispatch=push, no_clean_barrier=push and rotates)


@dataclass(frozen=True)
class SplitSchedule:
    """How FlashInfer's pair of NVFP4 kernels runs a number of tokens. They are not offered (their
    first one races in shared memory); the rule is kept to compare with recorded plans.

    Attributes:
        stages: of the two kernels' operand pipelines.
        smem: their dynamic shared memory, bytes.
        experts_per_wave: experts whose layer 1 runs before their layer 2.
        counts_arrivals: a counter for each pool block instead of a mask.
    """

    stages: tuple[int, int]
    smem: tuple[int, int]
    experts_per_wave: int
    counts_arrivals: bool


def split_schedule(sizes: Sizes) -> SplitSchedule:
    """The schedule of the NVFP4 pair."""
    local, width = sizes.local_experts, sizes.intermediate_size
    likely = sizes.num_tokens * sizes.num_ranks * sizes.top_k / sizes.num_experts
    counters = align(4 * sizes.num_experts, 1024)
    fixed = (
        counters + align(2 * sizes.hidden_size, 1024) + 1024 + 8192 + 144,
        counters + 1024 + 17_408 + 128,
    )
    stage = (33_824, 33_304)
    first, second = ((SM100_SHARED_MEMORY - f) // s for f, s in zip(fixed, stage, strict=True))
    if likely > 8:
        first = min(first, 6)
    if likely < 1:
        wave = local
    else:
        blocks = ceil_div(ceil_div(int(likely) + (likely > int(likely)), 128) * 2 * width, 128)
        wave = min(ceil_div(2 * sizes.num_sms, blocks), local)
        while local % wave:
            wave += 1
    return SplitSchedule(
        (first, second),
        (fixed[0] + first * stage[0], fixed[1] + second * stage[1]),
        wave,
        likely <= 32 or likely >= 128,
    )
