// Sums of tensor cores: the one place where their rounding is decided.
#pragma once

namespace emulator {

// How a tensor core adds the products of one instruction's K to an accumulator.
enum class TensorCore {
  kHopperFp8,  // wgmma with 8-bit operands
  kHopper16,   // wgmma with 16-bit operands, and mma.sync with them
  kWarpFp8,    // mma.sync with 8-bit operands
  kBlackwell,  // tcgen05, mma.sync with block scales; all where sums are to be exact
};

// accumulator + a . b over `depth` elements, as float32. `depth` is a multiple of 8.
//
// The Hopper rules were fitted to an H200 and equal it bit for bit on the conformance set:
// every product and the accumulator are cut, toward zero, to a multiple of 2^(e - F), e being the
// largest exponent among them (a product's is the sum of its operands' exponents); the sum of those
// is exact and is cut, toward zero, to the significant bits that the result keeps.
//   8-bit wgmma: F = 13, 14 bits. 16-bit: F = 25, 24 bits. 8-bit mma.sync: the products alone with
//   F = 25 and 24 bits, and the accumulator is added in float32, to nearest.
// Blackwell's rule could not be measured: its sums are nearly exact here.
float AddDot(TensorCore core, float accumulator, const float* a, const float* b, int depth);

}  // namespace emulator
