// What lies around the matrix products of the grouped implementation: rows sorted by expert and
// tokens quantised, the gated activation between the products, and the weighted sum after them.
//
// The arithmetic is that of jax_megamoe/op/staging.py and expert.py. Where a product takes BF16
// rows, tokens of the MX and NV formats are quantised and decoded again, which is exact in BF16.

#pragma once

#include <staging.cuh>

namespace jax_megamoe {

// What a product's rows are: BF16 as they come, BF16 that hold MXFP8 or NVFP4 values, or E4M3 with
// a float32 scale by 128.
enum class Rows { kBf16, kMxfp8, kNvfp4, kFp8Block };

enum class Gated { kSwiglu, kSitu };

// Waits for the kernel before where this launch may start early; its results are there then.
//
// Pointers to these results are not __restrict__: a const one is read by ld.global.nc, which takes
// memory to be constant from a kernel's start on, so that the compiler may move it ahead of the
// wait, and no wait orders it (PTX ISA, memory consistency model). What nobody writes after the
// start may be read so. The emulator refuses such a load of results (docs/emulator.md).
template <bool kEarly>
__device__ __forceinline__ void wait_for_predecessor() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kEarly) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel behind this one start early and wait for this one's end.
template <bool kEarly>
__device__ __forceinline__ void let_successor_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kEarly) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// float32 to BF16 bits, nearest even; a NaN is 0x7FFF.
__device__ __forceinline__ uint32_t to_bf16(float number) {
  const uint32_t bits = __float_as_uint(number);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

// Two float32 likewise, in one instruction of a GPU; `low` in the low half.
__device__ __forceinline__ uint32_t to_bf16(float low, float high) {
#ifdef __CUDA_ARCH__
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return to_bf16(low) | to_bf16(high) << 16;
#endif
}

// Eight float32 as BF16.
__device__ __forceinline__ uint4 pack_bf16(const float (&values)[8]) {
  uint32_t words[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) words[i] = to_bf16(values[2 * i], values[2 * i + 1]);
  return {words[0], words[1], words[2], words[3]};
}

// Bits of the largest magnitude of eight float32; NaNs are skipped, or win.
template <bool kSkipNan>
__device__ __forceinline__ uint32_t amax(const float (&values)[8]) {
  if constexpr (kSkipNan) {
    float largest = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(values[i]));
    return __float_as_uint(largest);
  }
  uint32_t largest = 0;
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) largest = max(largest, __float_as_uint(values[i]) & 0x7FFFFFFF);
  return largest;
}

__device__ __forceinline__ uint2 to_e4m3(const float (&values)[8], float factor) {
  uint32_t pairs[4];
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    pairs[i] = to_e4m3(__fmul_rn(values[2 * i], factor), __fmul_rn(values[2 * i + 1], factor));
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

__device__ __forceinline__ void unpack(const uint4& eight, float (&values)[8]) {
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) values[i] = value(eight, i);
}

// UE8M0 byte of the smallest power of two s with `largest` <= 448 s, `largest` floored at 1e-4;
// `largest` as bits of a float32.
__device__ __forceinline__ uint32_t mxfp8_exponent_of(uint32_t largest) {
  if (largest >= 0x7F800000) return 254;
  const uint32_t bits = __float_as_uint(fmaxf(__uint_as_float(largest), 1e-4f));
  return 127 + ((static_cast<int32_t>(bits - __float_as_uint(kE4m3Max)) + 0x7FFFFF) >> 23);
}

// E4M3 values of eight under a power of two, decoded to BF16: exact, as an E4M3 has four bits.
__device__ __forceinline__ uint4 decoded_mxfp8(const float (&values)[8], uint32_t exponent) {
  const uint2 bytes = to_e4m3(values, inverse_of_ue8m0(exponent));
  const float unit = __uint_as_float(exponent << 23);
  float decoded[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t byte = (i < 4 ? bytes.x : bytes.y) >> i % 4 * 8 & 0xFF;
    const float magnitude = __fmul_rn(from_e4m3(byte), unit);
    decoded[i] = byte & 0x80 ? -magnitude : magnitude;
  }
  return pack_bf16(decoded);
}

// E2M1 codes of eight values times an E4M3 scale as BF16: exact.
__device__ __forceinline__ uint4 decoded_e2m1(uint32_t codes, float scale) {
  float decoded[8];
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i) {
    const uint32_t code = codes >> 4 * i & 7;
    const float step =
        code < 2 ? 0.5f * code : 0.25f * (4 + 2 * (code & 1)) * (1u << (code / 2 - 1));
    const float magnitude = __fmul_rn(step, scale);
    decoded[i] = codes >> 4 * i & 8 ? -magnitude : magnitude;
  }
  return pack_bf16(decoded);
}

// The lanes of this warp whose number is this lane's, and how many of them come before it.
struct Alike {
  uint32_t count, before;

  __device__ __forceinline__ explicit Alike(uint32_t number) {
    const uint32_t lanes = __match_any_sync(kAllLanes, number);
    count = __popc(lanes);
    before = __popc(lanes & ((1u << threadIdx.x % kWarp) - 1));
  }
};

inline constexpr uint32_t kNoExpert = 0xFFFFFFFF;

// What is written of experts; any may be null. See `group_tokens`.
struct Tables {
  uint32_t *expert_ids, *num_slots;
  int32_t *expert_ends, *stats;
};

// An expert's rows that other blocks sort: of the blocks before this one, and of those behind it.
struct Elsewhere {
  uint32_t before = 0, behind = 0;
};

// A block sorts rows (token, slot) by expert, one a thread, stably: so that the same call gives the
// same tables, and the products' tiles the same rows.
template <uint32_t kThreads, uint32_t kExperts, uint32_t kBlockRows>
struct Sorter {
  static constexpr uint32_t kWarps = kThreads / kWarp;

  uint32_t (&counts)[kWarps][kExperts];  // of a warp's rows; later where each warp's begin
  uint32_t (&totals)[kExperts];
  uint32_t (&starts)[kExperts + 1];
  uint32_t warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;

  // Slots of every expert, and the row's of this thread.
  //
  // expert: the row's or kNoExpert; warps: those of this block that have rows; elsewhere(expert) ->
  // Elsewhere. All threads of the block come here.
  template <typename OfExpert>
  __device__ __forceinline__ uint32_t slot_of(uint32_t expert, uint32_t warps, OfExpert elsewhere) {
    const Alike alike(expert);
    if (warp < warps) {
      for (uint32_t each = lane; each < kExperts; each += kWarp) counts[warp][each] = 0;
      __syncwarp();
      if (alike.before == 0 && expert != kNoExpert) counts[warp][expert] = alike.count;
    }
    __syncthreads();
    for (uint32_t each = threadIdx.x; each < kExperts; each += kThreads) {
      const Elsewhere others = elsewhere(each);
      uint32_t sum = others.before;
#pragma unroll
      for (uint32_t other = 0; other < kWarps; ++other) {
        if (other >= warps) break;
        const uint32_t number = counts[other][each];
        counts[other][each] = sum;
        sum += number;
      }
      totals[each] = sum + others.behind;
    }
    __syncthreads();
    if (warp == 0) lay_out();
    __syncthreads();
    return expert == kNoExpert ? 0 : starts[expert] + counts[warp][expert] + alike.before;
  }

  // Where each expert's slots start; one warp does it.
  __device__ __forceinline__ void lay_out() {
    constexpr uint32_t kShare = (kExperts + kWarp - 1) / kWarp;
    uint32_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i) {
      const uint32_t expert = lane * kShare + i;
      if (expert < kExperts) sum += slots_of(expert);
    }
    uint32_t end = sum;
#pragma unroll
    for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
      const uint32_t before = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += before;
    }
    uint32_t start = end - sum;
#pragma unroll
    for (uint32_t i = 0; i < kShare; ++i) {
      const uint32_t expert = lane * kShare + i;
      if (expert >= kExperts) break;
      starts[expert] = start;
      start += slots_of(expert);
    }
    if (lane == kWarp - 1) starts[kExperts] = end;
  }

  __device__ __forceinline__ uint32_t slots_of(uint32_t expert) const {
    return (totals[expert] + kBlockRows - 1) / kBlockRows * kBlockRows;
  }

  // What is said of experts: each block's, the ends of their rows, their numbers; of those whose
  // number leaves `first` when divided by `step`.
  __device__ __forceinline__ void describe(const Tables& tables, uint32_t first, uint32_t step) {
    if (threadIdx.x == 0 && first == 0 && tables.num_slots != nullptr) {
      tables.num_slots[0] = starts[kExperts];
    }
    for (uint32_t each = first + threadIdx.x * step; each < kExperts; each += kThreads * step) {
      const uint32_t start = starts[each];
      if (tables.expert_ids != nullptr) {
        const uint32_t end = starts[each + 1] / kBlockRows;
        for (uint32_t block = start / kBlockRows; block < end; ++block) {
          tables.expert_ids[block] = each;
        }
      }
      if (tables.expert_ends != nullptr) tables.expert_ends[each] = start + totals[each];
      if (tables.stats != nullptr) tables.stats[each] += static_cast<int32_t>(totals[each]);
    }
  }
};

// Sorts the rows of a call, or counts them for `place_rows`, and quantises its tokens.
//
// The first num_sorters blocks have kThreads rows each. One alone sorts them; more write how many
// each expert has to row_counts [num_sorters, kExperts], which is null for one. The other blocks
// quantise tokens, kThreads groups of eight values each, or for NVFP4 one token each.
//
// x [num_tokens, kHidden] BF16; topk_ids [num_tokens, top_k] logical; padding_mask, or null;
// logical_to_physical and num_replicas as in `stage_tokens`, or null.
//
// row_experts [num_tokens * top_k] becomes each row's expert, -1 where it has none. An expert has
// slots for its rows, whole blocks of kBlockRows. stats [kExperts], or null, grows by the rows of
// each expert.
//
// For products that find rows by tables, else null: sorted_ids has the row of each slot, the number
// of rows behind an expert's last; expert_ids the expert of each block; num_slots [1] how many
// slots are in use; locks [num_locks] become 0. For products whose rows lie in slots, else null:
// row_slots [num_tokens * top_k] has the slot of each row with an expert; expert_ends [kExperts]
// the slot behind each expert's last row. All but row_experts and locks are left to `place_rows`
// where there is more than one sorter.
//
// rows: what the first product reads (kRows), null for kBf16, which reads x itself; row_scales:
// float32 [num_tokens, kHidden / 128] for kFp8Block, [num_tokens] for kNvfp4.
template <uint32_t kHidden, uint32_t kThreads, Rows kRows, uint32_t kExperts, uint32_t kBlockRows>
__global__ void __launch_bounds__(kThreads)
    group_tokens(const uint4* __restrict__ x, const int32_t* __restrict__ topk_ids,
                 const bool* __restrict__ padding_mask,
                 const int32_t* __restrict__ logical_to_physical,
                 const int32_t* __restrict__ num_replicas, int32_t* __restrict__ row_experts,
                 uint32_t* __restrict__ row_counts, uint32_t* __restrict__ sorted_ids,
                 uint32_t* __restrict__ expert_ids, uint32_t* __restrict__ num_slots,
                 int32_t* __restrict__ locks, uint32_t* __restrict__ row_slots,
                 int32_t* __restrict__ expert_ends, int32_t* __restrict__ stats,
                 void* __restrict__ rows, float* __restrict__ row_scales, uint32_t num_tokens,
                 uint32_t top_k, uint32_t num_logical, uint32_t max_replicas, uint32_t num_locks,
                 uint32_t num_sorters) {
  static_assert(kHidden % 128 == 0 && kThreads % kWarp == 0, "whole groups and whole warps");
  // Only `place_rows` and `gather_rows` are launched to start early after this, and wait for it.
  let_successor_start<true>();
  if (blockIdx.x < num_sorters) {
    constexpr uint32_t kWarps = kThreads / kWarp;
    __shared__ uint32_t counts[kWarps][kExperts];
    __shared__ uint32_t totals[kExperts];
    __shared__ uint32_t starts[kExperts + 1];
    const uint32_t num_rows = num_tokens * top_k;
    const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
    if (blockIdx.x == 0) {
      for (uint32_t i = threadIdx.x; i < num_locks; i += kThreads) locks[i] = 0;
    }
    // Padding first, over which the rows are written: an expert that has any fills its last block.
    if (num_sorters == 1 && sorted_ids != nullptr) {
      const uint32_t most = num_rows + min(num_rows, kExperts) * (kBlockRows - 1);
      for (uint32_t slot = row; slot < most; slot += kThreads) sorted_ids[slot] = num_rows;
    }
    uint32_t expert = kNoExpert;
    if (row < num_rows) {
      const uint32_t token = row / top_k;
      const auto logical = static_cast<uint32_t>(topk_ids[row]);
      const bool padding = padding_mask != nullptr && padding_mask[token];
      if (!padding && logical < num_logical) {
        expert = to_physical(logical, token, logical_to_physical, num_replicas, kExperts,
                             num_logical, max_replicas);
      }
      row_experts[row] = static_cast<int32_t>(expert);
    }
    if (num_sorters > 1) {
      for (uint32_t each = threadIdx.x; each < kExperts; each += kThreads) totals[each] = 0;
      __syncthreads();
      if (expert != kNoExpert) atomicAdd(&totals[expert], 1u);
      __syncthreads();
      uint32_t* own = row_counts + static_cast<size_t>(blockIdx.x) * kExperts;
      for (uint32_t each = threadIdx.x; each < kExperts; each += kThreads) own[each] = totals[each];
      return;
    }
    Sorter<kThreads, kExperts, kBlockRows> sorter{counts, totals, starts};
    const uint32_t warps = (num_rows + kWarp - 1) / kWarp;
    const uint32_t slot = sorter.slot_of(expert, warps, [](uint32_t) { return Elsewhere{}; });
    sorter.describe({expert_ids, num_slots, expert_ends, stats}, 0, 1);
    if (expert != kNoExpert) {
      if (sorted_ids != nullptr) sorted_ids[slot] = row;
      if (row_slots != nullptr) row_slots[row] = slot;
    }
    return;
  }

  constexpr uint32_t kVectors = kHidden / 8;
  const uint32_t block = blockIdx.x - num_sorters;
  if constexpr (kRows == Rows::kNvfp4) {
    const uint4* vectors = x + static_cast<size_t>(block) * kVectors;
    uint32_t largest = 0;
    for (uint32_t i = threadIdx.x; i < kVectors; i += kThreads) {
      largest = max(largest, amax_skipping_nan(vectors[i]));
    }
    const Nvfp4Token<Tokens::kNvfp4> quantise(block_max<kThreads>(largest));
    if (threadIdx.x == 0) row_scales[block] = quantise.scale;
    for (uint32_t start = 0; start < kVectors; start += kThreads) {
      const uint32_t i = start + threadIdx.x;
      const uint4 eight = i < kVectors ? vectors[i] : uint4{};
      const Nvfp4 nvfp4 = quantise(eight);
      // The word has the scales of four neighbouring groups of 16.
      const float scale = from_e4m3(nvfp4.scales >> threadIdx.x / 2 % 4 * 8 & 0xFF);
      if (i < kVectors) {
        static_cast<uint4*>(rows)[static_cast<size_t>(block) * kVectors + i] =
            decoded_e2m1(nvfp4.values, scale);
      }
    }
  } else if constexpr (kRows != Rows::kBf16) {
    const size_t place = static_cast<size_t>(block) * kThreads + threadIdx.x;
    const bool inside = place < static_cast<size_t>(num_tokens) * kVectors;
    const uint4 eight = inside ? x[place] : uint4{};
    if constexpr (kRows == Rows::kMxfp8) {
      const uint32_t exponent = mxfp8_exponent(group_max<4>(amax_skipping_nan(eight)));
      float values[8];
      unpack(eight, values);
      if (inside) static_cast<uint4*>(rows)[place] = decoded_mxfp8(values, exponent);
    } else {
      const float most = fmaxf(from_bf16(group_max<16>(amax_skipping_nan(eight))), 1e-10f);
      const float scale = __fdiv_rn(most, kE4m3Max);
      if (inside) {
        static_cast<uint2*>(rows)[place] = to_e4m3(eight, __fdiv_rn(1.0f, scale));
        if (place % 16 == 0) row_scales[place / 16] = scale;
      }
    }
  }
}

// After `group_tokens` with more than one sorter: each block sorts kThreads rows.
//
// row_experts [num_rows] and row_counts [num_sorters, kExperts] as it left them; the rest is that
// of `group_tokens`.
template <uint32_t kThreads, uint32_t kExperts, uint32_t kBlockRows, bool kEarly>
__global__ void __launch_bounds__(kThreads)
    place_rows(const int32_t* row_experts, const uint32_t* row_counts,
               uint32_t* __restrict__ sorted_ids, uint32_t* __restrict__ expert_ids,
               uint32_t* __restrict__ num_slots, uint32_t* __restrict__ row_slots,
               int32_t* __restrict__ expert_ends, int32_t* __restrict__ stats, uint32_t num_rows,
               uint32_t num_sorters) {
  constexpr uint32_t kWarps = kThreads / kWarp;
  __shared__ uint32_t counts[kWarps][kExperts];
  __shared__ uint32_t totals[kExperts];
  __shared__ uint32_t starts[kExperts + 1];
  let_successor_start<kEarly>();
  wait_for_predecessor<kEarly>();
  const uint32_t row = blockIdx.x * kThreads + threadIdx.x;
  const uint32_t expert = row < num_rows ? static_cast<uint32_t>(row_experts[row]) : kNoExpert;
  Sorter<kThreads, kExperts, kBlockRows> sorter{counts, totals, starts};
  const uint32_t slot = sorter.slot_of(expert, kWarps, [=](uint32_t each) {
    Elsewhere found;
#pragma unroll 8
    for (uint32_t block = 0; block < num_sorters; ++block) {
      const uint32_t number = row_counts[static_cast<size_t>(block) * kExperts + each];
      if (block < blockIdx.x) found.before += number;
      if (block > blockIdx.x) found.behind += number;
    }
    return found;
  });
  if (expert != kNoExpert) {
    if (sorted_ids != nullptr) sorted_ids[slot] = row;
    if (row_slots != nullptr) row_slots[row] = slot;
  }
  sorter.describe({expert_ids, num_slots, expert_ends, stats}, blockIdx.x, num_sorters);
  if (sorted_ids == nullptr) return;
  // Other blocks place rows here: only what is behind an expert's last row is filled.
  for (uint32_t each = blockIdx.x + sorter.warp * num_sorters; each < kExperts;
       each += kWarps * num_sorters) {
    for (uint32_t at = starts[each] + totals[each] + sorter.lane; at < starts[each + 1];
         at += kWarp) {
      sorted_ids[at] = num_rows;
    }
  }
}

// Before the first of two products whose rows lie in slots: each row's token into its slot.
//
// x [num_rows / top_k, kHidden] BF16; row_experts and row_slots [num_rows] as of `group_tokens`;
// rows [slots, kHidden]. Slots without a row are left alone.
template <uint32_t kHidden, uint32_t kThreads, bool kEarly>
__global__ void __launch_bounds__(kThreads)
    gather_rows(const uint4* __restrict__ x, const int32_t* row_experts, const uint32_t* row_slots,
                uint4* __restrict__ rows, uint32_t num_rows, uint32_t top_k) {
  constexpr uint32_t kVectors = kHidden / 8;
  let_successor_start<kEarly>();
  const size_t place = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto row = static_cast<uint32_t>(place / kVectors);
  const uint32_t column = place % kVectors;
  if (row >= num_rows) return;
  // Tokens are older than `group_tokens`, which does not start early. Its tables are waited for,
  // also behind `place_rows`: that may start early itself, and its end comes after its own wait.
  const uint4 eight = x[static_cast<size_t>(row / top_k) * kVectors + column];
  wait_for_predecessor<kEarly>();
  if (row_experts[row] < 0) return;
  rows[static_cast<size_t>(row_slots[row]) * kVectors + column] = eight;
}

// 1 / (1 + exp(-number)); kFast: by approximate exp2 and reciprocal, 2^-21 off.
template <bool kFast>
__device__ __forceinline__ float sigmoid(float number) {
#ifdef __CUDA_ARCH__
  if constexpr (kFast) return __fdividef(1.0f, 1.0f + __expf(-number));
#endif
  return 1.0f / (1.0f + expf(-number));
}

// gate * sigmoid(alpha * gate) * (up + beta), or SiTU. The negative clamp stands for none.
template <Gated kGated, bool kFast>
__device__ __forceinline__ float activated(float gate, float up, float clamp, float alpha,
                                           float beta) {
  if (clamp >= 0) {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
  }
  if constexpr (kGated == Gated::kSitu) {
    const float linear = beta != 0 ? beta * tanhf(up / beta) : up;
    return alpha * tanhf(gate / alpha) * sigmoid<kFast>(gate) * linear;
  }
  return gate * sigmoid<kFast>(alpha * gate) * (up + beta);
}

// A row's hidden values as the second product reads them: eight of each thread, 128 values of 16
// neighbouring lanes. `place` counts eights.
template <Rows kRows>
__device__ __forceinline__ void store_rows(const float (&values)[8], float input_scale, bool inside,
                                           size_t place, void* __restrict__ rows,
                                           float* __restrict__ row_scales) {
  if constexpr (kRows == Rows::kBf16) {
    if (inside) static_cast<uint4*>(rows)[place] = pack_bf16(values);
  } else if constexpr (kRows == Rows::kMxfp8) {
    const uint32_t exponent = mxfp8_exponent_of(group_max<4>(amax<false>(values)));
    if (inside) static_cast<uint4*>(rows)[place] = decoded_mxfp8(values, exponent);
  } else if constexpr (kRows == Rows::kNvfp4) {
    const float largest = __uint_as_float(group_max<2>(amax<false>(values)));
    const float ratio = __fdiv_rn(largest, __fmul_rn(6.0f, input_scale));
    const float scale = from_e4m3(to_e4m3(ratio < 0x1p-9f ? 0x1p-9f : ratio, 0.0f) & 0xFF);
    const float inverse = scale > 0 ? __fdiv_rn(1.0f, __fmul_rn(scale, input_scale)) : 0.0f;
    float scaled[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) scaled[i] = __fmul_rn(values[i], inverse);
    const uint32_t codes = to_e2m1(scaled, pack_bf16(scaled), E2m1Thresholds(1.0f));
    if (inside) static_cast<uint4*>(rows)[place] = decoded_e2m1(codes, scale);
  } else {
    const uint32_t bits = group_max<16>(amax<true>(values));
    const float largest = fmaxf(__uint_as_float(bits), 1e-10f);
    const float scale = __fmul_rn(largest, static_cast<float>(1.0 / 448));
    if (inside) {
      static_cast<uint2*>(rows)[place] = to_e4m3(values, __fdiv_rn(1.0f, scale));
      if (place % 16 == 0) row_scales[place / 16] = scale;
    }
  }
}

// Between the products: bias, activation, top-k weight and rounding, eight values a thread.
//
// h [num_rows, 2 * kInter] BF16, gate columns first, or in turns of eight columns (kTurns), as are
// those of bias; row_experts and topk_weights [num_rows]; row_slots [num_rows], or null: where h
// and rows have each row, else they have it at its own number; token_scales [num_rows / top_k], or
// null; bias [experts, 2 * kInter] float32, or null; input_scale [1], NVFP4's, or null. Rows
// without an expert are left alone. kRounds: gate and up are rounded to BF16 first, as the SM100
// kernels do; kWeighs: the top-k weight multiplies here; kFast: see `sigmoid`.
template <uint32_t kInter, uint32_t kThreads, Rows kRows, Gated kGated, bool kTurns, bool kRounds,
          bool kWeighs, bool kFast, bool kEarly>
__global__ void __launch_bounds__(kThreads)
    activate_rows(const uint4* h, const int32_t* __restrict__ row_experts,
                  const uint32_t* __restrict__ row_slots, const float* __restrict__ topk_weights,
                  const float* __restrict__ token_scales, const float4* __restrict__ bias,
                  const float* __restrict__ input_scale, void* __restrict__ rows,
                  float* __restrict__ row_scales, uint32_t num_rows, uint32_t top_k, float clamp,
                  float alpha, float beta) {
  static_assert(kInter % 128 == 0 && kThreads % kWarp == 0, "whole groups and whole warps");
  constexpr uint32_t kVectors = kInter / 8;
  let_successor_start<kEarly>();
  const size_t place = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto row = static_cast<uint32_t>(place / kVectors);
  const uint32_t column = place % kVectors;
  // The tables are there: the product ahead started after their kernel had ended, or, of rows in
  // slots, waits for that and lets nothing start before its own end.
  const int32_t expert = row < num_rows ? row_experts[row] : -1;
  const bool inside = expert >= 0;
  const uint32_t slot = inside && row_slots != nullptr ? row_slots[row] : row;
  const float weight = kWeighs && inside ? topk_weights[row] : 1.0f;
  const float token_scale = inside && token_scales != nullptr ? token_scales[row / top_k] : 1.0f;
  wait_for_predecessor<kEarly>();

  // Eights of gate and of up in a row of h.
  const uint32_t at_gate = kTurns ? 2 * column : column;
  const uint32_t at_up = kTurns ? at_gate + 1 : at_gate + kVectors;
  float values[8] = {};
  // Read before it is known whether the row has an expert: one latency rather than two. Without
  // one nothing of it is stored.
  uint4 at[2] = {};
  if (row < num_rows) {
    const uint4* of_row = h + static_cast<size_t>(slot) * 2 * kVectors;
    at[0] = of_row[at_gate];
    at[1] = of_row[at_up];
  }
  if (inside) {
    float gate[8], up[8];
    unpack(at[0], gate);
    unpack(at[1], up);
    if (token_scales != nullptr) {
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) {
        gate[i] = __fmul_rn(gate[i], token_scale);
        up[i] = __fmul_rn(up[i], token_scale);
      }
    }
    if (bias != nullptr) {
      const float4* of_expert = bias + static_cast<size_t>(expert) * 4 * kVectors;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float4 first = of_expert[2 * at_gate + half], second = of_expert[2 * at_up + half];
        const float gates[] = {first.x, first.y, first.z, first.w};
        const float ups[] = {second.x, second.y, second.z, second.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          gate[4 * half + i] = __fadd_rn(gate[4 * half + i], gates[i]);
          up[4 * half + i] = __fadd_rn(up[4 * half + i], ups[i]);
        }
      }
    }
    // Values of h are BF16 already where nothing was multiplied or added.
    if (kRounds && (token_scales != nullptr || bias != nullptr)) {
      unpack(pack_bf16(gate), gate);
      unpack(pack_bf16(up), up);
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      values[i] = activated<kGated, kFast>(gate[i], up[i], clamp, alpha, beta);
      if constexpr (kWeighs) values[i] = __fmul_rn(values[i], weight);
    }
  }
  store_rows<kRows>(values, kRows == Rows::kNvfp4 ? *input_scale : 1.0f, inside,
                    static_cast<size_t>(slot) * kVectors + column, rows, row_scales);
}

// After the products: y [num_tokens, kHidden] BF16, the sum over a token's experts in slot order.
//
// outputs [num_tokens * kTopK, kHidden] BF16, each row at its number or, where row_slots is not
// null, at its slot; bias [experts, kHidden] float32, or null, is added
// times the top-k weight. kWeighs: the top-k weight multiplies the output too. A token without
// experts becomes 0.
template <uint32_t kHidden, uint32_t kThreads, uint32_t kTopK, bool kWeighs, bool kEarly>
__global__ void __launch_bounds__(kThreads)
    combine_rows(const uint4* outputs, const int32_t* __restrict__ row_experts,
                 const uint32_t* __restrict__ row_slots, const float* __restrict__ topk_weights,
                 const float4* __restrict__ bias, uint4* __restrict__ y, uint32_t num_tokens) {
  constexpr uint32_t kVectors = kHidden / 8;
  const size_t place = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto token = static_cast<uint32_t>(place / kVectors);
  const uint32_t column = place % kVectors;
  if (token >= num_tokens) return;
  const bool weighs = kWeighs || bias != nullptr;
  int32_t experts[kTopK];
  uint32_t slots[kTopK];
  float weights[kTopK];
#pragma unroll
  for (uint32_t k = 0; k < kTopK; ++k) {
    const size_t row = static_cast<size_t>(token) * kTopK + k;
    // As in `activate_rows`: older than what is waited for.
    experts[k] = row_experts[row];
    const bool moved = row_slots != nullptr && experts[k] >= 0;
    slots[k] = moved ? row_slots[row] : static_cast<uint32_t>(row);
    weights[k] = weighs ? topk_weights[row] : 1.0f;
  }
  wait_for_predecessor<kEarly>();
  uint4 eights[kTopK];
#pragma unroll
  for (uint32_t k = 0; k < kTopK; ++k) {
    const size_t at = static_cast<size_t>(slots[k]) * kVectors + column;
    eights[k] = experts[k] >= 0 ? outputs[at] : uint4{};
  }
  float sums[8] = {};
#pragma unroll
  for (uint32_t k = 0; k < kTopK; ++k) {
    if (experts[k] < 0) continue;
    const float weight = weights[k];
    float values[8];
    unpack(eights[k], values);
    if (bias != nullptr) {
      const float4* of_expert = bias + (static_cast<size_t>(experts[k]) * kVectors + column) * 2;
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float4 four = of_expert[half];
        const float added[] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
          const float term = kWeighs ? added[i] : __fmul_rn(added[i], weight);
          values[4 * half + i] = __fadd_rn(values[4 * half + i], term);
        }
      }
      unpack(pack_bf16(values), values);
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      sums[i] = __fadd_rn(sums[i], kWeighs ? __fmul_rn(values[i], weight) : values[i]);
    }
  }
  y[place] = pack_bf16(sums);
}

}  // namespace jax_megamoe
