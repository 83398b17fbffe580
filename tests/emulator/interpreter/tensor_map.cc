#include "tensor_map.h"

#include "error.h"

namespace emulator {
namespace {

constexpr int kElementBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
constexpr uint64_t kMaxDim = 1ull << 32, kMaxStride = 1ull << 40;
constexpr uint32_t kMaxBox = 256;

void Check(bool holds, const char* what) {
  if (!holds) Fail("cuTensorMapEncodeTiled: %s", what);
}

// Rules of the two types of 4-bit elements (CUDA driver API, cuTensorMapEncodeTiled).
void CheckFourBits(const TensorMap& map) {
  if (map.Padded()) {
    Check(map.box[0] == 128, "the inner box of 16U4_ALIGN16B is 128");
    Check(map.dims[0] % 128 == 0, "the inner dimension of 16U4_ALIGN16B is a multiple of 128");
    Check(map.swizzle == 0 || map.swizzle == 3, "swizzle of 16U4_ALIGN16B");
  }
  if (map.type == TensorType::k16U4Align8B) Check(map.dims[0] % 2 == 0, "odd inner dimension");
}

}  // namespace

int TensorMap::ElementBits() const { return kElementBits[static_cast<int>(type)]; }

uint32_t TensorMap::InnerBytes() const { return Padded() ? box[0] : box[0] * ElementBits() / 8; }

uint32_t TensorMap::Rows() const {
  uint32_t rows = 1;
  for (int i = 1; i < rank; ++i) rows *= box[i];
  return rows;
}

TensorMap Encode(const TensorMapArguments& a) {
  Check(a.type >= 0 && a.type < static_cast<int>(TensorType::k16U6Align16B), "element type");
  Check(a.rank >= 1 && a.rank <= 5, "rank");
  Check(a.interleave == 0, "interleaved layouts are not emulated");
  Check(a.swizzle >= 0 && a.swizzle <= 3, "swizzle");
  TensorMap map{};
  map.magic = kTensorMapMagic;
  map.type = static_cast<TensorType>(a.type);
  map.rank = static_cast<uint8_t>(a.rank);
  map.swizzle = static_cast<uint8_t>(a.swizzle);
  map.nan_fill = static_cast<uint8_t>(a.fill);
  map.base = a.address;
  const uint64_t alignment = map.Padded() ? 32 : 16;
  Check(a.address % alignment == 0, "alignment of the address");
  for (uint32_t i = 0; i < a.rank; ++i) {
    Check(a.dims[i] >= 1 && a.dims[i] <= kMaxDim, "dimensions");
    Check(a.box[i] >= 1 && a.box[i] <= kMaxBox, "box");
    Check(!a.element_strides || a.element_strides[i] == 1, "element strides are not emulated");
    map.dims[i] = a.dims[i];
    map.box[i] = static_cast<uint16_t>(a.box[i]);
  }
  for (uint32_t i = 0; i + 1 < a.rank; ++i) {
    Check(a.strides[i] % alignment == 0 && a.strides[i] < kMaxStride, "strides");
    map.strides[i] = a.strides[i];
  }
  const bool is_float = map.type >= TensorType::kFloat16 && map.type <= TensorType::kTfloat32Ftz;
  Check(a.fill == 0 || (a.fill == 1 && is_float), "fill");
  Check(map.InnerBytes() % 16 == 0, "the inner box is a multiple of 16 bytes");
  if (map.swizzle) Check(map.InnerBytes() <= 16u << map.swizzle, "inner box beyond the swizzle");
  CheckFourBits(map);
  return map;
}

}  // namespace emulator
