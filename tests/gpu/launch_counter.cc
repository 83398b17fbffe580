// Stands between jax_megamoe and libcuda.so.1 (see JAX_MEGAMOE_LIBCUDA), which it is linked with,
// and counts kernel launches by whether their stream was being captured into a CUDA graph. A
// graph's replay launches nothing here.

#include <dlfcn.h>

#include <atomic>

#include "ffi/cuda_driver.h"

namespace jax_megamoe {
namespace {

std::atomic<long> captured = 0;
std::atomic<long> direct = 0;

template <typename Function>
Function Next(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

extern "C" long launches_captured() { return captured; }
extern "C" long launches_direct() { return direct; }

extern "C" CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                     void** parameters, void** extra) {
  static const auto launch = Next<decltype(Driver::cuLaunchKernelEx)>("cuLaunchKernelEx");
  static const auto is_capturing = Next<CUresult (*)(CUstream, int*)>("cuStreamIsCapturing");
  int status = 0;
  if (const CUresult result = is_capturing(config->stream, &status); result != kCudaSuccess) {
    return result;
  }
  ++(status == 0 ? direct : captured);
  return launch(config, function, parameters, extra);
}

}  // namespace jax_megamoe
