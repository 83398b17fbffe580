// Encodings of numbers and their roundings (PTX ISA 5.2, Types; OCP MX formats for 8 bits and
// less).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "instruction.h"

namespace emulator {

// What arithmetic instructions return for NaN: one bit pattern a type.
inline constexpr uint32_t kNanF32 = 0x7fffffff, kNanF16 = 0x7fff, kNanBf16 = 0x7fff;
inline constexpr uint64_t kNanF64 = 0xfff8000000000000;

inline float ToFloat(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }
inline double ToDouble(uint64_t bits) { return std::bit_cast<double>(bits); }
inline uint32_t ToBits(float value) { return std::bit_cast<uint32_t>(value); }
inline uint64_t ToBits(double value) { return std::bit_cast<uint64_t>(value); }
inline float FromBf16(uint32_t bits) { return ToFloat((bits & 0xffff) << 16); }
float FromF16(uint32_t bits);

// A float format of `exponent` and `mantissa` bits; `largest` is its largest number, `nan` and
// `infinity` are the encodings that stand for them (in formats without infinity, what replaces it).
struct FloatFormat {
  int exponent, mantissa;
  double largest;
  uint32_t nan, infinity;
};
inline constexpr FloatFormat kF16Format{5, 10, 65504, 0x7fff, 0x7c00};
inline constexpr FloatFormat kBf16Format{8, 7, 3.3895313892515355e38, 0x7fff, 0x7f80};
inline constexpr FloatFormat kE4m3Format{4, 3, 448, 0x7f, 0x7f};
inline constexpr FloatFormat kE5m2Format{5, 2, 57344, 0x7f, 0x7c};
inline constexpr FloatFormat kE2m1Format{2, 1, 6, 7, 7};

// `value` in a format, rounded once; beyond the largest: that if `saturate`, else infinity.
uint32_t Encode(double value, const FloatFormat& format, Rounding rounding, bool saturate);
uint32_t ToBf16(float value, Rounding rounding = kRn);
inline uint32_t ToF16(double value, Rounding rounding = kRn) {
  return Encode(value, kF16Format, rounding, false);
}
// A float rounded from a double that is exact, or was rounded to odd.
float RoundToFloat(double value, Rounding rounding);
// a + b, its last bit set where it is not exact, so that a second rounding is right.
double AddToOdd(double a, double b);
// The exponent of |value|, rounded to zero or up, as UE8M0 (PTX ISA, cvt).
uint32_t ToUe8m0(float value, Rounding rounding);

// Decoded bytes and nibbles.
extern const float *const kE4m3, *const kE5m2, *const kE2m1, *const kUe8m0;

inline uint64_t Mask(uint64_t value, int bits) {
  return bits >= 64 ? value : value & ((uint64_t{1} << bits) - 1);
}
// The low bits of a register as the integer type says, extended to 64.
inline int64_t Extend(uint64_t value, Type type) {
  const int shift = 64 - Bits(type);
  if (shift <= 0) return static_cast<int64_t>(value);
  return IsSigned(type) ? static_cast<int64_t>(value << shift) >> shift
                        : static_cast<int64_t>(Mask(value, Bits(type)));
}
inline bool Less(uint64_t a, uint64_t b, Type type) {
  const int64_t x = Extend(a, type), y = Extend(b, type);
  return IsSigned(type) ? x < y : static_cast<uint64_t>(x) < static_cast<uint64_t>(y);
}
inline float FlushSubnormal(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

// A scalar float of a type as a double, and back, rounded once.
double ReadFloat(uint64_t bits, Type type);
uint64_t WriteFloat(double value, Type type, Rounding rounding = kRn);
// The smaller (larger) of two; a NaN counts only if both are or `propagate` says so (9.7.3, min).
float MinMax(float a, float b, bool larger, bool propagate);

}  // namespace emulator
