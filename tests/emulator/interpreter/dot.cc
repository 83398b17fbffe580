#include "dot.h"

namespace emulator {

float AddDot(TensorCore, float accumulator, const float* a, const float* b, int depth) {
  // Nearly exact: products of operands of at most 8 significant bits are exact in float32, eight
  // partial sums are added in float64, and one rounding to float32 follows.
  float sums[8] = {};
  for (int k = 0; k < depth; k += 8) {
    for (int j = 0; j < 8; ++j) sums[j] += a[k + j] * b[k + j];
  }
  const double low = (double{sums[0]} + sums[1]) + (double{sums[2]} + sums[3]);
  const double high = (double{sums[4]} + sums[5]) + (double{sums[6]} + sums[7]);
  return static_cast<float>(accumulator + (low + high));
}

}  // namespace emulator
