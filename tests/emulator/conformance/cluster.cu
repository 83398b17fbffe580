// mbarriers, clusters and bulk copies. PTX ISA: mbarrier.*, mapa, barrier.cluster, st.async,
// cp.async.bulk, cp.reduce.async.bulk.
#include "rows.cuh"

extern "C" __global__ void mbarrier(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ uint64_t barrier;
  __shared__ uint32_t seen[16];
  if (threadIdx.x == 0) {
    uint32_t k = 0;
    const uint32_t at = SharedAddress(&barrier);
    InitBarrier(&barrier, 3);
    seen[k++] = TestParity(&barrier, 0);
    seen[k++] = TestParity(&barrier, 1);  // the phase before the first counts as done
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 1;" ::"r"(at) : "memory");
    seen[k++] = TestParity(&barrier, 0);
    ExpectBytes(&barrier, 64);  // the last arrival, 64 bytes pending
    seen[k++] = TestParity(&barrier, 0);
    asm volatile("mbarrier.complete_tx.shared::cta.relaxed.cta.b64 [%0], 48;" ::"r"(at) : "memory");
    seen[k++] = TestParity(&barrier, 0);
    asm volatile("mbarrier.complete_tx.shared::cta.relaxed.cta.b64 [%0], 16;" ::"r"(at) : "memory");
    seen[k++] = TestParity(&barrier, 0);
    seen[k++] = TestParity(&barrier, 1);
    // Bytes may complete before they are expected.
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], 32;" ::"r"(at) : "memory");
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], 3;" ::"r"(at) : "memory");
    seen[k++] = TestParity(&barrier, 1);
    asm volatile("mbarrier.complete_tx.shared::cta.relaxed.cta.b64 [%0], 32;" ::"r"(at) : "memory");
    seen[k++] = TestParity(&barrier, 1);
    seen[k++] = TestParity(&barrier, 0);
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(at) : "memory");
    while (k < 16) seen[k++] = 7;
  }
  __syncthreads();
  ROW(phases, bits, seen[threadIdx.x & 15]);
}

extern "C" __global__ void cluster(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ alignas(16) uint32_t words[128];
  __shared__ alignas(16) uint32_t arrived[128];
  __shared__ alignas(16) uint32_t copied[128];
  __shared__ uint64_t barrier;
  __shared__ uint32_t sum;
  const uint32_t t = threadIdx.x;
  uint32_t rank, size;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  ROW(rank, bits, rank);
  ROW(size, bits, size);
  words[t] = a;
  if (t == 0) {
    sum = 0;
    InitBarrier(&barrier, 1);
    ExpectBytes(&barrier, 3 * 128 * 4);
  }
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  const uint32_t peer = (rank + 1) % size;
  auto mapped = [&](const void* pointer, uint32_t where) {
    uint32_t address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(address)
                 : "r"(SharedAddress(pointer)), "r"(where));
    return address;
  };
  uint32_t d, back;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(d) : "r"(mapped(&words[t ^ 3], peer)));
  ROW(remote, bits, d);
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(back) : "r"(mapped(words, peer)));
  ROW(owner, bits, back);
  asm volatile(
      "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, "
      "[%2];" ::"r"(mapped(&sum, peer)),
      "r"(b), "r"(mapped(&barrier, peer))
      : "memory");
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   mapped(&arrived[t], peer)),
               "r"(c), "r"(mapped(&barrier, peer))
               : "memory");
  if (t == 0) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 512, "
        "[%2];" ::"r"(mapped(copied, peer)),
        "r"(SharedAddress(words)), "r"(mapped(&barrier, peer))
        : "memory");
  }
  WaitParity(&barrier, 0);
  ROW(async_stored, bits, arrived[t]);
  ROW(bulk_copied, bits, copied[t]);
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  ROW(sum, bits, sum);
  // Each CTA arrives at the other's barrier.
  if (t == 0) {
    asm volatile(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped(&barrier, peer))
        : "memory");
  }
  WaitParity(&barrier, 1);
  ROW(met, bits, 1);
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define REDUCE(name, text)                                                    \
  do {                                                                        \
    uint32_t* cells = out + (64 + row) * n + blockIdx.x * 128;                \
    cells[t] = b;                                                             \
    words[t] = a;                                                             \
    asm volatile("fence.proxy.async;" ::: "memory");                          \
    __syncthreads();                                                          \
    if (t == 0) {                                                             \
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." text \
                   " [%0], [%1], 512;" ::"l"(cells),                          \
                   "r"(SharedAddress(words))                                  \
                   : "memory");                                               \
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");               \
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");               \
      asm volatile("fence.proxy.async;" ::: "memory");                        \
    }                                                                         \
    __syncthreads();                                                          \
    const uint32_t got = *(volatile uint32_t*)(cells + t);                    \
    __syncthreads();                                                          \
    ROW(name, bits, got);                                                     \
  } while (0)

extern "C" __global__ void bulk(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ alignas(128) uint32_t words[128];
  __shared__ uint64_t barrier;
  const uint32_t t = threadIdx.x;
  if (t == 0) {
    InitBarrier(&barrier, 1);
    ExpectBytes(&barrier, 496);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 496, "
        "[%2];" ::"r"(SharedAddress(words) + 16),
        "l"(in + blockIdx.x * 128 + 4), "r"(SharedAddress(&barrier))
        : "memory");
  }
  __syncthreads();
  WaitParity(&barrier, 0);
  if (t < 4) words[t] = 5;
  __syncthreads();
  ROW(load, bits, words[t ^ 9]);
  uint32_t* stored = out + 63 * n + blockIdx.x * 128;
  words[t] = c;
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (t == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512;" ::"l"(stored),
                 "r"(SharedAddress(words))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncthreads();
  ROW(store, bits, *(volatile uint32_t*)(stored + t));
  REDUCE(add_u32, "add.u32");
  REDUCE(min_u32, "min.u32");
  REDUCE(max_s32, "max.s32");
  REDUCE(and_b32, "and.b32");
  REDUCE(or_b32, "or.b32");
  REDUCE(xor_b32, "xor.b32");
}
