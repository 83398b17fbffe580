// Tensor maps: what cuTensorMapEncodeTiled checks, and the 128 bytes it would write (ours).
#pragma once

#include <cstdint>
#include <string>

namespace emulator {

// CUtensorMapDataType; the order is cuda.h's.
enum class TensorType : uint8_t {
  kUint8,
  kUint16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kFloat32,
  kFloat64,
  kBfloat16,
  kFloat32Ftz,
  kTfloat32,
  kTfloat32Ftz,
  k16U4Align8B,
  k16U4Align16B,
  k16U6Align16B
};
inline constexpr uint32_t kTensorMapMagic = 0x544d4150;

struct TensorMap {
  uint32_t magic;
  TensorType type;
  uint8_t rank, swizzle, nan_fill;
  uint64_t base;
  uint64_t dims[5];
  uint16_t box[5];
  uint16_t unused;
  uint64_t strides[4];  // bytes

  // Elements of 4 bits in the first 8 of 16 shared bytes.
  bool Padded() const { return type == TensorType::k16U4Align16B; }
  int ElementBits() const;
  uint32_t InnerBytes() const;  // of a box's row in shared memory
  uint32_t Rows() const;        // of a box
  // What a load adds to an mbarrier: padding does not count.
  uint32_t TransactionBytes() const { return box[0] * ElementBits() / 8 * Rows(); }
};
static_assert(sizeof(TensorMap) <= 128);

struct TensorMapArguments {
  int type;
  uint32_t rank;
  uint64_t address;
  const uint64_t *dims, *strides;
  const uint32_t *box, *element_strides;
  int interleave, swizzle, fill;
};
// The encoded map; throws Error for what the driver refuses and what is not emulated.
TensorMap Encode(const TensorMapArguments& arguments);

}  // namespace emulator
