// Tensor copies. PTX ISA: cp.async.bulk.tensor of one to five dimensions, loads and stores, boxes
// that reach outside, multicast. The swizzle and the type are the tensor map's.
#include "rows.cuh"

extern __shared__ __align__(1024) uint32_t words[];

struct alignas(64) TensorMap {
  uint64_t words[16];
};

template <int kDims>
__device__ inline void Load(const TensorMap& map, void* target, uint64_t* barrier,
                            const int32_t* at) {
  const uint32_t to = SharedAddress(target), bar = SharedAddress(barrier);
  const auto address = reinterpret_cast<uint64_t>(&map);
#define TENSOR_LOAD(dims, coordinates, ...)                                                   \
  asm volatile("cp.async.bulk.tensor." dims                                                   \
               ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " coordinates \
               "], [%2];" ::"r"(to),                                                          \
               "l"(address), "r"(bar), __VA_ARGS__                                            \
               : "memory")
  if constexpr (kDims == 1) TENSOR_LOAD("1d", "{%3}", "r"(at[0]));
  if constexpr (kDims == 2) TENSOR_LOAD("2d", "{%3, %4}", "r"(at[0]), "r"(at[1]));
  if constexpr (kDims == 3) TENSOR_LOAD("3d", "{%3, %4, %5}", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  if constexpr (kDims == 4)
    TENSOR_LOAD("4d", "{%3, %4, %5, %6}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  if constexpr (kDims == 5)
    TENSOR_LOAD("5d", "{%3, %4, %5, %6, %7}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]),
                "r"(at[4]));
}

// in: the coordinates, then the bytes of a box; out: the box as it lies in shared memory.
template <int kDims>
__device__ inline void LoadBox(const uint32_t* in, uint32_t* out, const TensorMap& map) {
  __shared__ uint64_t barrier;
  const uint32_t bytes = in[kDims], count = bytes / 4;
  int32_t at[kDims];
  for (int k = 0; k < kDims; ++k) at[k] = int32_t(in[k]);
  for (uint32_t k = threadIdx.x; k < count; k += blockDim.x) words[k] = 0x77777777;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    InitBarrier(&barrier, 1);
    ExpectBytes(&barrier, bytes);
    Load<kDims>(map, words, &barrier, at);
  }
  __syncthreads();
  WaitParity(&barrier, 0);
  for (uint32_t k = threadIdx.x; k < count; k += blockDim.x) out[k] = words[k];
}

#define LOAD_BOX(dims)                                                                      \
  extern "C" __global__ void load##dims(const uint32_t* in, uint32_t* out, const uint32_t*, \
                                        const __grid_constant__ TensorMap map) {            \
    LoadBox<dims>(in, out, map);                                                            \
  }
LOAD_BOX(1)
LOAD_BOX(2)
LOAD_BOX(3)
LOAD_BOX(4)
LOAD_BOX(5)

// The box, filled with its word numbers, goes to the tensor `data`.
extern "C" __global__ void store2(const uint32_t* in, uint32_t* out, uint32_t* data,
                                  const __grid_constant__ TensorMap map) {
  const uint32_t count = in[2] / 4;
  for (uint32_t k = threadIdx.x; k < count; k += blockDim.x) words[k] = 0x01000000 + k;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
            reinterpret_cast<uint64_t>(&map)),
        "r"(SharedAddress(words)), "r"(in[0]), "r"(in[1])
        : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  out[threadIdx.x] = data != nullptr;
}

// Two CTAs: each loads half of the rows into both (a multicast); each writes what it got.
extern "C" __global__ void multicast2(const uint32_t* in, uint32_t* out, const uint32_t*,
                                      const __grid_constant__ TensorMap map) {
  __shared__ uint64_t barrier;
  const uint32_t bytes = in[2], count = bytes / 4;
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    InitBarrier(&barrier, 1);
    ExpectBytes(&barrier, bytes * 2);
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (threadIdx.x == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(SharedAddress(words) +
                                                                    rank * bytes),
        "l"(reinterpret_cast<uint64_t>(&map)), "r"(SharedAddress(&barrier)), "r"(in[0]),
        "r"(in[1] + rank * in[3]), "h"(uint16_t{3})
        : "memory");
  }
  WaitParity(&barrier, 0);
  for (uint32_t k = threadIdx.x; k < 2 * count; k += blockDim.x)
    out[rank * 2 * count + k] = words[k];
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
