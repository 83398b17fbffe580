"""DeepGEMM's m-grouped BF16 product on Blackwell, of the sgl source; slots.py has its matrices.

The matrix takes the tensor core's 128 or 256 rows (swap A/B) and rows of tokens its columns, of
which the last block of an expert multiplies no more than it has, rounded up to 16. Facts here: the
kernel's tiles, memory and arguments, out of `sm100_bf16_gemm.cuh`, `scheduler/gemm.cuh` and
`layout/gemm.cuh`. Heights, pairs, stages and memory are those of DeepGEMM's own host code, read in
`heuristics/` of its repository and in what sgl-deep-gemm 0.2.5 made of it, and called as its test
of this layout does. Nothing here has run on a GPU.
"""

from dataclasses import dataclass

from jax_megamoe.plan.arithmetic import ceil_div, cpp_bool
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
from jax_megamoe.plan.grouped.tiles import SHARED_MEMORY, sampled_rows
from jax_megamoe.plan.kernel import KernelSpec, LaunchConfig
from jax_megamoe.plan.launch import Float32, KernelLaunch, Pointer, Struct, Uint32

_BLOCK_N = 128
_STORE_ROWS = 16
_THREADS, _EPILOGUE_THREADS = 128, 128
_STEP, _HIGHEST = 32, 224
_HEADROOM = 1.2
"""Rows that a block has room for, times the mean of an expert's."""
_MOST_STAGES = 32

# Two stages of D; barriers as the host counts them for all its kernels, three for each of 32
# stages, three for each of two accumulators and one more; the address of tensor memory.
_STORE_BYTES = 2 * _STORE_ROWS * _BLOCK_N * ELEMENT_BYTES
_FIXED_BYTES = _STORE_BYTES + 8 * (3 * _MOST_STAGES + 3 * 2 + 1) + 4

_EPILOGUE = Struct(
    "epilogue_args",
    (
        Pointer("sfd", None),
        *(Uint32(name, 0) for name in ("sfd_stride", "shape_m", "shape_n")),
        Float32("alpha", 1.0),
        Float32("clamp_value", 0.0),
        Pointer("clamped_count", None),
        Pointer("clamp_count_ready", None),
    ),
)
"""`EpilogueOperatorArgs` with its own defaults: the operator `Identity` reads none of it."""


@dataclass(frozen=True)
class Blocks:
    """A thread block's tile, 128 rows of the matrix.

    Attributes:
        m: rows of tokens.
        paired: two thread blocks of a cluster multiply 256 rows of the matrix, and each loads half
            of the tokens.
    """

    m: int
    paired: bool

    @property
    def loaded_rows(self) -> int:
        """Rows of tokens that one thread block loads."""
        return self.m // (1 + self.paired)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage: tiles of A and B."""
        return (self.loaded_rows + _BLOCK_N) * BLOCK_K * ELEMENT_BYTES

    @property
    def stages(self) -> int:
        """Tiles in flight: as many as fit."""
        return min(_MOST_STAGES, (SHARED_MEMORY[100] - _FIXED_BYTES) // self.stage_bytes)

    @property
    def shared_memory(self) -> int:
        """Bytes of a thread block."""
        return _FIXED_BYTES + self.stages * self.stage_bytes


def height(matrices: tuple[Matrices, Matrices], rows: int, num_sms: int) -> int:
    """Rows of a block of both products of a layer of `rows` rows, at least 1: the lowest multiple
    of 32 that covers what an expert is expected to have, at most 224."""
    expected = int(_HEADROOM * sampled_rows(rows) / matrices[0].num_experts)
    return min(_HIGHEST, max(1, ceil_div(expected, _STEP)) * _STEP)


def blocks(matrices: Matrices, m: int, num_sms: int) -> Blocks:
    """The tile of one product whose blocks have m rows: pairs where they have work together."""
    return Blocks(m, ceil_div(matrices.n, _BLOCK_N) % 2 == 0 and num_sms % 2 == 0)


def kernel(matrices: Matrices, each: Blocks, num_sms: int) -> KernelSpec:
    """What is compiled: N and K are constants, slots are not."""
    major = "cute::UMMA::Major::K"
    numbers = (
        *(0, matrices.n, matrices.k),
        *(each.m, _BLOCK_N, BLOCK_K),
        matrices.num_experts,
        *(SWIZZLE, SWIZZLE, SWIZZLE),
        each.stages,
        *(_THREADS, _EPILOGUE_THREADS),
        1 + each.paired,
    )
    swaps, fills_up, accumulates = True, False, False
    return KernelSpec(
        SOURCE,
        "sm_100f",
        "deep_gemm/impls/sm100_bf16_gemm.cuh",
        "sm100_bf16_gemm_impl",
        (
            *(major, major),
            *map(str, numbers),
            cpp_bool(each.paired),  # a pair shares A
            *map(str, (num_sms, each.m)),  # and the alignment of an expert's first slot
            *(cpp_bool(swaps), cpp_bool(fills_up)),
            *(GEMM_TYPE, cpp_bool(accumulates), "cutlass::bfloat16_t"),
            *("epilogue::operators::Identity", "100"),  # per cent of the tensor cores
        ),
        (
            *("int*", *["uint32_t"] * 3),
            "deep_gemm::EpilogueOperatorArgs",
            *["cute::TmaDescriptor"] * 3,
        ),
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
    each = blocks(matrices, m, num_sms)
    maps = tensor_maps(matrices, names, slots, (each.loaded_rows, _BLOCK_N, _STORE_ROWS))
    config = LaunchConfig(
        (num_sms, 1, 1),
        (_THREADS + _EPILOGUE_THREADS, 1, 1),
        (1 + each.paired, 1, 1),
        smem=each.shared_memory,
        programmatic_serialization=early,
    )
    arguments = (*sizes(matrices, slots), _EPILOGUE, *maps)
    return KernelLaunch(kernel(matrices, each, num_sms), config, arguments)
