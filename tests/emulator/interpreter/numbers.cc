#include "numbers.h"

#include <array>
#include <cfenv>

#include "error.h"

namespace emulator {
namespace {

// A sign bit, `exponent` and `mantissa` bits; `special` exponents hold infinity and NaN as IEEE
// has.
float Decode(uint32_t bits, int exponent, int mantissa, bool special) {
  const int bias = (1 << (exponent - 1)) - 1;
  const uint32_t e = (bits >> mantissa) & ((1u << exponent) - 1), m = bits & ((1u << mantissa) - 1);
  float value = e ? std::ldexp(1.0f + std::ldexp(static_cast<float>(m), -mantissa), e - bias)
                  : std::ldexp(static_cast<float>(m), 1 - bias - mantissa);
  if (special && e == (1u << exponent) - 1) value = m ? NAN : INFINITY;
  return bits >> (exponent + mantissa) & 1 ? -value : value;
}

struct Tables {
  std::array<float, 256> e4m3, e5m2, ue8m0;
  std::array<float, 16> e2m1;
  Tables() {
    for (uint32_t i = 0; i < 256; ++i) {
      e4m3[i] = (i & 127) == 127 ? NAN : Decode(i, 4, 3, false);
      e5m2[i] = Decode(i, 5, 2, true);
      ue8m0[i] = i == 255 ? NAN : std::ldexp(1.0f, static_cast<int>(i) - 127);
    }
    for (uint32_t i = 0; i < 16; ++i) e2m1[i] = Decode(i, 2, 1, false);
  }
};
const Tables tables;

double RoundInteger(double value, Rounding rounding, bool negative) {
  switch (rounding) {
    case kRn:
      return std::nearbyint(value);
    case kRz:
      return std::trunc(value);
    case kRm:
      return negative ? std::ceil(value) : std::floor(value);
    case kRp:
      return negative ? std::floor(value) : std::ceil(value);
    case kRna:
      return std::floor(value + 0.5);
    default:
      Fail("rounding %d of a float", rounding);
  }
}

}  // namespace

const float *const kE4m3 = tables.e4m3.data(), *const kE5m2 = tables.e5m2.data(),
                   *const kE2m1 = tables.e2m1.data(), *const kUe8m0 = tables.ue8m0.data();

float FromF16(uint32_t bits) { return Decode(bits & 0xffff, 5, 10, true); }

uint32_t Encode(double value, const FloatFormat& format, Rounding rounding, bool saturate) {
  if (std::isnan(value)) return format.nan;
  const bool negative = std::signbit(value);
  const uint32_t sign = negative ? 1u << (format.exponent + format.mantissa) : 0;
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return sign;
  const int bias = (1 << (format.exponent - 1)) - 1;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  exponent = std::max(exponent - 1, 1 - bias);  // magnitude = m * 2^exponent with 1 <= m < 2
  double rounded = magnitude;
  if (!std::isinf(magnitude)) {
    const double scaled = std::ldexp(magnitude, format.mantissa - exponent);
    rounded = std::ldexp(RoundInteger(scaled, rounding, negative), exponent - format.mantissa);
  }
  if (rounded > format.largest) {
    const bool towards_zero =
        rounding == kRz || (rounding == kRm && !negative) || (rounding == kRp && negative);
    if (!saturate && !(towards_zero && !std::isinf(magnitude))) return sign | format.infinity;
    return sign | Encode(format.largest, format, kRn, false);
  }
  std::frexp(rounded, &exponent);
  exponent = rounded == 0 ? 1 - bias : std::max(exponent - 1, 1 - bias);
  const auto digits = static_cast<uint32_t>(std::ldexp(rounded, format.mantissa - exponent));
  const uint32_t hidden = 1u << format.mantissa;
  if (digits < hidden) return sign | digits;
  const auto biased = static_cast<uint32_t>(exponent + bias);
  return sign | ((biased << format.mantissa) + (digits - hidden));
}

uint32_t ToBf16(float value, Rounding rounding) {
  if (std::isnan(value)) return kNanBf16;
  const uint32_t bits = ToBits(value);
  if (rounding == kRz) return bits >> 16;
  if (rounding != kRn) return Encode(value, kBf16Format, rounding, false);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

float RoundToFloat(double value, Rounding rounding) {
  static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  if (rounding == kRn) return static_cast<float>(value);
  if (rounding > kRp) Fail("rounding %d to a float", rounding);
  std::fesetround(kModes[rounding]);
  volatile double exact = value;
  volatile float rounded = static_cast<float>(exact);
  std::fesetround(FE_TONEAREST);
  return rounded;
}

double AddToOdd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double part = sum - a;  // two-sum: sum + error = a + b exactly
  const double error = (a - (sum - part)) + (b - part);
  if (error == 0 || (ToBits(sum) & 1)) return sum;
  return std::nextafter(sum, error > 0 ? INFINITY : -INFINITY);
}

uint32_t ToUe8m0(float value, Rounding rounding) {
  if (std::isnan(value)) return 255;
  value = std::fabs(value);
  if (value == 0) return 0;
  if (std::isinf(value)) return 254;
  int exponent = 0;
  const bool power = std::frexp(value, &exponent) == 0.5f;
  exponent += 126 + (rounding == kRp && !power);
  return exponent < 0 ? 0 : exponent > 254 ? 254 : exponent;
}

double ReadFloat(uint64_t bits, Type type) {
  switch (type) {
    case Type::kF32:
      return ToFloat(bits);
    case Type::kBf16:
      return FromBf16(static_cast<uint32_t>(bits));
    case Type::kF16:
      return FromF16(static_cast<uint32_t>(bits));
    case Type::kF64:
      return ToDouble(bits);
    default:
      Fail("type %d is not a float", static_cast<int>(type));
  }
}

uint64_t WriteFloat(double value, Type type, Rounding rounding) {
  switch (type) {
    case Type::kF32:
      return std::isnan(value) ? kNanF32 : ToBits(RoundToFloat(value, rounding));
    case Type::kBf16:
      return Encode(value, kBf16Format, rounding, false);
    case Type::kF16:
      return ToF16(value, rounding);
    case Type::kF64:
      return std::isnan(value) ? kNanF64 : ToBits(value);
    default:
      Fail("type %d is not a float", static_cast<int>(type));
  }
}

float MinMax(float a, float b, bool larger, bool propagate) {
  if (std::isnan(a) || std::isnan(b)) {
    if (propagate || (std::isnan(a) && std::isnan(b))) return ToFloat(kNanF32);
    return std::isnan(a) ? b : a;
  }
  if (a == b) return std::signbit(a) == larger ? b : a;  // -0 is less than +0
  return (a < b) == larger ? b : a;
}

}  // namespace emulator
