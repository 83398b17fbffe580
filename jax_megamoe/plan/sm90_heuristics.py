"""DeepGEMM's size choices for its SM90 kernel (sgl source): pool, tile, schedule, shared memory.

Source: DeepGEMM's host code, read off recorded launches.
"""

import math
from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import align, ceil_div
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.heuristics import received_tokens, tokens_per_expert
from jax_megamoe.plan.problem import Problem

TOKEN_ALIGNMENT = 128
BLOCK_N, BLOCK_K = 256, 128
FRONT_THREADS, MATH_THREADS = 64, 256
PROGRAMMATIC_TOKENS = 256
"""Calls of at most this many tokens per rank may start before their predecessor ended."""

_LAG_UNIT = 4000
_EARLY_COMBINE_STRIPES = 32


def aligned_tokens(problem: Problem) -> int:
    """Tokens per rank that the buffer holds."""
    return align(problem.max_num_tokens, TOKEN_ALIGNMENT)


def pool_tokens(problem: Problem) -> int:
    """Rows for every token that could reach this rank's experts, each expert padded to a tile."""
    received = received_tokens(problem, aligned_tokens(problem))
    return align(received + 127 * problem.local_experts, 128)


def _lag_units(problem: Problem, tokens: int) -> int:
    """How far layer 2 lags behind layer 1 with `tokens` tokens per rank."""
    local = problem.local_experts
    units = 0.45 * local * max(1, ceil_div(tokens * problem.top_k, 1024 * local))
    return min(max(int(units + 0.5), 8), 64)


def lag_base(problem: Problem) -> int:
    """The lag the ring was sized for; 0 when the ring is the whole pool."""
    tokens = aligned_tokens(problem)
    return 0 if tokens < 1024 else _lag_units(problem, tokens)


def ring_tokens(problem: Problem) -> int:
    """Rows of received tokens that are live at once."""
    base, pool = lag_base(problem), pool_tokens(problem)
    return min(pool, align(1024 * base + 4608, 128)) if base else pool


@dataclass(frozen=True)
class Schedule:
    """How the SM90 kernel runs a number of tokens.

    Attributes:
        block_m: tokens of a tile.
        cluster: CTAs that share weight tiles.
        experts_per_wave: experts whose layer 1 runs before their layer 2.
        lag: of layer 2 behind layer 1; 0 for waves.
        stages: of the operand pipeline.
        smem: dynamic shared memory, bytes.
        combine_bytes: of it, what the combine may reuse.
        early_combine: tokens may be combined while the last barrier is waited for.
        publish_batch: pulled rows that share one fence.
        programmatic: the launch may start before its predecessor ended.
    """

    block_m: int
    cluster: int
    experts_per_wave: int
    lag: int
    stages: int
    smem: int
    combine_bytes: int
    early_combine: bool
    publish_batch: int
    programmatic: bool

    @property
    def large(self) -> bool:
        """Whether tiles are 128 tokens high."""
        return self.block_m == 128


def schedule(problem: Problem, device: DeviceSpec) -> Schedule:
    """The schedule for this number of tokens."""
    height = 64 if tokens_per_expert(problem) < 64 else 128
    call = problem.num_tokens_bound or problem.num_tokens
    lag = _lag(problem, height, call)
    waves = problem.local_experts if lag else _experts_per_wave(problem, height, device.num_sms)
    paired = (
        height == 128
        and device.num_sms % 2 == 0
        and problem.intermediate_size // 128 % 2 == 0
        and problem.hidden_size // 256 % 2 == 0
    )
    batch = _publish_batch(problem, height, call, device.num_sms)
    candidate = (
        problem.hidden_size >= 512 * problem.top_k
        and ceil_div(aligned_tokens(problem), 8 * device.num_sms) <= _EARLY_COMBINE_STRIPES
    )
    stages, smem, reusable = _shared_memory(problem, device, height, (candidate, batch > 1))
    early = candidate and min(problem.hidden_size, problem.intermediate_size) // BLOCK_K > stages
    return Schedule(
        height,
        2 if paired else 1,
        waves,
        lag,
        stages,
        smem,
        reusable,
        early,
        batch,
        call <= PROGRAMMATIC_TOKENS,
    )


def _lag(problem: Problem, height: int, call: int) -> int:
    base = lag_base(problem)
    bound = problem.num_tokens_bound or aligned_tokens(problem)
    tokens = min(align(bound, TOKEN_ALIGNMENT), aligned_tokens(problem))
    few = problem.num_tokens <= 256 if height == 64 else call <= 256
    pool = _wave_pool(problem, height, tokens, problem.local_experts)
    if not base or (few and pool <= ring_tokens(problem)):
        return 0
    return _LAG_UNIT + min(_lag_units(problem, tokens), base)


def _wave_pool(problem: Problem, height: int, tokens: int, experts: int) -> int:
    """Most rows that a wave of `experts` experts receives."""
    ranks = problem.num_ranks
    if experts == 1:
        return ranks * tokens
    padded = align(ranks * tokens * problem.top_k + experts * (height - 1), height)
    return min(ranks * tokens * experts, padded)


def _experts_per_wave(problem: Problem, height: int, num_sms: int) -> int:
    local = problem.local_experts
    likely = problem.num_tokens * problem.top_k / local
    tiles = problem.intermediate_size * 2 // BLOCK_N
    if height == 128:
        if likely < 1 or likely > 4:
            return local
    elif problem.num_tokens <= 256 or likely < 1:
        return local
    elif likely > 4:
        return min(local, max(1, num_sms // tiles))
    elif problem.intermediate_size >= 3072 and tiles * local >= 4 * num_sms:
        return local
    return _search_wave(problem, height, num_sms, likely)


def _search_wave(problem: Problem, height: int, num_sms: int, likely: float) -> int:
    """Experts of a wave that fill the SMs about twice, with a well-filled last wave."""
    local = problem.local_experts
    top = max(
        n
        for n in range(1, local + 1)
        if n == 1 or _wave_pool(problem, height, aligned_tokens(problem), n) <= ring_tokens(problem)
    )
    blocks = max(1, ceil_div(math.ceil(likely), height)) * (
        problem.intermediate_size * 2 // BLOCK_N
    )
    wanted = ceil_div(2 * num_sms, blocks)
    if wanted >= top:
        return top
    if blocks >= num_sms:
        return wanted

    def tail(n: int) -> float:
        return local % n / n if local % n else 1.0

    return max(range(wanted, min(2 * wanted, top) + 1), key=tail)


def _publish_batch(problem: Problem, height: int, call: int, num_sms: int) -> int:
    ring, pool = ring_tokens(problem), pool_tokens(problem)
    room = (ring // height - problem.local_experts - 1) * height
    return 16 if call > 8191 and (ring == pool or 32 * num_sms < room) else 1


def _shared_memory(
    problem: Problem, device: DeviceSpec, height: int, options: tuple[bool, bool]
) -> tuple[int, int, int]:
    """Stages, bytes of shared memory, and the bytes before the scales."""
    candidate, batched = options
    hidden, width = problem.hidden_size, problem.intermediate_size
    output = max(256 * 64 * 2, 64 * 128) if height == 64 else max(64 * 128 * 2, 128 * 128)
    front = align(2 * hidden, 1024) + align(output, 1024)
    per_group = 1 if height == 64 else 2
    scales = align(8 * max(per_group * width // 128, 2 * hidden // 128), 128)
    tiles_per_block = hidden // BLOCK_N + 2 * width // BLOCK_N
    entries = ceil_div(pool_tokens(problem) // height * tiles_per_block, device.num_sms) + 2
    fixed = front + scales + 144 + 8 + max(8 * entries, 4 * problem.num_experts)
    fixed += 88 * candidate + 136 * batched
    operands = 128 * height + 32_768
    stage = operands + align(4 * height, 128) + 16
    stages = (device.smem_capacity - fixed) // stage
    return stages, fixed + stages * stage, front + stages * operands
