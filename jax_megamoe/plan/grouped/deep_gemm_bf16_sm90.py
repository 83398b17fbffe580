"""DeepGEMM's m-grouped BF16 product on Hopper, of the sgl source; slots.py has its matrices.

Facts here: the kernel's tiles, memory and arguments, out of `sm90_bf16_gemm.cuh` and
`scheduler/gemm.cuh`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from jax_megamoe.plan.arithmetic import align, ceil_div, cpp_bool
from jax_megamoe.plan.grouped.slots import (
    BLOCK_K,
    ELEMENT_BYTES,
    GEMM_TYPE,
    SOURCE,
    SWIZZLE,
    Matrices,
    sizes,
    tensor_maps,
)
from jax_megamoe.plan.grouped.tiles import SHARED_MEMORY, expected_blocks, sampled_rows
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import KernelLaunch

_TMA_THREADS, _WARPGROUP = 128, 128
_WGMMA_ROWS = 64
_HEIGHTS = (16, 32, 64, 128)
_WIDTHS = (64, 128, 256)
_MOST_STAGES, _LEAST_STAGES = 16, 3


@dataclass(frozen=True)
class Blocks:
    """A thread block's tile.

    Attributes:
        m: rows.
        n: rows of the matrix.
        paired: two thread blocks of a cluster, with rows of one expert, load the matrix once.
    """

    m: int
    n: int
    paired: bool = False

    @property
    def math_threads(self) -> int:
        """Threads that multiply: a warpgroup for each 64 rows."""
        return _WARPGROUP * ceil_div(self.m, _WGMMA_ROWS)

    @property
    def output_bytes(self) -> int:
        """Shared memory of the output."""
        return align(self.m * self.n * ELEMENT_BYTES, 1024)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: tiles of A and B, and two barriers."""
        return (self.m + self.n) * BLOCK_K * ELEMENT_BYTES + 16

    @property
    def stages(self) -> int:
        """Tiles in flight: as many as fit."""
        return min(_MOST_STAGES, (SHARED_MEMORY[90] - self.output_bytes) // self.stage_bytes)

    @property
    def shared_memory(self) -> int:
        """Bytes of a thread block."""
        return self.output_bytes + self.stages * self.stage_bytes


# What one multiprocessor of an H200 reaches, for choices alone: bytes from L2 and BF16 operations a
# second; and the memory of 132 of them. A wrong number costs time and not the result.
_L2, _MMA, _MEMORY = 42e9, 6.0e12, 4.4e12 / 132


def height(matrices: tuple[Matrices, Matrices], rows: int, num_sms: int) -> int:
    """Rows of a block of both products of a layer of `rows` rows, at least 1."""
    rows = sampled_rows(rows)
    return min(
        _HEIGHTS, key=lambda m: _added(*(_best(each, rows, m, num_sms) for each in matrices))
    )


def blocks(matrices: Matrices, rows: int, m: int, num_sms: int) -> Blocks:
    """The tile of one product whose blocks have m rows."""
    rows = sampled_rows(rows)
    candidates = [Blocks(m, n, _pairs(matrices, m, n, num_sms)) for n in _widths(matrices.n)]
    return min(candidates, key=lambda each: _cost(matrices, rows, each, num_sms))


def _added(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return first[0] + second[0], first[1] + second[1]


def _best(matrices: Matrices, rows: int, m: int, num_sms: int) -> tuple[float, float]:
    return _cost(matrices, rows, blocks(matrices, rows, m, num_sms), num_sms)


def _widths(n: int) -> Iterator[int]:
    """Those that divide n, or else the narrowest: the kernel cuts what is over."""
    found = [width for width in _WIDTHS if n % width == 0]
    yield from found or _WIDTHS[:1]


def _pairs(matrices: Matrices, m: int, n: int, num_sms: int) -> bool:
    """Whether blocks work in pairs: an expert has several only of the tallest, and the kernel's
    counting keeps a pair in one expert if that has an even number of blocks."""
    return m == _HEIGHTS[-1] and matrices.n % (2 * n) == 0 and num_sms % 2 == 0


@lru_cache(maxsize=4096)
def _cost(matrices: Matrices, rows: int, each: Blocks, num_sms: int) -> tuple[float, float]:
    """Estimated seconds, what cannot be hidden first; then the sum of what may be."""
    experts, n, k = matrices.num_experts, matrices.n, matrices.k
    high, used = expected_blocks(rows, experts, each.m), expected_blocks(rows, experts, rows)
    tiles = high * ceil_div(n, each.n)
    waves = ceil_div(max(1, round(tiles)), num_sms)
    # One warpgroup waits for its products before it issues more; two take turns.
    one = each.m <= _WGMMA_ROWS
    rate = _MMA * (each.n / (each.n + 32) if one else 1.0)
    multiply = waves * 2 * max(each.m, _WGMMA_ROWS) * each.n * k / rate
    # An expert with rows has a block without a pair, or nearly that.
    shared = (1 - used / high) / 2 if each.paired else 0.0
    load = waves * (each.m + each.n * (1 - shared)) * k * ELEMENT_BYTES / _L2
    read = used * n * k * ELEMENT_BYTES / (_MEMORY * num_sms)
    return max(multiply, load, read), multiply + load


def kernel(matrices: Matrices, each: Blocks, num_sms: int) -> KernelSpec:
    """What is compiled: N and K are constants, slots are not."""
    major = "cute::UMMA::Major::K"
    numbers = (
        *(0, matrices.n, matrices.k, matrices.num_experts),
        *(each.m, each.n, BLOCK_K),
        *(SWIZZLE, SWIZZLE, SWIZZLE),
        *(each.stages, _TMA_THREADS, each.math_threads),
        1 + each.paired,
    )
    return KernelSpec(
        SOURCE,
        "sm_90a",
        "deep_gemm/impls/sm90_bf16_gemm.cuh",
        "sm90_bf16_gemm_impl",
        (
            *(major, major),
            *map(str, numbers),
            *(cpp_bool(False), str(num_sms)),  # a pair shares B, not A
            GEMM_TYPE,
            *(cpp_bool(False), "cutlass::bfloat16_t"),
        ),
        ("int*", *["uint32_t"] * 3, *["cute::TmaDescriptor"] * 3),
    )


def launch(
    matrices: Matrices,
    names: tuple[str, str, str],
    *,
    rows: int,
    m: int,
    slots: int,
    num_sms: int,
    early: bool,
) -> KernelLaunch:
    """One product, as `slots.SlotProduct` says."""
    each = blocks(matrices, rows, m, num_sms)
    config = LaunchConfig(
        (num_sms, 1, 1),
        (_TMA_THREADS + each.math_threads, 1, 1),
        (1 + each.paired, 1, 1),
        smem=each.shared_memory,
        programmatic_serialization=early,
    )
    maps = tensor_maps(matrices, names, slots, (each.m, each.n, each.m))
    return KernelLaunch(kernel(matrices, each, num_sms), config, (*sizes(matrices, slots), *maps))
