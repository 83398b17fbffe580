// Matrices of a warp. PTX ISA: ldmatrix, stmatrix, mma.sync. Fragments are the threads' own
// registers, so that a wrong layout shows as a wrong word.
#include "rows.cuh"

extern "C" __global__ void fragments(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ alignas(128) uint32_t words[4][256];
  const uint32_t lane = threadIdx.x & 31, warp = threadIdx.x / 32;
  uint32_t* mine = words[warp];
  for (uint32_t k = 0; k < 8; ++k) mine[k * 32 + lane] = (a ^ (k * 0x9e3779b9u)) + lane;
  __syncwarp();
  // Row addresses in an order of their own: 32 rows of 16 bytes.
  const uint32_t at = SharedAddress(mine) + ((lane * 5) & 31) * 16;
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(at));
  ROW(load1, bits, r[0]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(at));
  ROW(load2_trans_0, bits, r[0]);
  ROW(load2_trans_1, bits, r[1]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
  ROW(load4_0, bits, r[0]);
  ROW(load4_1, bits, r[1]);
  ROW(load4_2, bits, r[2]);
  ROW(load4_3, bits, r[3]);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at));
  ROW(load4_trans_0, bits, r[0]);
  ROW(load4_trans_3, bits, r[3]);
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(at), "r"(a) : "memory");
  __syncwarp();
  ROW(store1, bits, mine[lane * 4] ^ mine[lane * 4 + 1] * 3 ^ mine[lane * 4 + 3] * 5);
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(a),
               "r"(b)
               : "memory");
  __syncwarp();
  ROW(store2_trans, bits, mine[lane * 4] ^ mine[lane * 4 + 1] * 3 ^ mine[lane * 4 + 3] * 5);
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a),
               "r"(b), "r"(c), "r"(a ^ b)
               : "memory");
  __syncwarp();
  ROW(store4, bits, mine[lane * 4] ^ mine[lane * 4 + 1] * 3 ^ mine[lane * 4 + 3] * 5);
  __syncwarp();
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
               "r"(a), "r"(b), "r"(c), "r"(a + b)
               : "memory");
  __syncwarp();
  ROW(store4_trans, bits, mine[lane * 4] ^ mine[lane * 4 + 1] * 3 ^ mine[lane * 4 + 3] * 5);
}

// in: 4 words of A, 2 of B, 4 of C a thread, each a row of n words.
#define MMA(name, shape)                                                                       \
  do {                                                                                         \
    float d[4];                                                                                \
    asm volatile("mma.sync.aligned." shape                                                     \
                 " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"        \
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])                              \
                 : "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]), "r"(word[4]),       \
                   "r"(word[5]), "f"(__uint_as_float(word[6])), "f"(__uint_as_float(word[7])), \
                   "f"(__uint_as_float(word[8])), "f"(__uint_as_float(word[9])));              \
    ROW(name##_0, f32, __float_as_uint(d[0]));                                                 \
    ROW(name##_1, f32, __float_as_uint(d[1]));                                                 \
    ROW(name##_2, f32, __float_as_uint(d[2]));                                                 \
    ROW(name##_3, f32, __float_as_uint(d[3]));                                                 \
  } while (0)
#define WORDS                                               \
  const uint32_t n = gridDim.x * blockDim.x;                \
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; \
  uint32_t row = 0, word[10];                               \
  for (uint32_t k = 0; k < 10; ++k) word[k] = in[k * n + i]

extern "C" __global__ void mma_bf16(const uint32_t* in, uint32_t* out) {
  WORDS;
  MMA(k16, "m16n8k16.row.col.f32.bf16.bf16.f32");
}
extern "C" __global__ void mma_f16(const uint32_t* in, uint32_t* out) {
  WORDS;
  MMA(k16, "m16n8k16.row.col.f32.f16.f16.f32");
}
extern "C" __global__ void mma_e4m3(const uint32_t* in, uint32_t* out) {
  WORDS;
  MMA(k32, "m16n8k32.row.col.f32.e4m3.e4m3.f32");
}
extern "C" __global__ void mma_e5m2(const uint32_t* in, uint32_t* out) {
  WORDS;
  MMA(k32, "m16n8k32.row.col.f32.e5m2.e4m3.f32");
}
