"""Kernels of wgmma.mma_async, one for each type, width, place of A and swizzle.

PTX ISA, asynchronous warpgroup level matrix instructions. They are written by a program because an
instruction of N columns names N / 2 registers.
"""

from dataclasses import dataclass

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "e4m3": 1, "e5m2": 1}
_SWIZZLE_BITS = {128: 1, 64: 2, 32: 3}
_STEP_BYTES = 32
"""Bytes of K in one instruction."""


@dataclass(frozen=True)
class Wgmma:
    """D [64, columns] += A [64, K] B [columns, K]^T over one row of `swizzle` bytes of K.

    Attributes:
        a_type, b_type: names of the element types.
        columns: N.
        swizzle: bytes of a row of the operand tiles, so their swizzle.
        a_in_registers: A comes from the threads' registers.
    """

    a_type: str
    b_type: str
    columns: int
    swizzle: int = 128
    a_in_registers: bool = False

    @property
    def name(self) -> str:
        """The kernel's name."""
        place = "_registers" if self.a_in_registers else ""
        return f"wgmma_{self.a_type}_{self.b_type}_n{self.columns}_s{self.swizzle}{place}"

    @property
    def operand_words(self) -> tuple[int, int, int]:
        """32-bit words of A, of B and of the accumulators, as the input holds them."""
        return 64 * self.swizzle // 4, self.columns * self.swizzle // 4, 64 * self.columns

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: both tiles, each from a multiple of 1024 bytes on."""
        return 64 * self.swizzle + -(-self.columns * self.swizzle // 1024) * 1024

    def source(self) -> str:
        """CUDA of the kernel: (in: A, B and D as rows of words; out: D)."""
        count = self.columns // 2
        registers = ", ".join(f"%{i}" for i in range(count))
        depth = _STEP_BYTES // ELEMENT_BYTES[self.a_type]
        kind = f"m64n{self.columns}k{depth}.f32.{self.a_type}.{self.b_type}"
        if self.a_in_registers:
            first = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
            operands = [f'"r"(words[{i}])' for i in range(4)] + ['"l"(b_step)']
            second = f"%{count + 4}"
        else:
            first, second = f"%{count}", f"%{count + 1}"
            operands = ['"l"(a_step)', '"l"(b_step)']
        majors = ", 0, 0" if self.a_type in ("bf16", "f16") and not self.a_in_registers else ""
        majors = ", 0" if self.a_type in ("bf16", "f16") and self.a_in_registers else majors
        outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
        instruction = (
            f'"wgmma.mma_async.sync.aligned.{kind} {{{registers}}}, {first}, {second}, 1, 1, 1'
            f'{majors};"'
        )
        if self.a_in_registers:
            # Each word is two or four neighbours of a row: the layout of mma's A fragments.
            load = f"""
    uint32_t words[4];
    for (uint32_t k = 0; k < 4; ++k) {{
      const uint32_t line = warp * 16 + lane / 4 + (k & 1) * 8;
      words[k] = in[line * {self.swizzle // 4} + step * 8 + lane % 4 + (k / 2) * 4];
    }}"""
        else:
            load = "\n    const uint64_t a_step = a_tile + step * 2;"
        mode = f"{self.swizzle}, {_SWIZZLE_BITS[self.swizzle]}"
        return f"""
extern "C" __global__ void __launch_bounds__(128) {self.name}(const uint32_t* in, uint32_t* out) {{
  extern __shared__ __align__(1024) uint32_t tiles[];
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t* b = in + {self.operand_words[0]};
  const uint32_t* start = b + {self.operand_words[1]};
  CopyTile<{self.swizzle}>(in, tiles, 64);
  CopyTile<{self.swizzle}>(b, tiles + {64 * self.swizzle // 4}, {self.columns});
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  [[maybe_unused]] const uint64_t a_tile = Descriptor<{mode}>(tiles);
  const uint64_t b_tile = Descriptor<{mode}>(tiles + {64 * self.swizzle // 4});
  float d[{count}];
  for (uint32_t k = 0; k < {count}; ++k)
    d[k] = __uint_as_float(start[Place(k, lane, warp, {self.columns})]);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
  for (uint32_t step = 0; step < {self.swizzle // _STEP_BYTES}; ++step) {{{load}
    const uint64_t b_step = b_tile + step * 2;
    asm volatile({instruction}
                 : {outputs}
                 : {", ".join(operands)});
  }}
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (uint32_t k = 0; k < {count}; ++k)
    out[Place(k, lane, warp, {self.columns})] = __float_as_uint(d[k]);
}}
"""


HEAD = """
#include "rows.cuh"

// Rows of kBytes bytes in the swizzle of that many bytes: chunks of 16 bytes change places.
template <int kBytes>
__device__ inline void CopyTile(const uint32_t* from, uint32_t* tile, uint32_t rows) {
  constexpr uint32_t kWords = kBytes / 4;
  for (uint32_t k = threadIdx.x; k < rows * kWords; k += blockDim.x) {
    const uint32_t bytes = k * 4;
    const uint32_t swizzled = bytes ^ ((bytes >> 7 & (kBytes / 16 - 1)) << 4);
    tile[swizzled / 4] = from[k];
  }
}

// A K-major tile: address, eight rows from one group to the next, swizzle.
template <int kBytes, int kSwizzle>
__device__ inline uint64_t Descriptor(const void* tile) {
  return uint64_t{(SharedAddress(tile) & 0x3ffff) >> 4} | uint64_t{1} << 16 |
         uint64_t{kBytes * 8 / 16} << 32 | uint64_t{kSwizzle} << 62;
}

// Where accumulator k of a thread lies in D [64, columns].
__device__ inline uint32_t Place(uint32_t k, uint32_t lane, uint32_t warp, uint32_t columns) {
  const uint32_t line = warp * 16 + lane / 4 + (k / 2 % 2) * 8;
  return line * columns + k / 4 * 8 + lane % 4 * 2 + k % 2;
}
"""

KERNELS = (
    *(Wgmma("e4m3", "e4m3", columns) for columns in (8, 16, 24, 64, 96, 128, 256)),
    *(Wgmma("bf16", "bf16", columns) for columns in (8, 64, 256)),
    Wgmma("f16", "f16", 32),
    Wgmma("e5m2", "e4m3", 32),
    Wgmma("e4m3", "e5m2", 32),
    Wgmma("e5m2", "e5m2", 16),
    Wgmma("e4m3", "e4m3", 32, 64),
    Wgmma("e4m3", "e4m3", 32, 32),
    Wgmma("bf16", "bf16", 32, 64),
    Wgmma("bf16", "bf16", 16, 32),
    Wgmma("e4m3", "e4m3", 8, a_in_registers=True),
    Wgmma("e4m3", "e4m3", 64, a_in_registers=True),
    Wgmma("bf16", "bf16", 64, a_in_registers=True),
    Wgmma("f16", "f16", 16, a_in_registers=True),
)


def source() -> str:
    """CUDA of all kernels."""
    return HEAD + "".join(kernel.source() for kernel in KERNELS)
