"""Which tiles a grouped product is cut into: a closed form on Hopper, tables elsewhere.

The closed form agrees with humming-kernels' own choice in 85 to 94 % of what was recorded of it
for an H200 (its tests count); a wrong choice costs time and not the result. On other GPUs the
tables hold the commonest recorded choice.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from jax_megamoe.plan.arithmetic import ceil_div
from jax_megamoe.plan.grouped.humming_memory import shared_memory
from jax_megamoe.plan.grouped.product import BF16, E2M1, Product, Tiles

_ORDERED = True
"""Sums of tiles that are cut along K are added in turn on Hopper: at most 5.6 % slower on an H200
(nothing at most sizes), and the same bits every time."""


@lru_cache(maxsize=4096)
def _expert_rows(rows: int, num_experts: int) -> tuple[tuple[int, float], ...]:
    """How many rows one expert gets and how likely, each row going to any expert alike."""
    mean = rows / num_experts
    most = min(rows, int(mean + 12 * math.sqrt(mean) + 40))
    hit = -math.log(num_experts)
    miss = math.log1p(-1 / num_experts) if num_experts > 1 else -math.inf

    def log_likelihood(count: int) -> float:
        ways = math.lgamma(rows + 1) - math.lgamma(count + 1) - math.lgamma(rows - count + 1)
        rest = rows - count
        return ways + count * hit + (rest * miss if rest else 0.0)

    return tuple((count, math.exp(log_likelihood(count))) for count in range(most + 1))


@lru_cache(maxsize=4096)
def expected_blocks(rows: int, num_experts: int, block_m: int) -> float:
    """Blocks of block_m rows that `rows` rows fill, the last of an expert's partly."""
    parts = _expert_rows(rows, num_experts)
    return num_experts * sum(p * ceil_div(count, block_m) for count, p in parts)


@lru_cache(maxsize=4096)
def _full_blocks(rows: int, num_experts: int, block_m: int) -> float:
    parts = _expert_rows(rows, num_experts)
    return num_experts * sum(p * (count // block_m) for count, p in parts)


def sampled_rows(rows: int) -> int:
    """`rows` rounded up to a number that tiles are chosen for, so that few kernels are compiled."""
    if rows <= 8:
        return 1 << max(0, rows - 1).bit_length()
    steps = ((1024, 8), (2048, 16), (4096, 32), (16384, 64))
    step = next((step for most, step in steps if rows <= most), 128)
    return ceil_div(rows, step) * step


def choose(product: Product, rows: int, num_sms: int, shared_memory: int = 0) -> Tiles:
    """Tiles of a product over `rows` rows of all its experts together, `rows` at least 1.

    All products of a layer get the same block height, so that they share the tables of rows.

    Args:
        num_sms: multiprocessors.
        shared_memory: most bytes of a thread block; 0: the architecture's.
    """
    rows = sampled_rows(rows)
    chosen = _hopper if product.arch == 90 else _elsewhere
    tiles, blocks = chosen(product, rows, num_sms)
    return _fitted(product, tiles, blocks, num_sms, shared_memory or SHARED_MEMORY[product.arch])


_LARGE = 1 << 22
"""Weights of an expert from which narrow tiles pay."""


def narrow(tiles: Tiles) -> Tiles:
    """Tiles of half the columns, by as many warps."""
    (height, columns, depth), (rows, warp, deep) = tiles.block, tiles.warp
    return replace(tiles, block=(height, columns // 2, depth), warp=(rows, warp // 2, deep))


def measured(product: Product, chosen: Tiles, rows: int, num_sms: int) -> Tiles:
    """Chosen tiles in the form that was fastest on an H200.

    Humming's own rule cuts the last wave along K wherever there are few. It stands for BF16 inputs
    on Hopper, whose tiles take a longer time; on other GPUs nothing was measured and nothing is
    cut. Of FP8 inputs most of what was measured is faster uncut
    (benchmarks/results/grouped_h200.json, tile_forms_h200.json); of MXFP4 weights with them, tiles
    that leave half of the places empty are halved, and a wave is cut that is partly empty where
    sums are long. That it stays within 4 % of the fastest measured is tested.

    Args:
        product, rows, num_sms: as of `choose`.
        chosen: its tiles.
    """
    if product.arch == 90 and product.input.element is BF16:
        return chosen
    uncut = replace(chosen, stream_k=False, ordered=False)
    if (product.arch, product.weights, product.inputs) != (90, "mxfp4", "fp8_f32_128"):
        return uncut
    (height, columns, depth), places = chosen.block, num_sms * chosen.ctas
    blocks = expected_blocks(sampled_rows(rows), product.num_experts, height)
    waves = blocks * (product.n // columns) / places
    if waves <= 0.5 and columns == 256 and product.n * product.k >= _LARGE:
        return narrow(uncut)
    is_long = product.k // depth >= 32
    if is_long and 2 < waves < 3 and waves / math.ceil(waves) < 0.9:
        return replace(uncut, stream_k=True, ordered=_ORDERED)
    return uncut


_HOPPER_MOST = {("fp8_block", "fp8_f32_128"): 64, ("mxfp4", "fp8_f32_128"): 160}
"""Tallest blocks by weights and inputs; 96 with BF16 inputs."""


def _hopper(product: Product, rows: int, num_sms: int) -> tuple[Tiles, float]:
    experts = product.num_experts
    wide = _full_blocks(rows, experts, 16) * (product.n // 128) >= num_sms
    most = _HOPPER_MOST.get((product.weights, product.inputs), 96)
    heights = range(8, most + 1, 8)
    height = min(heights, key=lambda m: expected_blocks(rows, experts, m) * (m + 32))
    blocks = expected_blocks(rows, experts, height)
    if product.input.element is BF16:
        tiles = _hopper_bf16(product, height, rows, blocks, wide, num_sms)
    else:
        tiles = _hopper_fp8(product, height, wide, rows >= experts * height)
    return tiles, blocks


def _hopper_fp8(product: Product, height: int, wide: bool, many: bool) -> Tiles:
    """FP8 inputs with a scale by 128: warps that load, tensor maps, four stages."""
    common: dict[str, Any] = {
        "stages": 4,
        "warp_spec": True,
        "use_tma": True,
        "reuse_stages": False,
    }
    if product.weights == "fp8_block":
        return Tiles(
            wgmma=True,
            block=(height, 256, 128),
            warp=(height, 32, 128),
            split_wait=wide,
            raster=8 if wide and many else 1,
            producer_unroll=1 if wide else 2,
            **common,
        )
    narrow = wide and height > 48
    return Tiles(
        wgmma=True,
        block=(height, 128 if narrow else 256, 128),
        warp=(height, 16 if narrow else 32, 128),
        ctas=2 if height <= 32 and not narrow else 1,
        split_wait=True,
        late_as=height <= 32 or height > 96,
        producer_unroll=1 if wide else 2,
        **common,
    )


def _hopper_bf16(
    product: Product, height: int, rows: int, blocks: float, wide: bool, num_sms: int
) -> Tiles:
    if wide:
        halves = product.n % 512 == 0 and height <= 64 and blocks * (product.n // 512) >= num_sms
        return Tiles(
            wgmma=True,
            block=(height, 512 if halves else 256, 64),
            warp=(height, 32, 64),
            stages=4,
            warp_spec=True,
            use_tma=True,
            split_wait=True,
            reuse_stages=False,
            producer_unroll=1,
        )
    if height == 8 and product.k >= 4096 and product.k % 128 == 0:
        return Tiles(wgmma=False, block=(8, 128, 64), warp=(8, 64, 32), stages=4, ctas=4)
    return _hopper_sparse_bf16(product, height, rows, blocks, num_sms)


_THREADS = 256
"""Most of a block of which a multiprocessor runs several, in Humming's rule for BF16 inputs."""
_WIDE_ROWS = 16
"""Rows of all experts from which that rule takes the widest warps."""


def _hopper_sparse_bf16(
    product: Product, height: int, rows: int, blocks: float, num_sms: int
) -> Tiles:
    """BF16 inputs in few rows, where warps load for themselves.

    Wide tiles; half as deep if then a multiprocessor runs several at once and there are enough of
    them; of 4-bit weights also half as wide, where more run at once and no wave is added. That is
    Humming's own rule (`select_moe_a16` of its humming/tune/sm90_policies.py).
    """
    is_4_bit = product.weight.element is E2M1

    def tiles(columns: int, depth: int, warp: int) -> Tiles:
        """With as many blocks a multiprocessor as fit, and as there are tiles for."""
        deep = min(depth, 64 if is_4_bit or columns < 256 or warp == 64 else 32)
        one = Tiles(wgmma=True, block=(height, columns, depth), warp=(height, warp, deep), stages=4)
        most = 1 if one.threads > _THREADS else 3 if is_4_bit and height == 8 else 2
        most = min(most, (SHARED_MEMORY[90] + 1024) // (shared_memory(product, one) + 1024))
        count = blocks * product.n / columns
        return replace(one, ctas=max(1, min(most, math.ceil(count / num_sms))))

    def waves(some: Tiles) -> int:
        return math.ceil(blocks * product.n / some.block[1] / num_sms / some.ctas)

    if rows >= _WIDE_ROWS:
        sizes = 256, 128, 64
    elif product.n <= 4096:
        sizes = 128, 256, 32
    else:
        sizes = 256, 128 if is_4_bit else 64, 32
    columns, depth, warp = sizes
    while product.k % depth:
        depth //= 2
    chosen = tiles(columns, depth, warp)
    half = tiles(columns, depth // 2, warp)
    if chosen.ctas == 1 and half.ctas > 1:
        chosen = half
    if is_4_bit and chosen.block[1:] == (256, 64):
        split = tiles(128, 128, warp)
        if split.ctas > chosen.ctas and waves(split) <= waves(chosen):
            chosen = split
    return chosen


def _elsewhere(product: Product, rows: int, num_sms: int) -> tuple[Tiles, float]:
    """mma.sync, by the commonest recorded choice of the architecture."""
    experts, fp8 = product.num_experts, product.input.element is not BF16
    share = rows / experts
    height = next((m for m, most in ((8, 8), (16, 24), (32, 80)) if share <= most), 64)
    height = max(height, 16) if fp8 else height
    deep = product.weight.element is not E2M1 or product.arch != 80
    if fp8:
        block, warp = (height, 128, 128), (height, 32, 64)
        stages, ctas = 3, 1
    elif product.arch == 120:
        block, warp, stages, ctas = (height, 128, 64), (height, 64, 32), 4, 2
    elif product.arch == 100:
        block, warp, stages, ctas = (height, 256, 64), (height, 64, 64), 4, 2
    elif height >= 64:
        block, warp, stages, ctas = (height, 256, 64), (height // 2, 64, 64), 4, 1
    else:
        block, warp = (height, 256, 64), (height, 64, 32) if height == 8 else (height, 32, 64)
        stages, ctas = 4 if deep else 5, 1
    tiles = Tiles(
        wgmma=False,
        block=block,
        warp=warp,
        stages=stages,
        ctas=ctas,
        pdl=False,
    )
    return tiles, expected_blocks(rows, experts, height)


SHARED_MEMORY = {80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Most bytes of a thread block, by architecture (CUDA C++ Programming Guide, compute
capabilities); the tile's memory times the blocks of a multiprocessor stays within it."""


def _fitted(product: Product, tiles: Tiles, blocks: float, num_sms: int, room: int) -> Tiles:
    """The first of smaller and smaller tiles that divides the matrix and fits into memory, with
    the last wave cut along K where there are few waves."""
    for smaller in _smaller(product, tiles):
        if smaller.ctas * (shared_memory(product, smaller) + 1024) <= room + 1024:
            break
    else:
        raise AssertionError(f"no tiles for {product}")
    waves = blocks * (product.n // smaller.block[1]) / (num_sms * smaller.ctas)
    # Where warps load for themselves, only tiles fewer than multiprocessors are cut.
    is_sparse = product.arch == 90 and smaller.wgmma and not smaller.warp_spec
    few = waves * smaller.ctas < 1 if is_sparse else waves < 16
    return replace(smaller, stream_k=few, ordered=few and _ORDERED)


def _smaller(product: Product, tiles: Tiles) -> Iterator[Tiles]:
    """`tiles`, with N and K halved until they divide the matrix; then fewer blocks and stages."""
    block, warp = list(tiles.block), list(tiles.warp)
    least = 32 if product.input.element is BF16 else 16
    while product.n % block[1] and block[1] > 64:
        block[1] //= 2
        warp[1] = max(least, min(warp[1], block[1] // 4 if tiles.wgmma else block[1]))
    while product.k % block[2] and block[2] > 64:
        block[2] //= 2
        warp[2] = min(warp[2], block[2])
    tiles = replace(tiles, block=tuple(block), warp=tuple(warp))
    for ctas in range(tiles.ctas, 0, -1):
        yield replace(tiles, ctas=ctas)
    for stages in range(tiles.stages - 1, 2 if tiles.wgmma else 1, -1):
        yield replace(tiles, ctas=1, stages=stages)
