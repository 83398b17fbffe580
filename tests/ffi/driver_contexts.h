// What both stand-ins for libcuda.so.1 share: its devices and each thread's stack of contexts. It
// defines functions of the driver, so one source of a library includes it.
#pragma once

#include <cstdint>
#include <vector>

#include "ffi/cuda_driver.h"

namespace stand_in {

constexpr int kNumDevices = 72;
constexpr jax_megamoe::CUresult kInvalidDevice = 101, kInvalidContext = 201;

inline thread_local std::vector<jax_megamoe::CUcontext> contexts;

// Contexts are device ordinals, off by one so that none is null.
inline int CurrentDevice() {
  return contexts.empty() ? -1 : static_cast<int>(reinterpret_cast<intptr_t>(contexts.back())) - 1;
}

}  // namespace stand_in

extern "C" {

jax_megamoe::CUresult cuInit(unsigned) { return jax_megamoe::kCudaSuccess; }

jax_megamoe::CUresult cuDeviceGet(jax_megamoe::CUdevice* device, int ordinal) {
  *device = ordinal;
  const bool known = ordinal >= 0 && ordinal < stand_in::kNumDevices;
  return known ? jax_megamoe::kCudaSuccess : stand_in::kInvalidDevice;
}

jax_megamoe::CUresult cuDevicePrimaryCtxRetain(jax_megamoe::CUcontext* context,
                                               jax_megamoe::CUdevice device) {
  *context = reinterpret_cast<jax_megamoe::CUcontext>(intptr_t{device} + 1);
  return jax_megamoe::kCudaSuccess;
}

jax_megamoe::CUresult cuCtxPushCurrent_v2(jax_megamoe::CUcontext context) {
  stand_in::contexts.push_back(context);
  return jax_megamoe::kCudaSuccess;
}

jax_megamoe::CUresult cuCtxPopCurrent_v2(jax_megamoe::CUcontext* context) {
  if (stand_in::contexts.empty()) return stand_in::kInvalidContext;
  *context = stand_in::contexts.back();
  stand_in::contexts.pop_back();
  return jax_megamoe::kCudaSuccess;
}
}
