// Sums of tensor cores: the one place where their rounding is decided.
#pragma once

namespace emulator {

// How a tensor core adds the products of one instruction's K to an accumulator.
enum class TensorCore {
  kHopperFp8,  // wgmma with 8-bit operands
  kHopper16,   // wgmma with 16-bit operands
  kWarp,       // mma.sync
  kBlackwell,  // tcgen05
};

// accumulator + a . b over `depth` elements, as float32. `depth` is a multiple of 8.
float AddDot(TensorCore core, float accumulator, const float* a, const float* b, int depth);

}  // namespace emulator
