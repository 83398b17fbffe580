// Floating point: exact instructions, approximations, half precision, conversions. PTX ISA:
// floating point, half precision floating point, data movement and conversion instructions.
#include "rows.cuh"

extern "C" __global__ void floating(const uint32_t* in, uint32_t* out) {
  INPUTS;
  F2(add, f32, "add.rn.f32 %0, %1, %2;");
  F2(sub, f32, "sub.rn.f32 %0, %1, %2;");
  F2(mul, f32, "mul.rn.f32 %0, %1, %2;");
  F3(fma, f32, "fma.rn.f32 %0, %1, %2, %3;");
  F2(add_ftz, f32, "add.rn.ftz.f32 %0, %1, %2;");
  F2(mul_ftz, f32, "mul.rn.ftz.f32 %0, %1, %2;");
  F3(fma_ftz, f32, "fma.rn.ftz.f32 %0, %1, %2, %3;");
  F2(add_rz, f32, "add.rz.f32 %0, %1, %2;");
  F2(mul_rp, f32, "mul.rp.f32 %0, %1, %2;");
  F3(fma_rm, f32, "fma.rm.f32 %0, %1, %2, %3;");
  F2(add_sat, f32, "add.rn.sat.f32 %0, %1, %2;");
  F2(div, f32, "div.rn.f32 %0, %1, %2;");
  F1(rcp, f32, "rcp.rn.f32 %0, %1;");
  F1(sqrt, f32, "sqrt.rn.f32 %0, %1;");
  F2(min, f32, "min.f32 %0, %1, %2;");
  F2(max, f32, "max.f32 %0, %1, %2;");
  F2(min_nan, f32, "min.NaN.f32 %0, %1, %2;");
  F2(max_nan, f32, "max.NaN.f32 %0, %1, %2;");
  F2(min_ftz, f32, "min.ftz.f32 %0, %1, %2;");
  F1(abs, f32, "abs.f32 %0, %1;");
  F1(neg, f32, "neg.f32 %0, %1;");
  F2(copysign, f32, "copysign.f32 %0, %1, %2;");
}

extern "C" __global__ void approximate(const uint32_t* in, uint32_t* out) {
  INPUTS;
  F1(ex2, ulp2, "ex2.approx.f32 %0, %1;");
  F1(ex2_ftz, ulp2, "ex2.approx.ftz.f32 %0, %1;");
  F1(rcp, ulp1, "rcp.approx.f32 %0, %1;");
  F1(rcp_ftz, ulp1, "rcp.approx.ftz.f32 %0, %1;");
  F1(rsqrt, ulp2, "rsqrt.approx.f32 %0, %1;");
  F1(sqrt, ulp2, "sqrt.approx.f32 %0, %1;");
  F2(div_full, ulp2, "div.full.f32 %0, %1, %2;");
  F1(lg2, lg2, "lg2.approx.f32 %0, %1;");
  F1(tanh, tanh, "tanh.approx.f32 %0, %1;");
}

extern "C" __global__ void half(const uint32_t* in, uint32_t* out) {
  INPUTS;
  R2(add_f16x2, f16x2, "add.rn.f16x2 %0, %1, %2;");
  R2(mul_f16x2, f16x2, "mul.rn.f16x2 %0, %1, %2;");
  R3(fma_f16x2, f16x2, "fma.rn.f16x2 %0, %1, %2, %3;");
  R2(min_f16x2, f16x2, "min.f16x2 %0, %1, %2;");
  R2(max_f16x2, f16x2, "max.f16x2 %0, %1, %2;");
  R2(add_bf16x2, bf16x2, "add.rn.bf16x2 %0, %1, %2;");
  R2(mul_bf16x2, bf16x2, "mul.rn.bf16x2 %0, %1, %2;");
  R3(fma_bf16x2, bf16x2, "fma.rn.bf16x2 %0, %1, %2, %3;");
  R2(min_bf16x2, bf16x2, "min.bf16x2 %0, %1, %2;");
  R2(max_bf16x2, bf16x2, "max.bf16x2 %0, %1, %2;");
  R2(min_nan_bf16x2, bf16x2, "min.NaN.bf16x2 %0, %1, %2;");
  R1(abs_bf16x2, bf16x2, "abs.bf16x2 %0, %1;");
  R1(neg_bf16x2, bf16x2, "neg.bf16x2 %0, %1;");
}

// Narrow results come as a 16-bit register.
#define N2(name, kind, text)                         \
  do {                                               \
    uint16_t d;                                      \
    asm volatile(text : "=h"(d) : "f"(fa), "f"(fb)); \
    ROW(name, kind, uint32_t{d});                    \
  } while (0)
#define N1(name, kind, text)                \
  do {                                      \
    uint16_t d;                             \
    asm volatile(text : "=h"(d) : "f"(fa)); \
    ROW(name, kind, uint32_t{d});           \
  } while (0)
#define P2(name, kind, text)                         \
  do {                                               \
    uint32_t d;                                      \
    asm volatile(text : "=r"(d) : "f"(fa), "f"(fb)); \
    ROW(name, kind, d);                              \
  } while (0)
#define I1(name, kind, text)                \
  do {                                      \
    uint32_t d;                             \
    asm volatile(text : "=r"(d) : "f"(fa)); \
    ROW(name, kind, d);                     \
  } while (0)
#define W1(name, kind, text)               \
  do {                                     \
    float d;                               \
    asm volatile(text : "=f"(d) : "r"(a)); \
    ROW(name, kind, __float_as_uint(d));   \
  } while (0)

extern "C" __global__ void convert(const uint32_t* in, uint32_t* out) {
  INPUTS;
  N1(f16, f16x2, "cvt.rn.f16.f32 %0, %1;");
  N1(bf16, bf16x2, "cvt.rn.bf16.f32 %0, %1;");
  P2(bf16x2, bf16x2, "cvt.rn.bf16x2.f32 %0, %1, %2;");
  P2(bf16x2_relu, bf16x2, "cvt.rn.relu.bf16x2.f32 %0, %1, %2;");
  P2(f16x2, f16x2, "cvt.rn.f16x2.f32 %0, %1, %2;");
  P2(bf16x2_rz, bf16x2, "cvt.rz.bf16x2.f32 %0, %1, %2;");
  N2(e4m3x2, bits, "cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;");
  N2(e5m2x2, bits, "cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;");
  N2(e4m3x2_relu, bits, "cvt.rn.satfinite.relu.e4m3x2.f32 %0, %1, %2;");
  R1(e4m3x2_of_f16x2, bits,
     "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, %1; cvt.u32.u16 %0, h; }");
  R1(f16x2_of_e4m3x2, f16x2, "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e4m3x2 %0, h; }");
  R1(f16x2_of_e5m2x2, f16x2, "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.rn.f16x2.e5m2x2 %0, h; }");
  W1(f32_of_f16, f32, "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }");
  W1(f32_of_bf16, f32, "{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.bf16 %0, h; }");
  I1(s32_rzi, bits, "cvt.rzi.s32.f32 %0, %1;");
  I1(s32_rni, bits, "cvt.rni.s32.f32 %0, %1;");
  I1(s32_rmi, bits, "cvt.rmi.s32.f32 %0, %1;");
  I1(s32_rpi, bits, "cvt.rpi.s32.f32 %0, %1;");
  I1(u32_rzi, bits, "cvt.rzi.u32.f32 %0, %1;");
  I1(u32_rni_sat, bits, "cvt.rni.sat.u32.f32 %0, %1;");
  W1(of_u32, f32, "cvt.rn.f32.u32 %0, %1;");
  W1(of_s32, f32, "cvt.rn.f32.s32 %0, %1;");
  W1(of_u32_rz, f32, "cvt.rz.f32.u32 %0, %1;");
  F1(round_even, f32, "cvt.rni.f32.f32 %0, %1;");
  F1(floor, f32, "cvt.rmi.f32.f32 %0, %1;");
  F1(saturate, f32, "cvt.sat.f32.f32 %0, %1;");
  R1(s8, bits, "cvt.s32.s8 %0, %1;");
  R1(u16, bits, "{ .reg .u16 h; cvt.u16.u32 h, %1; cvt.s32.s16 %0, h; }");
  ROW64(s64, bits, ([&] {
          int64_t d;
          asm volatile("cvt.s64.s32 %0, %1;" : "=l"(d) : "r"(a));
          return uint64_t(d);
        }()));
}
