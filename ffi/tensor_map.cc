#include "ffi/tensor_map.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

namespace jax_megamoe {
namespace {

// Bits of each CUtensorMapDataType: U8 U16 U32 I32 U64 I64 F16 F32 F64 BF16 F32_FTZ TF32 TF32_FTZ,
// 16U4_ALIGN8B 16U4_ALIGN16B 16U6_ALIGN16B. The last three are packed without gaps in global
// memory.
constexpr std::array<uint32_t, 16> kElementBits = {8,  16, 32, 32, 64, 64, 16, 32,
                                                   64, 16, 32, 32, 32, 4,  4,  6};

}  // namespace

uint64_t ExtentBytes(const TensorMap& map) {
  unsigned __int128 bytes =
      (static_cast<unsigned __int128>(map.dims[0]) * kElementBits.at(map.data_type) + 7) / 8;
  for (uint32_t i = 1; i < map.rank; ++i) {
    bytes += static_cast<unsigned __int128>(map.dims[i] - 1) * map.strides[i - 1];
  }
  const unsigned __int128 limit = std::numeric_limits<uint64_t>::max();
  return static_cast<uint64_t>(std::min(bytes, limit));
}

void EncodeTensorMap(const Driver& driver, const TensorMap& map, const char* name, uint64_t address,
                     CUtensorMap* encoded) {
  static constexpr std::array<uint32_t, kMaxTensorMapRank> kOnes = {1, 1, 1, 1, 1};
  const CUresult result = driver.cuTensorMapEncodeTiled(
      encoded, map.data_type, map.rank, reinterpret_cast<void*>(address), map.dims.data(),
      map.strides.data(), map.box.data(), kOnes.data(), map.interleave, map.swizzle,
      map.l2_promotion, map.oob_fill);
  if (result != kCudaSuccess) {
    driver.Check(result, std::string("cuTensorMapEncodeTiled for ") + name);
  }
}

}  // namespace jax_megamoe
