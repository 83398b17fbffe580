// Integer, logic and comparison instructions. PTX ISA: integer arithmetic, logic and shift,
// comparison and selection instructions.
#include "rows.cuh"

extern "C" __global__ void integer(const uint32_t* in, uint32_t* out) {
  INPUTS;
  R2(add, bits, "add.u32 %0, %1, %2;");
  R2(sub, bits, "sub.s32 %0, %1, %2;");
  R2(mul_lo, bits, "mul.lo.u32 %0, %1, %2;");
  R2(mul_hi_u, bits, "mul.hi.u32 %0, %1, %2;");
  R2(mul_hi_s, bits, "mul.hi.s32 %0, %1, %2;");
  R3(mad_lo, bits, "mad.lo.s32 %0, %1, %2, %3;");
  R3(mad_hi_u, bits, "mad.hi.u32 %0, %1, %2, %3;");
  R3(mad_hi_s, bits, "mad.hi.s32 %0, %1, %2, %3;");
  R2(div_u, bits, "{ .reg .u32 q; or.b32 q, %2, 1; div.u32 %0, %1, q; }");
  R2(rem_u, bits, "{ .reg .u32 q; or.b32 q, %2, 1; rem.u32 %0, %1, q; }");
  R2(div_s, bits, "{ .reg .s32 q; or.b32 q, %2, 2; div.s32 %0, %1, q; }");
  R2(rem_s, bits, "{ .reg .s32 q; or.b32 q, %2, 2; rem.s32 %0, %1, q; }");
  R1(abs_s, bits, "abs.s32 %0, %1;");
  R1(neg_s, bits, "neg.s32 %0, %1;");
  R2(min_u, bits, "min.u32 %0, %1, %2;");
  R2(min_s, bits, "min.s32 %0, %1, %2;");
  R2(max_u, bits, "max.u32 %0, %1, %2;");
  R2(max_s, bits, "max.s32 %0, %1, %2;");
  R1(popc, bits, "popc.b32 %0, %1;");
  R1(clz, bits, "clz.b32 %0, %1;");
  R1(brev, bits, "brev.b32 %0, %1;");
  R1(bfind_u, bits, "bfind.u32 %0, %1;");
  R1(bfind_s, bits, "bfind.s32 %0, %1;");
  R1(bfind_shift, bits, "bfind.shiftamt.u32 %0, %1;");
  R3(bfe_u, bits, "bfe.u32 %0, %1, %2, %3;");
  R3(bfe_s, bits, "bfe.s32 %0, %1, %2, %3;");
  R3(bfe_u_narrow, bits,
     "{ .reg .u32 p, l; and.b32 p, %2, 31; and.b32 l, %3, 15; bfe.u32 %0, %1, p, l; }");
  R3(bfe_s_narrow, bits,
     "{ .reg .u32 p, l; and.b32 p, %2, 31; and.b32 l, %3, 15; bfe.s32 %0, %1, p, l; }");
  R3(bfi, bits,
     "{ .reg .u32 p, l; and.b32 p, %3, 63; shr.u32 l, %3, 26; bfi.b32 %0, %1, %2, p, l; }");
  R3(dp4a_u, bits, "dp4a.u32.u32 %0, %1, %2, %3;");
  R3(dp4a_s, bits, "dp4a.s32.s32 %0, %1, %2, %3;");
  R2(fns, bits, "{ .reg .u32 q; and.b32 q, %2, 31; fns.b32 %0, %1, q, 1; }");
  L2(add64, bits, "add.u64 %0, %1, %2;");
  L2(mul64, bits, "mul.lo.u64 %0, %1, %2;");
  L2(mul_hi64, bits, "mul.hi.u64 %0, %1, %2;");
  L2(min_s64, bits, "min.s64 %0, %1, %2;");
  L2(max_u64, bits, "max.u64 %0, %1, %2;");
  ROW64(mul_wide_u, bits, ([&] {
          uint64_t d;
          asm volatile("mul.wide.u32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b));
          return d;
        }()));
  ROW64(mul_wide_s, bits, ([&] {
          uint64_t d;
          asm volatile("mul.wide.s32 %0, %1, %2;" : "=l"(d) : "r"(a), "r"(b));
          return d;
        }()));
}

extern "C" __global__ void logic(const uint32_t* in, uint32_t* out) {
  INPUTS;
  R2(and_, bits, "and.b32 %0, %1, %2;");
  R2(or_, bits, "or.b32 %0, %1, %2;");
  R2(xor_, bits, "xor.b32 %0, %1, %2;");
  R1(not_, bits, "not.b32 %0, %1;");
  R2(shl, bits, "{ .reg .u32 s; and.b32 s, %2, 63; shl.b32 %0, %1, s; }");
  R2(shr_u, bits, "{ .reg .u32 s; and.b32 s, %2, 63; shr.u32 %0, %1, s; }");
  R2(shr_s, bits, "{ .reg .u32 s; and.b32 s, %2, 63; shr.s32 %0, %1, s; }");
  R3(shf_l_wrap, bits, "shf.l.wrap.b32 %0, %1, %2, %3;");
  R3(shf_r_wrap, bits, "shf.r.wrap.b32 %0, %1, %2, %3;");
  R3(shf_l_clamp, bits, "{ .reg .u32 s; and.b32 s, %3, 63; shf.l.clamp.b32 %0, %1, %2, s; }");
  R3(shf_r_clamp, bits, "{ .reg .u32 s; and.b32 s, %3, 63; shf.r.clamp.b32 %0, %1, %2, s; }");
  R3(lop3_96, bits, "lop3.b32 %0, %1, %2, %3, 0x96;");
  R3(lop3_e8, bits, "lop3.b32 %0, %1, %2, %3, 0xE8;");
  R3(lop3_ca, bits, "lop3.b32 %0, %1, %2, %3, 0xCA;");
  R3(lop3_1b, bits, "lop3.b32 %0, %1, %2, %3, 0x1B;");
  R3(prmt, bits, "prmt.b32 %0, %1, %2, %3;");
  L2(shl64, bits, "{ .reg .u32 s; cvt.u32.u64 s, %2; and.b32 s, s, 127; shl.b64 %0, %1, s; }");
  L2(shr64, bits, "{ .reg .u32 s; cvt.u32.u64 s, %2; and.b32 s, s, 127; shr.s64 %0, %1, s; }");
}

#define COMPARE(name, text) \
  R2(name, bits, "{ .reg .pred p; setp." text " p, %1, %2; selp.u32 %0, 1, 0, p; }")
#define COMPARE_F(name, text)                                                       \
  do {                                                                              \
    uint32_t d;                                                                     \
    asm volatile("{ .reg .pred p; setp." text " p, %1, %2; selp.u32 %0, 1, 0, p; }" \
                 : "=r"(d)                                                          \
                 : "f"(fa), "f"(fb));                                               \
    ROW(name, bits, d);                                                             \
  } while (0)

extern "C" __global__ void compare(const uint32_t* in, uint32_t* out) {
  INPUTS;
  COMPARE(eq, "eq.u32");
  COMPARE(ne, "ne.s32");
  COMPARE(lt_u, "lt.u32");
  COMPARE(lt_s, "lt.s32");
  COMPARE(ge_u, "ge.u32");
  COMPARE(gt_s, "gt.s32");
  COMPARE(le_s, "le.s32");
  COMPARE(hs, "hs.u32");
  COMPARE(lo, "lo.u32");
  COMPARE_F(eq_f, "eq.f32");
  COMPARE_F(ne_f, "ne.f32");
  COMPARE_F(lt_f, "lt.f32");
  COMPARE_F(le_f, "le.f32");
  COMPARE_F(gt_f, "gt.f32");
  COMPARE_F(ge_f, "ge.f32");
  COMPARE_F(equ_f, "equ.f32");
  COMPARE_F(neu_f, "neu.f32");
  COMPARE_F(ltu_f, "ltu.f32");
  COMPARE_F(leu_f, "leu.f32");
  COMPARE_F(gtu_f, "gtu.f32");
  COMPARE_F(geu_f, "geu.f32");
  COMPARE_F(num_f, "num.f32");
  COMPARE_F(nan_f, "nan.f32");
  COMPARE_F(lt_ftz, "lt.ftz.f32");
  R3(setp_and, bits,
     "{ .reg .pred p, q; setp.lt.u32 q, %2, %3; setp.gt.and.s32 p, %1, %2, q; "
     "selp.u32 %0, 1, 0, p; }");
  R3(setp_pair, bits,
     "{ .reg .pred p, q; .reg .u32 x, y; setp.lt.s32 p|q, %1, %2; selp.u32 x, 1, 0, p; "
     "selp.u32 y, 2, 0, q; or.b32 %0, x, y; }");
  R3(selp, bits, "{ .reg .pred p; setp.lt.s32 p, %3, 0; selp.b32 %0, %1, %2, p; }");
}
