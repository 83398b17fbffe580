// Matrix operands in shared memory: descriptors and element formats (PTX ISA 9.7.15.5 and 9.7.16.4,
// matrix descriptors; CUTLASS, cute/arch/mma_sm100_desc.hpp and mma_sm90_desc.hpp).
#pragma once

#include <cstdint>

#include "state.h"

namespace emulator {

enum class Element {
  kE4m3 = 0,
  kE5m2 = 1,
  kE2m1 = 2,        // two a byte
  kE2m1Padded = 3,  // 16 in the first 8 of 16 bytes
  kBf16 = 4,
  kF16 = 5,
};

// The descriptor's version field, which tells the two generations apart.
enum DescriptorVersion : uint32_t { kHopper = 0, kBlackwell = 1 };

// Address of byte `k` (of the 32 along K) of a row, for K-major layouts.
uint32_t DescriptorAddress(uint64_t descriptor, uint32_t row, uint32_t k,
                           DescriptorVersion version);

// Decodes `rows` rows of 32 bytes into `out` [rows][depth]; clears `valid[row]` where a byte was
// never written.
void ReadRows(const Cta& cta, uint64_t descriptor, uint32_t rows, Element element, float* out,
              int depth, uint8_t* valid, DescriptorVersion version);

// One element of registers or bytes: `index` counts elements from the lowest bits of `word`.
float DecodeElement(Element element, uint32_t word, int index);
constexpr int ElementBits(Element element) {
  return element >= Element::kBf16 ? 16 : element >= Element::kE2m1 ? 4 : 8;
}

}  // namespace emulator
