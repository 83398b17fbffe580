// Memory. PTX ISA: ld, st, vectors, shared and local memory, atom, red, fences; bar.sync and
// bar.arrive with counts; cp.async.
#include "rows.cuh"

extern "C" __global__ void access(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ alignas(16) uint32_t words[3][128];
  const uint32_t t = threadIdx.x;
  words[0][t] = a;
  words[1][t] = b;
  words[2][t] = c;
  __syncthreads();
  const uint32_t at = SharedAddress(&words[0][0]) + (t & 31) * 16;
  uint32_t v[4];
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(at)
               : "memory");
  ROW(v4, bits, v[0] ^ v[1] * 3 ^ v[2] * 5 ^ v[3] * 7);
  uint32_t d;
  asm volatile("{ .reg .u16 h; ld.shared.u8 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(d) : "r"(at + 3));
  ROW(u8, bits, d);
  asm volatile("{ .reg .s16 h; ld.shared.s8 h, [%1]; cvt.s32.s16 %0, h; }" : "=r"(d) : "r"(at + 5));
  ROW(s8, bits, d);
  asm volatile("{ .reg .s16 h; ld.shared.s16 h, [%1]; cvt.s32.s16 %0, h; }"
               : "=r"(d)
               : "r"(at + 6));
  ROW(s16, bits, d);
  uint64_t wide;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(wide) : "r"(at + 8));
  ROW64(b64, bits, wide);
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(d) : "l"(in + i));
  ROW(nc, bits, d);
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(d) : "l"(in + n + i));
  ROW(volatile_, bits, d);
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(in + 2 * n + i) : "memory");
  ROW(acquire, bits, d);
  uint32_t local[8];
  for (uint32_t k = 0; k < 8; ++k) local[(k + a) & 7] = b + k;
  ROW(local, bits, local[c & 7]);
  __syncthreads();
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(SharedAddress(&words[0][0]) + t * 8),
               "r"(a), "r"(b)
               : "memory");
  __syncthreads();
  ROW(v2, bits, (&words[0][0])[(t * 7) & 255]);
  __syncthreads();
  asm volatile("{ .reg .b16 h; cvt.u16.u32 h, %1; st.shared.u8 [%0], h; }" ::"r"(
                   SharedAddress(&words[0][0]) + t),
               "r"(c)
               : "memory");
  __syncthreads();
  ROW(bytes, bits, words[0][t & 31]);
}

#define ATOM(name, text)                                                                         \
  do {                                                                                           \
    cell = b;                                                                                    \
    uint32_t d;                                                                                  \
    asm volatile("atom.global." text " %0, [%1], %2;" : "=r"(d) : "l"(mine), "r"(a) : "memory"); \
    ROW(name, bits, d);                                                                          \
    ROW(name##_after, bits, cell);                                                               \
  } while (0)

extern "C" __global__ void atomics(const uint32_t* in, uint32_t* out) {
  INPUTS;
  // Its own word of the last row serves each thread as the cell.
  uint32_t* mine = out + 40 * n + i;
  volatile uint32_t& cell = *mine;
  ATOM(add, "add.u32");
  ATOM(min_u, "min.u32");
  ATOM(min_s, "min.s32");
  ATOM(max_u, "relaxed.gpu.max.u32");
  ATOM(max_s, "max.s32");
  ATOM(and_, "and.b32");
  ATOM(or_, "or.b32");
  ATOM(xor_, "acq_rel.sys.xor.b32");
  ATOM(exch, "exch.b32");
  ATOM(inc, "inc.u32");
  ATOM(dec, "dec.u32");
  cell = b;
  uint32_t d;
  asm volatile("atom.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(d)
               : "l"(mine), "r"(c & 1 ? b : a), "r"(c)
               : "memory");
  ROW(cas, bits, d);
  ROW(cas_after, bits, cell);
  __shared__ uint32_t sums[4];
  __shared__ unsigned long long wide;
  __shared__ float real;
  if (threadIdx.x < 4) sums[threadIdx.x] = 0;
  if (threadIdx.x == 4) wide = 0;
  if (threadIdx.x == 5) real = 0;
  __syncthreads();
  asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(SharedAddress(&sums[0])), "r"(a) : "memory");
  asm volatile("red.shared.max.u32 [%0], %1;" ::"r"(SharedAddress(&sums[1])), "r"(b) : "memory");
  asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(SharedAddress(&sums[2])), "r"(c & 0x111)
               : "memory");
  asm volatile("red.shared.add.u64 [%0], %1;" ::"r"(SharedAddress(&wide)), "l"(uint64_t{a} << 8)
               : "memory");
  // Small integers: the order of float additions does not matter.
  asm volatile("red.shared.add.f32 [%0], %1;" ::"r"(SharedAddress(&real)), "f"(float(a & 255))
               : "memory");
  __syncthreads();
  ROW(sum, bits, sums[0]);
  ROW(max, bits, sums[1]);
  ROW(or_shared, bits, sums[2]);
  ROW64(sum64, bits, wide);
  ROW(sum_f32, f32, __float_as_uint(real));
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  asm volatile("membar.sys;" ::: "memory");
  cell = i;
}

extern "C" __global__ void barriers(const uint32_t* in, uint32_t* out) {
  INPUTS;
  // Warps 0 and 1 hand words to warps 2 and 3 through two named barriers.
  __shared__ uint32_t words[64];
  const uint32_t warp = threadIdx.x / 32;
  uint32_t got = 0;
  for (uint32_t turn = 0; turn < 3; ++turn) {
    if (warp < 2) {
      words[threadIdx.x] = a + turn;
      asm volatile("bar.arrive 1, 128;" ::: "memory");
      asm volatile("bar.sync 2, 128;" ::: "memory");
    } else {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      got = got * 3 + words[threadIdx.x - 64];
      asm volatile("bar.arrive 2, 128;" ::: "memory");
    }
  }
  __syncthreads();
  ROW(handed, bits, got);
}

#define COPY(name, text, bytes, size)                                            \
  do {                                                                           \
    __syncthreads();                                                             \
    for (uint32_t k = 0; k < 4; ++k) words[t * 4 + k] = 0xabcdabcd;              \
    __syncthreads();                                                             \
    asm volatile("cp.async." text " [%0], [%1], " #bytes                         \
                 ", %2;" ::"r"(SharedAddress(&words[t * 4])),                    \
                 "l"(in + (t * 4 & 127)), "r"(size)                              \
                 : "memory");                                                    \
    asm volatile("cp.async.commit_group;" ::: "memory");                         \
    asm volatile("cp.async.wait_group 0;" ::: "memory");                         \
    __syncthreads();                                                             \
    ROW(name, bits, words[t * 4] ^ words[t * 4 + 1] * 3 ^ words[t * 4 + 3] * 7); \
  } while (0)

extern "C" __global__ void copies(const uint32_t* in, uint32_t* out) {
  INPUTS;
  __shared__ alignas(16) uint32_t words[512];
  __shared__ uint64_t barrier;
  const uint32_t t = threadIdx.x;
  COPY(ca4, "ca.shared.global", 4, 4);
  COPY(ca8, "ca.shared.global", 8, 8);
  COPY(cg16, "cg.shared.global", 16, 16);
  COPY(cg16_part, "cg.shared.global", 16, a & 15);
  COPY(ca8_none, "ca.shared.global", 8, 0);
  if (t == 0) InitBarrier(&barrier, blockDim.x);
  __syncthreads();
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SharedAddress(&words[t])),
               "l"(in + n + t)
               : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(SharedAddress(&barrier))
               : "memory");
  WaitParity(&barrier, 0);
  ROW(arrived, bits, words[(t * 5) & 127]);
}
