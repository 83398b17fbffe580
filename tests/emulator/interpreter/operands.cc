#include "operands.h"

#include "error.h"
#include "memory.h"
#include "numbers.h"

namespace emulator {
namespace {

constexpr uint32_t kBytesAlongK = 32;

// Fields in 16-byte units (PTX ISA, Shared memory matrix layout).
uint32_t Units(uint64_t descriptor, int bit) {
  return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
}

}  // namespace

uint32_t DescriptorAddress(uint64_t descriptor, uint32_t row, uint32_t k,
                           DescriptorVersion version) {
  const uint32_t start = Units(descriptor, 0), leading = Units(descriptor, 16),
                 stride = Units(descriptor, 32);
  if ((descriptor >> 46 & 3) != version) {
    Fail("matrix descriptor: version %u", static_cast<uint32_t>(descriptor >> 46 & 3));
  }
  if (descriptor >> 49 & 7) Fail("matrix descriptor: base offsets are not emulated");
  if (descriptor >> 52 & 1) Fail("matrix descriptor: absolute leading dimensions are not emulated");
  const auto layout = static_cast<uint32_t>(descriptor >> 61);
  // Groups of 8 rows are `stride` apart; a swizzle XORs address bits 4 to 6 with bits 7 to 9.
  const auto swizzled = [&](uint32_t row_bytes, uint32_t mask) {
    const uint32_t address = start + row / 8 * stride + row % 8 * row_bytes + k;
    return address ^ (address >> 7 & mask) << 4;
  };
  // Layout types of version 0 stand in bits 62 and 63, of version 1 in bits 61 to 63.
  switch (layout) {
    case 0:  // no swizzle: cores of 8 rows of 16 bytes
      return start + row / 8 * stride + row % 8 * 16 + k / 16 * leading + k % 16;
    case 2:
      return swizzled(128, 7);
    case 4:
      return swizzled(64, 3);
    case 6:
      return swizzled(32, 1);
    default:
      Fail("matrix descriptor: layout type %u", layout);
  }
}

float DecodeElement(Element element, uint32_t word, int index) {
  switch (element) {
    case Element::kE4m3:
      return kE4m3[word >> (8 * index) & 255];
    case Element::kE5m2:
      return kE5m2[word >> (8 * index) & 255];
    case Element::kE2m1:
    case Element::kE2m1Padded:
      return kE2m1[word >> (4 * index) & 15];
    case Element::kBf16:
      return FromBf16(word >> (16 * index));
    case Element::kF16:
      return FromF16(word >> (16 * index));
  }
  Fail("element type");
}

void ReadRows(const Cta& cta, uint64_t descriptor, uint32_t rows, Element element, float* out,
              int depth, uint8_t* valid, DescriptorVersion version) {
  const int bytes = element == Element::kE2m1Padded ? 8 : 16;  // of each 16 that hold elements
  const int elements = bytes * 8 / ElementBits(element);
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t k = 0; k < kBytesAlongK; k += 16) {
      const uint32_t address = DescriptorAddress(descriptor, row, k, version);
      if (address < kSharedBase || address + 16 > cta.shared.size()) {
        Fail("matrix operand outside shared memory, offset %d",
             static_cast<int>(address) - static_cast<int>(kSharedBase));
      }
      const uint8_t* at = &cta.shared[address];
      for (int i = 0; i < bytes; ++i) valid[row] &= cta.shared_valid[address + i];
      float* to = out + static_cast<size_t>(row) * depth + k / 16 * elements;
      switch (element) {  // by bytes: this is the inner loop of an emulated matrix product
        case Element::kE4m3:
          for (int i = 0; i < 16; ++i) to[i] = kE4m3[at[i]];
          break;
        case Element::kE5m2:
          for (int i = 0; i < 16; ++i) to[i] = kE5m2[at[i]];
          break;
        case Element::kE2m1:
        case Element::kE2m1Padded:
          for (int i = 0; i < bytes; ++i) {
            to[2 * i] = kE2m1[at[i] & 15];
            to[2 * i + 1] = kE2m1[at[i] >> 4];
          }
          break;
        case Element::kBf16:
          for (int i = 0; i < 8; ++i) to[i] = FromBf16(at[2 * i] | at[2 * i + 1] << 8);
          break;
        case Element::kF16:
          for (int i = 0; i < 8; ++i) to[i] = FromF16(at[2 * i] | at[2 * i + 1] << 8);
          break;
      }
    }
  }
}

}  // namespace emulator
