// Tensor maps (TMA descriptors): their extent in memory and their encoding by the driver.

#ifndef JAX_MEGAMOE_FFI_TENSOR_MAP_H_
#define JAX_MEGAMOE_FFI_TENSOR_MAP_H_

#include <cstdint>

#include "ffi/cuda_driver.h"
#include "ffi/launch_plan.h"

namespace jax_megamoe {

// Bytes from the first to past the last element; saturates at UINT64_MAX.
uint64_t ExtentBytes(const TensorMap& map);

// Encodes `map` over memory at `address`. Throws LaunchError naming `name` if the driver refuses.
void EncodeTensorMap(const Driver& driver, const TensorMap& map, const char* name, uint64_t address,
                     CUtensorMap* encoded);

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_TENSOR_MAP_H_
