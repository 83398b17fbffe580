// Rows of results: every kernel of this folder reads words and writes one row of words for each
// instruction under test. cases.py reads the names and kinds of the rows from these macros.
#pragma once
#include <cstdint>

// One thread reads a, b and c, three words of the input, and writes one word a row.
#define INPUTS                                                \
  const uint32_t n = gridDim.x * blockDim.x;                  \
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;   \
  const uint32_t a = in[i], b = in[n + i], c = in[2 * n + i]; \
  [[maybe_unused]] const float fa = __uint_as_float(a);       \
  [[maybe_unused]] const float fb = __uint_as_float(b);       \
  [[maybe_unused]] const float fc = __uint_as_float(c);       \
  uint32_t row = 0

// ROW(name, kind, value): kind is how a row is compared: bits, f32, f16x2, bf16x2 (a NaN is a NaN),
// or ulpN: float32 within N units in the last place.
#define ROW(name, kind, value) out[row++ * n + i] = (value)
#define ROW64(name, kind, value)                 \
  do {                                           \
    const uint64_t word64 = (value);             \
    out[row++ * n + i] = uint32_t(word64);       \
    out[row++ * n + i] = uint32_t(word64 >> 32); \
  } while (0)

// Instructions of one, two or three 32-bit operands, by their text.
#define R1(name, kind, text)               \
  do {                                     \
    uint32_t d;                            \
    asm volatile(text : "=r"(d) : "r"(a)); \
    ROW(name, kind, d);                    \
  } while (0)
#define R2(name, kind, text)                       \
  do {                                             \
    uint32_t d;                                    \
    asm volatile(text : "=r"(d) : "r"(a), "r"(b)); \
    ROW(name, kind, d);                            \
  } while (0)
#define R3(name, kind, text)                               \
  do {                                                     \
    uint32_t d;                                            \
    asm volatile(text : "=r"(d) : "r"(a), "r"(b), "r"(c)); \
    ROW(name, kind, d);                                    \
  } while (0)
// float32 operands and result.
#define F1(name, kind, text)                \
  do {                                      \
    float d;                                \
    asm volatile(text : "=f"(d) : "f"(fa)); \
    ROW(name, kind, __float_as_uint(d));    \
  } while (0)
#define F2(name, kind, text)                         \
  do {                                               \
    float d;                                         \
    asm volatile(text : "=f"(d) : "f"(fa), "f"(fb)); \
    ROW(name, kind, __float_as_uint(d));             \
  } while (0)
#define F3(name, kind, text)                                  \
  do {                                                        \
    float d;                                                  \
    asm volatile(text : "=f"(d) : "f"(fa), "f"(fb), "f"(fc)); \
    ROW(name, kind, __float_as_uint(d));                      \
  } while (0)
// 64-bit operands x = a:b and y = c:a, 64-bit result.
#define L2(name, kind, text)                                             \
  do {                                                                   \
    const uint64_t x = uint64_t{a} << 32 | b, y = uint64_t{c} << 32 | a; \
    uint64_t d;                                                          \
    asm volatile(text : "=l"(d) : "l"(x), "l"(y));                       \
    ROW64(name, kind, d);                                                \
  } while (0)

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void InitBarrier(uint64_t* barrier, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)), "r"(count));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void ExpectBytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

__device__ inline uint32_t TestParity(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{ .reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return done;
}

__device__ inline void WaitParity(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(SharedAddress(barrier)), "r"(parity)
        : "memory");
  }
}
