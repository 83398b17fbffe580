// One rank's tokens and routing, from the arrays of a call into the symmetric buffer.
//
// The arithmetic is that of jax_megamoe/op/staging.py, bit for bit. Every rounding is spelled out
// with an intrinsic: the flags that contract or approximate float32 arithmetic do not matter here.

#pragma once

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

namespace jax_megamoe {

// How tokens are dispatched to the routed experts. kNvfp4 is vLLM's rule, kNvfp4Sgl that of sgl's
// own staging.
enum class Tokens { kMxfp8, kNvfp4, kNvfp4Sgl, kFp8Block, kBf16 };

// What a fused shared expert needs beside the routed rows: nothing, pages of the routed rows'
// scales, or rows of its own (MXFP8 with pages of scales, or BF16).
enum class Shared { kNone, kScales, kMxfp8, kBf16 };

inline constexpr uint32_t kWarp = 32;
inline constexpr uint32_t kAllLanes = 0xFFFFFFFF;
inline constexpr uint32_t kBf16Infinity = 0x7F80;
inline constexpr float kE4m3Max = 448.0f;

__device__ __forceinline__ float from_bf16(uint32_t bits) { return __uint_as_float(bits << 16); }

// Value i, 0 to 7, of eight BF16.
__device__ __forceinline__ float value(const uint4& eight, uint32_t i) {
  const uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
  return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xFFFF0000);
}

// The largest magnitude of eight BF16, as BF16 bits; a NaN wins.
__device__ __forceinline__ uint32_t amax(const uint4& eight) {
  constexpr uint32_t kMagnitudes = 0x7FFF7FFF;
  const uint32_t pair = __vmaxu2(__vmaxu2(eight.x & kMagnitudes, eight.y & kMagnitudes),
                                 __vmaxu2(eight.z & kMagnitudes, eight.w & kMagnitudes));
  return max(pair >> 16, pair & 0xFFFF);
}

// The same without NaNs; 0 if there is nothing else.
__device__ __forceinline__ uint32_t amax_skipping_nan(const uint4& eight) {
  uint32_t largest = amax(eight);
  if (largest <= kBf16Infinity) return largest;
  largest = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t magnitude = __float_as_uint(value(eight, i)) >> 16 & 0x7FFF;
    if (magnitude <= kBf16Infinity) largest = max(largest, magnitude);
  }
  return largest;
}

// The maximum over each group of kLanes neighbouring lanes.
template <uint32_t kLanes>
__device__ __forceinline__ uint32_t group_max(uint32_t number) {
#pragma unroll
  for (uint32_t distance = 1; distance < kLanes; distance *= 2) {
    number = max(number, __shfl_xor_sync(kAllLanes, number, distance));
  }
  return number;
}

// The maximum over the block. Call it once: its shared memory is not reused safely.
template <uint32_t kThreads>
__device__ __forceinline__ uint32_t block_max(uint32_t number) {
  __shared__ uint32_t warps[kThreads / kWarp];
  number = __reduce_max_sync(kAllLanes, number);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = number;
  __syncthreads();
#pragma unroll
  for (uint32_t warp = 0; warp < kThreads / kWarp; ++warp) number = max(number, warps[warp]);
  return number;
}

// The bytes of four neighbouring groups of kLanes lanes in one word, the first in the lowest byte.
template <uint32_t kLanes>
__device__ __forceinline__ uint32_t pack_scales(uint32_t byte) {
  uint32_t word = byte << threadIdx.x / kLanes % 4 * 8;
  word |= __shfl_xor_sync(kAllLanes, word, kLanes);
  return word | __shfl_xor_sync(kAllLanes, word, 2 * kLanes);
}

// float32 to E4M3 bytes: nearest even, saturating, every NaN 0x7F; `low` in the low byte.
__device__ __forceinline__ uint32_t to_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(float2{low, high}, __NV_SATFINITE, __NV_E4M3);
}

__device__ __forceinline__ float from_e4m3(uint32_t byte) {
  // An E4M3 exponent moved into a float32 is 120 too small; the product is exact, denormals too.
  const float shifted = __fmul_rn(__uint_as_float((byte & 0x7F) << 20), 0x1p120f);
  return byte == 0x7F ? __uint_as_float(0x7FC00000) : shifted;
}

// Eight BF16 times a factor as E4M3.
__device__ __forceinline__ uint2 to_e4m3(const uint4& eight, float factor) {
  uint32_t pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    pairs[i] =
        to_e4m3(__fmul_rn(value(eight, 2 * i), factor), __fmul_rn(value(eight, 2 * i + 1), factor));
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// UE8M0 byte of the smallest power of two s with `largest` <= 448 s, `largest` floored at 1e-4.
__device__ __forceinline__ uint32_t mxfp8_exponent(uint32_t largest) {
  if (largest == kBf16Infinity) return 254;
  const uint32_t bits = __float_as_uint(fmaxf(from_bf16(largest), 1e-4f));
  return 127 + ((static_cast<int32_t>(bits - __float_as_uint(kE4m3Max)) + 0x7FFFFF) >> 23);
}

// 2^(127 - exponent) for exponents from 1 to 254; the last of them is denormal.
__device__ __forceinline__ float inverse_of_ue8m0(uint32_t exponent) {
  return __uint_as_float(exponent == 254 ? 1u << 22 : (254 - exponent) << 23);
}

struct Mxfp8 {
  uint2 values;
  uint32_t scales;  // of 16 lanes, four groups of 32 values
};

__device__ __forceinline__ Mxfp8 to_mxfp8(const uint4& eight) {
  const uint32_t exponent = mxfp8_exponent(group_max<4>(amax_skipping_nan(eight)));
  return {to_e4m3(eight, inverse_of_ue8m0(exponent)), pack_scales<4>(exponent)};
}

// Where E2M1 magnitudes in units of `unit` change: a magnitude's code is the number of thresholds
// below it. A midpoint that rounds up is moved to the float32 before it. The products are exact for
// units of up to 21 significant bits.
struct E2m1Thresholds {
  float below[7];

  __device__ __forceinline__ explicit E2m1Thresholds(float unit)
      : below{0.25f * unit, before(0.75f * unit), 1.25f * unit, before(1.75f * unit),
              2.5f * unit,  before(3.5f * unit),  5.0f * unit} {}

  __device__ __forceinline__ static float before(float positive) {
    return __uint_as_float(__float_as_uint(positive) - 1);
  }

  // NaN gives 0.
  __device__ __forceinline__ uint32_t code(float magnitude) const {
    const bool four = magnitude > below[3];
    const bool two = magnitude > (four ? below[5] : below[1]);
    const float last = four ? (two ? below[6] : below[4]) : (two ? below[2] : below[0]);
    return four * 4u + two * 2u + (magnitude > last);
  }
};

// E2M1 codes of eight values, the first in the lowest nibble. Signs are those of `eight`, but a
// zero has none.
__device__ __forceinline__ uint32_t to_e2m1(const float (&values)[8], const uint4& eight,
                                            const E2m1Thresholds& thresholds) {
  uint32_t codes = 0, signs = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) codes |= thresholds.code(fabsf(values[i])) << 4 * i;
  const uint32_t words[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    signs |= ((words[i] >> 12 & 0x08) | (words[i] >> 24 & 0x80)) << 8 * i;
  }
  const uint32_t nonzero = (codes | codes >> 1 | codes >> 2) & 0x11111111;
  return codes | (signs & nonzero << 3);
}

struct Nvfp4 {
  uint32_t values;
  uint32_t scales;  // of 8 lanes, four groups of 16 values
};

// A token's own scale from its largest magnitude, and how its values are quantised under it.
template <Tokens kTokens>
struct Nvfp4Token;

template <>
struct Nvfp4Token<Tokens::kNvfp4> {
  float scale;
  float inverse;

  __device__ __forceinline__ explicit Nvfp4Token(uint32_t largest)
      : scale(__fmul_rn(fmaxf(from_bf16(largest), 1e-12f), static_cast<float>(1.0 / 2688))),
        inverse(__fdiv_rn(1.0f, scale)) {}

  // x / scale, correctly rounded: one correction of x * inverse is enough for every BF16 x and
  // float32 scale whose quotient is neither denormal nor infinite (all pairs of significands were
  // compared). Other quotients have the code 0 whatever they are.
  __device__ __forceinline__ float quotient(float x) const {
    const float near = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-near, scale, x), inverse, near);
  }

  __device__ __forceinline__ Nvfp4 operator()(const uint4& eight) const {
    const float largest = __fdiv_rn(from_bf16(group_max<2>(amax(eight))), scale);
    const float ratio = __fmul_rn(largest, static_cast<float>(1.0 / 6));
    // The smallest positive E4M3; written so that a NaN stays.
    const uint32_t block = to_e4m3(ratio < 0x1p-9f ? 0x1p-9f : ratio, 0.0f) & 0xFF;
    float values[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) values[i] = quotient(value(eight, i));
    const E2m1Thresholds thresholds(from_e4m3(block));
    return {to_e2m1(values, eight, thresholds), pack_scales<2>(block)};
  }
};

template <>
struct Nvfp4Token<Tokens::kNvfp4Sgl> {
  float scale;

  __device__ __forceinline__ explicit Nvfp4Token(uint32_t largest)
      : scale(__fdiv_rn(fmaxf(from_bf16(largest), 1e-4f), 2688.0f)) {}

  __device__ __forceinline__ Nvfp4 operator()(const uint4& eight) const {
    const float largest = from_bf16(group_max<2>(amax(eight)));
    const uint32_t block = to_e4m3(__fdiv_rn(largest, __fmul_rn(6.0f, scale)), 0.0f) & 0xFF;
    const float decoded = from_e4m3(block);
    const float inverse = decoded > 0 ? __fdiv_rn(1.0f, __fmul_rn(decoded, scale)) : 0.0f;
    float values[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) values[i] = __fmul_rn(value(eight, i), inverse);
    return {to_e2m1(values, eight, E2m1Thresholds(1.0f)), pack_scales<2>(block)};
  }
};

// Row of a token's scales in the pages of a fused shared expert: a page for each tile of `block_m`
// tokens, 128 rows at a time in the tensor core's order.
__device__ __forceinline__ uint32_t page_row(uint32_t token, uint32_t block_m) {
  const uint32_t row = token % block_m;
  const uint32_t page = (block_m + 127) / 128 * 128;
  return token / block_m * page + row / 128 * 128 + row % 32 * 4 + row % 128 / 32;
}

// Physical slot of a logical expert for a token: of its replicas the one that the token's hash
// picks. -1 where the map has a number of replicas or a slot that is out of range. Without a map
// slot p holds the logical expert p % num_logical.
__device__ __forceinline__ int32_t to_physical(uint32_t logical, uint32_t token,
                                               const int32_t* __restrict__ logical_to_physical,
                                               const int32_t* __restrict__ num_replicas,
                                               uint32_t num_experts, uint32_t num_logical,
                                               uint32_t max_replicas) {
  const uint32_t hash = token * 2654435769u;
  if (logical_to_physical == nullptr) {
    const uint32_t count = (num_experts - 1 - logical) / num_logical + 1;
    return static_cast<int32_t>(logical + hash % count * num_logical);
  }
  // As unsigned numbers, negative ones are too large.
  const auto count = static_cast<uint32_t>(num_replicas[logical]);
  if (count == 0 || count > max_replicas) return -1;
  const size_t entry = static_cast<size_t>(logical) * max_replicas + hash % count;
  const int32_t slot = logical_to_physical[entry];
  return static_cast<uint32_t>(slot) < num_experts ? slot : -1;
}

// One block a token, and at least one block.
//
// x [num_tokens, kHidden] BF16; topk_ids, topk_weights [num_tokens, top_k], top_k at most 32;
// padding_mask [num_tokens] bool, or null; logical_to_physical [num_logical, max_replicas] and
// num_replicas [num_logical], or null. Ids are logical; those out of range, those of padding and
// those whose slot in the map is out of range become -1 with the weight 0. l2_alpha
// [num_local_experts], if not null, becomes w2_weight_scale_2 times l2_activation_scale.
//
// Scale words of tokens are [num_tokens, words]; those of the shared expert [words,
// shared_sf_rows], a token in the row `page_row` says.
template <uint32_t kHidden, uint32_t kThreads, Tokens kTokens, Shared kShared>
// At least four blocks an SM: enough loads in flight, and registers for the rounding code.
__global__ void __launch_bounds__(kThreads, 4)
    stage_tokens(const uint4* __restrict__ x, const int32_t* __restrict__ topk_ids,
                 const float* __restrict__ topk_weights, const bool* __restrict__ padding_mask,
                 const int32_t* __restrict__ logical_to_physical,
                 const int32_t* __restrict__ num_replicas,
                 const float* __restrict__ w2_weight_scale_2, void* __restrict__ buf_x,
                 void* __restrict__ buf_x_sf, float* __restrict__ buf_x_scales,
                 int64_t* __restrict__ buf_topk_idx, float* __restrict__ buf_topk_weights,
                 void* __restrict__ buf_shared_l1_acts,
                 uint32_t* __restrict__ buf_shared_l1_acts_sf, float* __restrict__ l2_alpha,
                 uint32_t num_tokens, uint32_t top_k, uint32_t num_experts, uint32_t num_logical,
                 uint32_t max_replicas, uint32_t block_m, uint32_t shared_sf_rows,
                 uint32_t num_local_experts, float l2_activation_scale) {
  static_assert(kHidden % (8 * kWarp) == 0 && kThreads % kWarp == 0,
                "whole warps: hidden_size is a multiple of 256");
  constexpr bool kIsNvfp4 = kTokens == Tokens::kNvfp4 || kTokens == Tokens::kNvfp4Sgl;
  constexpr uint32_t kVectors = kHidden / 8;
  constexpr uint32_t kRounds = (kVectors + kThreads - 1) / kThreads;
  const uint32_t token = blockIdx.x;
  const uint32_t lane = threadIdx.x % kWarp;

  if (l2_alpha != nullptr && token == 0) {
    for (uint32_t expert = threadIdx.x; expert < num_local_experts; expert += kThreads) {
      l2_alpha[expert] = __fmul_rn(w2_weight_scale_2[expert], l2_activation_scale);
    }
  }
  if (token >= num_tokens) return;

  uint4 vectors[kRounds];
#pragma unroll
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t i = round * kThreads + threadIdx.x;
    vectors[round] = i < kVectors ? x[static_cast<size_t>(token) * kVectors + i] : uint4{};
  }

  if (threadIdx.x < top_k) {
    const size_t slot = static_cast<size_t>(token) * top_k + threadIdx.x;
    const auto logical = static_cast<uint32_t>(topk_ids[slot]);
    const bool padding = padding_mask != nullptr && padding_mask[token];
    const bool known = !padding && logical < num_logical;
    const int32_t physical = known ? to_physical(logical, token, logical_to_physical, num_replicas,
                                                 num_experts, num_logical, max_replicas)
                                   : -1;
    buf_topk_idx[slot] = physical;
    buf_topk_weights[slot] = physical >= 0 ? topk_weights[slot] : 0.0f;
  }

  uint32_t largest = 0;
  if constexpr (kIsNvfp4) {
#pragma unroll
    for (uint32_t round = 0; round < kRounds; ++round) {
      largest = max(largest, amax_skipping_nan(vectors[round]));
    }
    largest = block_max<kThreads>(largest);
  }

#pragma unroll
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint32_t i = round * kThreads + threadIdx.x;
    if (i >= kVectors) break;  // the whole warp
    const uint4& eight = vectors[round];
    const size_t place = static_cast<size_t>(token) * kVectors + i;

    if constexpr (kTokens == Tokens::kBf16) {
      static_cast<uint4*>(buf_x)[place] = eight;
    } else if constexpr (kTokens == Tokens::kFp8Block) {
      const float most = fmaxf(from_bf16(group_max<16>(amax_skipping_nan(eight))), 1e-10f);
      const float scale = __fdiv_rn(most, kE4m3Max);
      static_cast<uint2*>(buf_x)[place] = to_e4m3(eight, __fdiv_rn(1.0f, scale));
      if (lane % 16 == 0) static_cast<float*>(buf_x_sf)[place / 16] = scale;
    } else if constexpr (kIsNvfp4) {
      const Nvfp4Token<kTokens> quantise(largest);
      const Nvfp4 nvfp4 = quantise(eight);
      static_cast<uint32_t*>(buf_x)[place] = nvfp4.values;
      if (lane % 8 == 0) static_cast<uint32_t*>(buf_x_sf)[place / 8] = nvfp4.scales;
      if (i == 0) buf_x_scales[token] = quantise.scale;
    }

    if constexpr (kShared == Shared::kBf16) {
      static_cast<uint4*>(buf_shared_l1_acts)[place] = eight;
    }
    if constexpr (kTokens == Tokens::kMxfp8 || kShared == Shared::kMxfp8) {
      const Mxfp8 mxfp8 = to_mxfp8(eight);
      void* rows = kTokens == Tokens::kMxfp8 ? buf_x : buf_shared_l1_acts;
      static_cast<uint2*>(rows)[place] = mxfp8.values;
      if (lane % 16 == 0) {
        if constexpr (kTokens == Tokens::kMxfp8) {
          static_cast<uint32_t*>(buf_x_sf)[place / 16] = mxfp8.scales;
        }
        if constexpr (kShared != Shared::kNone) {
          const size_t column = static_cast<size_t>(i / 16) * shared_sf_rows;
          buf_shared_l1_acts_sf[column + page_row(token, block_m)] = mxfp8.scales;
        }
      }
    }
  }
}

}  // namespace jax_megamoe
