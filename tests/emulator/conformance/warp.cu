// Instructions of a warp. PTX ISA: shfl.sync, vote.sync, redux.sync, match.sync, elect.sync,
// activemask, bar.warp.sync; divergence and loops.
#include "rows.cuh"

#define SHUFFLE(name, mode, lane, clamp)               \
  do {                                                 \
    uint32_t d, valid;                                 \
    asm volatile("{ .reg .pred p; shfl.sync." mode     \
                 ".b32 %0|p, %2, %3, %4, 0xffffffff; " \
                 "selp.u32 %1, 1, 0, p; }"             \
                 : "=r"(d), "=r"(valid)                \
                 : "r"(a), "r"(lane), "r"(clamp));     \
    ROW(name, bits, d);                                \
    ROW(name##_valid, bits, valid);                    \
  } while (0)

extern "C" __global__ void shuffle(const uint32_t* in, uint32_t* out) {
  INPUTS;
  SHUFFLE(up, "up", b & 31, 0);
  SHUFFLE(down, "down", b & 31, 31);
  SHUFFLE(bfly, "bfly", 5, 31);
  SHUFFLE(idx, "idx", b, 31);
  SHUFFLE(idx_segment, "idx", b & 31, 0x1807);
  SHUFFLE(down_segment, "down", 3, 0x181f);
  SHUFFLE(up_segment, "up", 2, 0x1800);
  SHUFFLE(bfly_segment, "bfly", c & 31, 0x1007);
}

#define VOTE(name, mode)                                                     \
  do {                                                                       \
    uint32_t d;                                                              \
    asm volatile("{ .reg .pred p, q; setp.lt.s32 p, %1, %2; vote.sync." mode \
                 ".pred q, p, 0xffffffff; selp.u32 %0, 1, 0, q; }"           \
                 : "=r"(d)                                                   \
                 : "r"(a), "r"(bound));                                      \
    ROW(name, bits, d);                                                      \
  } while (0)

extern "C" __global__ void vote(const uint32_t* in, uint32_t* out) {
  INPUTS;
  // Warp 0 votes mixed, warp 1 all, warp 2 none.
  const uint32_t warp = i / 32;
  const int32_t bound = warp % 3 == 0 ? 0 : warp % 3 == 1 ? 0x7fffffff : int32_t(0x80000000);
  VOTE(any, "any");
  VOTE(all, "all");
  VOTE(uni, "uni");
  uint32_t d;
  asm volatile("{ .reg .pred p; setp.lt.s32 p, %1, %2; vote.sync.ballot.b32 %0, p, 0xffffffff; }"
               : "=r"(d)
               : "r"(a), "r"(bound));
  ROW(ballot, bits, d);
  uint32_t some = 0;
  if (a & 1) {
    asm volatile("activemask.b32 %0;" : "=r"(some));
    some = some != 0;
  }
  asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
  ROW(active, bits, some);
  uint32_t leader, elected;
  asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }"
               : "=r"(leader), "=r"(elected));
  const uint32_t chosen = __ballot_sync(0xffffffff, elected);
  ROW(elect_one, bits, __popc(chosen));
  ROW(elect_is_leader, bits, chosen == 1u << leader);
}

#define REDUX(name, text, word)                                                    \
  do {                                                                             \
    uint32_t d;                                                                    \
    asm volatile("redux.sync." text " %0, %1, 0xffffffff;" : "=r"(d) : "r"(word)); \
    ROW(name, bits, d);                                                            \
  } while (0)

extern "C" __global__ void reduce(const uint32_t* in, uint32_t* out) {
  INPUTS;
  REDUX(add, "add.u32", a);
  REDUX(min_u, "min.u32", a);
  REDUX(max_s, "max.s32", a);
  REDUX(min_s, "min.s32", a);
  REDUX(and_, "and.b32", a | 0xf0f0f00f);
  REDUX(or_, "or.b32", a & 0x0f0f0ff0);
  REDUX(xor_, "xor.b32", a);
  uint32_t part = 0;
  if (threadIdx.x % 32 < 12)
    asm volatile("redux.sync.add.s32 %0, %1, 0xfff;" : "=r"(part) : "r"(a));
  ROW(part, bits, part);
  uint32_t d;
  asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(a & 3));
  ROW(match_any, bits, d);
  asm volatile("{ .reg .pred p; match.all.sync.b32 %0|p, %1, 0xffffffff; }"
               : "=r"(d)
               : "r"((i / 32) & 1 ? 7u : a & 1));
  ROW(match_all, bits, d);
}

extern "C" __global__ void diverge(const uint32_t* in, uint32_t* out) {
  INPUTS;
  // Lanes leave a loop at different turns, meet and shuffle what they counted.
  uint32_t turns = 0, value = a | 1;
  while (value != 1 && turns < 40) {
    value = value & 1 ? value * 3 + 1 : value >> 1;
    ++turns;
  }
  ROW(turns, bits, turns);
  ROW(value, bits, value);
  ROW(neighbour, bits, __shfl_xor_sync(0xffffffff, turns, 1));
  uint32_t kind = 0;
  switch (b & 7) {
    case 0:
      kind = a + 1;
      break;
    case 1:
      kind = a ^ c;
      break;
    case 2:
      kind = a * 5;
      break;
    case 3:
      kind = c - a;
      break;
    case 4:
      kind = ~a;
      break;
    case 5:
      kind = a >> 3;
      break;
    default:
      kind = 99;
  }
  ROW(cases, bits, kind);
}
