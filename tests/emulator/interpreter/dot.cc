#include "dot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace emulator {
namespace {

constexpr int kNone = -1000;  // the exponent of zero
constexpr int kMaxDepth = 64;

int Exponent(float value) {
  const auto field = static_cast<int>(ToBits(value) >> 23 & 255);
  return field ? field - 127 : value == 0 ? kNone : std::ilogb(value);
}

// `value` with its significand cut to 24 bits, toward zero.
float TowardZero(double value) {
  const auto nearest = static_cast<float>(value);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(value) ? std::nextafter(nearest, 0.0f)
                                                                    : nearest;
}

// Products of operands of at most 11 significant bits are exact in float64, and so are sums of
// whole numbers below 2^53. No number: the sum is infinite or NaN, as float64 adds it.
float AddAligned(float accumulator, const float* a, const float* b, int depth, int fraction) {
  int exponents[kMaxDepth];
  for (int k = 0; k < depth; ++k) {
    const int of_a = Exponent(a[k]), of_b = Exponent(b[k]);
    exponents[k] = of_a == kNone || of_b == kNone ? kNone : of_a + of_b;
  }
  const int largest =
      std::max(*std::max_element(exponents, exponents + depth), Exponent(accumulator));
  if (largest == kNone) return accumulator;
  const double scale = std::ldexp(1.0, fraction - largest);
  double sum = std::trunc(accumulator * scale);
  for (int k = 0; k < depth; ++k) sum += std::trunc(double{a[k]} * b[k] * scale);
  return TowardZero(sum / scale);
}

// Nearly exact: products of operands of at most 8 significant bits are exact in float32, eight
// partial sums are added in float64, and one rounding to float32 follows.
float AddNearlyExact(float accumulator, const float* a, const float* b, int depth) {
  float sums[8] = {};
  for (int k = 0; k < depth; k += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[k + j] * b[k + j];
  }
  const double low = (double{sums[0]} + sums[1]) + (double{sums[2]} + sums[3]);
  const double high = (double{sums[4]} + sums[5]) + (double{sums[6]} + sums[7]);
  return static_cast<float>(accumulator + (low + high));
}

}  // namespace

float AddDot(TensorCore core, float accumulator, const float* a, const float* b, int depth) {
  switch (core) {
    case TensorCore::kHopperFp8: {
      constexpr uint32_t kCut = (1u << 10) - 1;  // of 23 bits after the point 13 stay
      const float sum = AddAligned(accumulator, a, b, depth, 13);
      return std::isfinite(sum) ? ToFloat(ToBits(sum) & ~kCut) : sum;
    }
    case TensorCore::kHopper16:
      return AddAligned(accumulator, a, b, depth, 25);
    case TensorCore::kWarpFp8:
      return accumulator + AddAligned(0, a, b, depth, 25);
    default:
      return AddNearlyExact(accumulator, a, b, depth);
  }
}

}  // namespace emulator
