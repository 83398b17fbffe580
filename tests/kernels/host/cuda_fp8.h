// As much of CUDA as this package's kernels use, for a host compiler: it takes the place of the
// header of this name. A block's threads are fibers that take turns; warps and blocks meet as on a
// GPU.

#pragma once

#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Index {
  uint32_t x;
};

namespace host_cuda {

inline constexpr uint32_t kWarp = 32;

// Where a number of threads wait for each other.
struct Meeting {
  uint32_t size, arrived = 0, number = 0;
};

struct Block {
  ucontext_t scheduler;
  std::vector<ucontext_t> threads;
  std::vector<std::vector<char>> stacks;
  std::vector<bool> done;
  std::vector<uint32_t> shared_lanes;
  std::vector<Meeting> warps;
  Meeting all;
  std::function<void()> kernel;
};

inline Block block;

}  // namespace host_cuda

inline Index threadIdx, blockIdx;

namespace host_cuda {

inline void Wait(Meeting& meeting) {
  const uint32_t number = meeting.number, self = threadIdx.x;
  if (++meeting.arrived == meeting.size) {
    meeting.arrived = 0;
    ++meeting.number;
  }
  while (meeting.number == number) {
    swapcontext(&block.threads[self], &block.scheduler);
    threadIdx.x = self;
  }
}

inline void Thread() {
  const uint32_t self = threadIdx.x;
  block.kernel();
  block.done[self] = true;
  swapcontext(&block.threads[self], &block.scheduler);
}

// Runs a kernel's blocks one after the other.
inline void Launch(uint32_t num_blocks, uint32_t num_threads, std::function<void()> kernel) {
  block.kernel = std::move(kernel);
  block.threads.resize(num_threads);
  block.stacks.assign(num_threads, std::vector<char>(1 << 16));
  block.shared_lanes.assign(num_threads, 0);
  for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) {
    block.done.assign(num_threads, false);
    block.warps.assign(num_threads / kWarp, {kWarp});
    block.all = {num_threads};
    for (uint32_t thread = 0; thread < num_threads; ++thread) {
      ucontext_t& context = block.threads[thread];
      getcontext(&context);
      context.uc_stack = {block.stacks[thread].data(), 0, block.stacks[thread].size()};
      makecontext(&context, Thread, 0);
    }
    for (bool running = true; running;) {
      running = false;
      for (uint32_t thread = 0; thread < num_threads; ++thread) {
        if (block.done[thread]) continue;
        running = true;
        threadIdx.x = thread;
        swapcontext(&block.scheduler, &block.threads[thread]);
      }
    }
  }
}

// What `lane` of this thread's warp passes, every lane having arrived.
template <typename Read>
uint32_t Exchange(uint32_t number, Read read) {
  const uint32_t self = threadIdx.x, first = self / kWarp * kWarp;
  Meeting& warp = block.warps[self / kWarp];
  block.shared_lanes[self] = number;
  Wait(warp);
  const uint32_t result = read(&block.shared_lanes[first]);
  Wait(warp);
  return result;
}

// Nearest even, saturating at 448, every NaN 0x7F.
inline uint32_t ToE4m3(float number) {
  if (std::isnan(number)) return 0x7F;
  const uint32_t sign = std::signbit(number) ? 0x80 : 0;
  const float magnitude = std::fabs(number);
  if (magnitude >= 448) return sign | 0x7E;
  if (magnitude == 0) return sign;
  const int exponent = std::max(std::ilogb(magnitude), -6);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return sign | ((exponent + 6) * 8 + steps);
}

}  // namespace host_cuda

// Threads of a block take turns and blocks run one after the other.
inline uint32_t atomicAdd(uint32_t* address, uint32_t number) {
  const uint32_t before = *address;
  *address += number;
  return before;
}

inline void __syncthreads() { host_cuda::Wait(host_cuda::block.all); }

inline uint32_t __shfl_xor_sync(uint32_t, uint32_t number, uint32_t distance) {
  const uint32_t lane = threadIdx.x % host_cuda::kWarp;
  return host_cuda::Exchange(number, [&](const uint32_t* lanes) { return lanes[lane ^ distance]; });
}

inline uint32_t __shfl_up_sync(uint32_t, uint32_t number, uint32_t distance) {
  const uint32_t lane = threadIdx.x % host_cuda::kWarp;
  return host_cuda::Exchange(number, [&](const uint32_t* lanes) {
    return lanes[lane >= distance ? lane - distance : lane];
  });
}

inline uint32_t __match_any_sync(uint32_t, uint32_t number) {
  return host_cuda::Exchange(number, [&](const uint32_t* lanes) {
    uint32_t alike = 0;
    for (uint32_t lane = 0; lane < host_cuda::kWarp; ++lane)
      alike |= (lanes[lane] == number) << lane;
    return alike;
  });
}

inline void __syncwarp() {
  host_cuda::Wait(host_cuda::block.warps[threadIdx.x / host_cuda::kWarp]);
}
inline uint32_t __popc(uint32_t bits) { return std::popcount(bits); }

inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }

inline uint32_t __reduce_max_sync(uint32_t, uint32_t number) {
  return host_cuda::Exchange(number, [](const uint32_t* lanes) {
    uint32_t largest = 0;
    for (uint32_t lane = 0; lane < host_cuda::kWarp; ++lane) largest = max(largest, lanes[lane]);
    return largest;
  });
}

inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF);
}

inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float number) { return std::bit_cast<uint32_t>(number); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

enum __nv_saturation_t { __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

inline uint32_t __nv_cvt_float2_to_fp8x2(float2 pair, __nv_saturation_t,
                                         __nv_fp8_interpretation_t) {
  return host_cuda::ToE4m3(pair.x) | host_cuda::ToE4m3(pair.y) << 8;
}
