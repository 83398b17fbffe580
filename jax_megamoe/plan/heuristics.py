"""DeepGEMM's size choices for SM100 kernels: ring, tile, stages and shared memory.

Source: DeepGEMM's host code (csrc/jit_kernels/heuristics), read off recorded
launches; each function says what it returns, the tests compare every value with the records.
"""

import math
from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import align, ceil_div, float32
from jax_megamoe.plan.device import DeviceSpec
from jax_megamoe.plan.problem import Problem
from jax_megamoe.plan.sm100_traits import Sm100Traits

TOKEN_ALIGNMENT = 1920
"""Buffers hold a multiple of this many tokens: every tile height divides it."""

BLOCK_N = 128
DISPATCH_THREADS, LOAD_THREADS, EPILOGUE_THREADS = 128, 128, 256
MAX_RING_TOKENS = 8_388_608
MAX_PULL_BYTES = 8192

_RING_BLOCKS = (8, 16, 32, 64, 96, 128, 192, 240)
_LARGE_TILES = (64, 128, 192, 240)
_BARRIER_BYTES = 8
_FIXED_BARRIERS = 28
_TASK_BYTES = 64


def aligned_tokens(problem: Problem) -> int:
    """Tokens per rank that the buffer holds."""
    return align(problem.max_num_tokens, TOKEN_ALIGNMENT)


def received_tokens(problem: Problem, tokens: int) -> int:
    """Most rows that reach this rank's experts when every rank has `tokens` tokens."""
    return problem.num_ranks * tokens * min(problem.top_k, problem.local_experts)


def full_pool_tokens(problem: Problem) -> int:
    """Rows for every token that could reach this rank's experts, each expert padded to a tile."""
    padding = problem.local_experts * (_RING_BLOCKS[-1] - 1)
    return align(received_tokens(problem, aligned_tokens(problem)) + padding, TOKEN_ALIGNMENT)


def ring_tokens(traits: Sm100Traits, problem: Problem, num_sms: int) -> int:
    """Rows of received tokens that are live at once: the ring between dispatch and layer 2.

    It depends on the SM count: ranks with different counts would have different buffers.
    """
    tokens = aligned_tokens(problem)
    if traits.full_pool_from is not None and tokens >= traits.full_pool_from:
        return full_pool_tokens(problem)
    received = received_tokens(problem, tokens)
    need = max(_ring_need(problem, num_sms // 2, block, received) for block in _RING_BLOCKS)
    return align(need, TOKEN_ALIGNMENT)


def _ring_need(problem: Problem, clusters: int, block: int, received: int) -> int:
    """Live rows with tiles of `block` rows: what layer 1 runs ahead of layer 2."""
    l1_tiles, l2_tiles = problem.intermediate_size * 2 // 256, problem.hidden_size // 256
    blocks = ceil_div(received, block) + problem.local_experts
    warm = max(
        ceil_div(ceil_div(clusters, l2_tiles) * l1_tiles, clusters),
        ceil_div(l1_tiles + (blocks - 1) * max(0, l1_tiles - l2_tiles), clusters) + 1,
    )
    waves = min(warm, ceil_div(l1_tiles * blocks, clusters))
    live = ceil_div(min(waves * clusters, l1_tiles * blocks), l1_tiles)
    grow = ceil_div(blocks * (l2_tiles - l1_tiles), l2_tiles) if l2_tiles > l1_tiles else 0
    return block * min(blocks, live + grow + ceil_div(clusters, min(l1_tiles, l2_tiles)))


def scale_ring_tokens(traits: Sm100Traits, ring: int) -> int:
    """Rows of scales for a ring: the worst tile, 8 rows, is padded to 128."""
    return 16 * ring if traits.scale_block else 0


def shared_scale_tokens(problem: Problem) -> int:
    """Rows of scales for shared experts: every tile is padded to 128 rows."""
    return 128 * ceil_div(aligned_tokens(problem), 8)


def tokens_per_expert(problem: Problem) -> float:
    """Expected tokens of one expert, in float32 from left to right as the host computes it."""
    tokens = float32(problem.all_tokens)
    return float32(float32(tokens * problem.top_k) / problem.num_experts)


def likely_tokens(problem: Problem) -> float:
    """`tokens_per_expert` plus its square root, one standard deviation, in float32."""
    mean = tokens_per_expert(problem)
    return float32(mean + float32(math.sqrt(mean)))


def block_m(traits: Sm100Traits, problem: Problem, device: DeviceSpec) -> int:
    """Tile height: 16, 32, 64, 128, 192 or 240 tokens."""
    if (measured := traits.measured_tile(problem, device)) is not None:
        return measured
    mean, likely = tokens_per_expert(problem), likely_tokens(problem)
    if mean <= 10:
        return 16
    if mean <= 24:
        return 32
    few = problem.local_experts <= 13
    if traits.max_tile is not None:
        if likely <= (traits.max_tile if few else _LARGE_TILES[-1]):
            return next(tile for tile in _LARGE_TILES if tile >= likely)
        return 128 if math.ceil(likely / traits.max_tile) * 128 >= likely else traits.max_tile
    tiles, first = math.ceil(likely / _LARGE_TILES[-1]), 0
    if tiles == 1 and likely > 192 and few:
        tiles, first = 2, 1
    return next(tile for tile in _LARGE_TILES[first:] if tiles * tile >= likely)


@dataclass(frozen=True)
class Tiles:
    """Tile heights, stages and shared memory of a launch.

    Attributes:
        block_m: tokens of a tile.
        store_m: rows that one epilogue store writes, for layer 1 and layer 2.
        scale_m: rows of scales of a tile.
        pull_bytes: of one copy of a remote token.
        stages: of the operand pipeline.
        smem: dynamic shared memory, bytes.
        combine_bytes: of it, what the combine may reuse.
    """

    block_m: int
    store_m: tuple[int, int]
    scale_m: int
    pull_bytes: int
    stages: int
    smem: int
    combine_bytes: int


def tiles(traits: Sm100Traits, problem: Problem, device: DeviceSpec) -> Tiles:
    """Tiles for this number of tokens."""
    return tiles_of_height(traits, problem, device, block_m(traits, problem, device))


def tiles_of_height(
    traits: Sm100Traits, problem: Problem, device: DeviceSpec, height: int
) -> Tiles:
    """Tiles of a given height, with as many stages as fit shared memory."""
    store_m = _store_rows(traits, height)
    scale_m = align(height, 128)
    pull = pull_bytes(traits, problem)
    # Layer 1 stores two stages of 64 columns, layer 2 one stage of 128 BF16, each per warpgroup.
    output = align(max(256 * store_m[0] * traits.operand_bits // 8, 512 * store_m[1]), 1024)
    fixed = align(4 * problem.num_experts, 1024) + align(4 * pull, 1024) + output
    fixed += 32 * store_m[0] if traits.reduces_amax else 0
    barriers = _FIXED_BARRIERS * _BARRIER_BYTES + 4 + traits.lookup_bytes
    stage = (height // 2 + BLOCK_N) * traits.block_k * traits.operand_bits // 8
    if traits.scale_block:
        stage += (scale_m + BLOCK_N) * traits.block_k // traits.scale_block
    full = stage + 2 * _BARRIER_BYTES
    stages = (device.smem_capacity - fixed - _TASK_BYTES - barriers) // full
    reusable = fixed + _TASK_BYTES + stages * stage
    return Tiles(
        height, store_m, scale_m, pull, stages, reusable + barriers + stages * 16, reusable
    )


def _store_rows(traits: Sm100Traits, height: int) -> tuple[int, int]:
    of_192, of_240 = traits.store_rows
    if height == 240:
        return of_240
    rows = {16: 8, 32: 16, 64: 16, 128: 32, 192: of_192}[height]
    return rows, rows


def pull_bytes(traits: Sm100Traits, problem: Problem) -> int:
    """Bytes of one copy of a remote token: a row, or an equal part of it."""
    limit = MAX_PULL_BYTES // 2 if traits.activations.bits == 16 else MAX_PULL_BYTES
    pull = problem.hidden_size * traits.activations.bits // 8
    while pull > limit:
        pull //= 2
    return pull
