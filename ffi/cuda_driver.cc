#include "ffi/cuda_driver.h"

#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "ffi/error.h"

namespace jax_megamoe {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";
constexpr char kLibraryVariable[] = "JAX_MEGAMOE_LIBCUDA";
constexpr char kDriverHint[] =
    "install an NVIDIA driver of release 580 or newer (in a container: start it with GPU access), "
    "or name the library in JAX_MEGAMOE_LIBCUDA";

std::unique_ptr<const Driver> Open() {
  const char* named = std::getenv(kLibraryVariable);
  const std::string path = named != nullptr && *named != '\0' ? named : kLibrary;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message(path, "the CUDA driver library",
                              reason != nullptr ? reason : "an unknown error", kDriverHint));
  }
  auto driver = std::make_unique<Driver>();
  const auto resolve = [&](auto& function, const char* name) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) {
      throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                        Message(path, std::string("the function ") + name, "none", kDriverHint));
    }
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  };
#define JAX_MEGAMOE_RESOLVE(name) resolve(driver->name, #name)
  JAX_MEGAMOE_RESOLVE(cuInit);
  JAX_MEGAMOE_RESOLVE(cuGetErrorName);
  JAX_MEGAMOE_RESOLVE(cuGetErrorString);
  JAX_MEGAMOE_RESOLVE(cuDeviceGet);
  JAX_MEGAMOE_RESOLVE(cuDevicePrimaryCtxRetain);
  JAX_MEGAMOE_RESOLVE(cuCtxPushCurrent_v2);
  JAX_MEGAMOE_RESOLVE(cuCtxPopCurrent_v2);
  JAX_MEGAMOE_RESOLVE(cuLibraryLoadData);
  JAX_MEGAMOE_RESOLVE(cuLibraryGetKernelCount);
  JAX_MEGAMOE_RESOLVE(cuLibraryEnumerateKernels);
  JAX_MEGAMOE_RESOLVE(cuKernelGetParamInfo);
  JAX_MEGAMOE_RESOLVE(cuKernelGetFunction);
  JAX_MEGAMOE_RESOLVE(cuFuncSetAttribute);
  JAX_MEGAMOE_RESOLVE(cuFuncLoad);
  JAX_MEGAMOE_RESOLVE(cuTensorMapEncodeTiled);
  JAX_MEGAMOE_RESOLVE(cuMemsetD8Async);
  JAX_MEGAMOE_RESOLVE(cuLaunchKernelEx);
#undef JAX_MEGAMOE_RESOLVE
  driver->Check(driver->cuInit(0), "cuInit");
  return driver;
}

}  // namespace

const Driver& Driver::Get() {
  // A failed attempt is not remembered: a later one may find a library. Never destroyed, like every
  // registry of this library: device threads may outlive the main one.
  static auto* mutex = new std::mutex;
  static auto* driver = new std::unique_ptr<const Driver>;
  std::lock_guard lock(*mutex);
  if (*driver == nullptr) *driver = Open();
  return **driver;
}

void Driver::Check(CUresult result, std::string_view what) const {
  if (result == kCudaSuccess) [[likely]] {
    return;
  }
  const char* name = nullptr;
  const char* text = nullptr;
  cuGetErrorName(result, &name);
  cuGetErrorString(result, &text);
  std::string message(what);
  message.append(": ").append(name ? name : "CUDA error " + std::to_string(result));
  if (text != nullptr) message.append(": ").append(text);
  throw LaunchError(ffi::ErrorCode::kInternal, message);
}

CUcontext Driver::PrimaryContext(int ordinal) const {
  static auto* mutex = new std::mutex;
  static auto* contexts = new std::map<int, CUcontext>;
  std::lock_guard lock(*mutex);
  if (auto found = contexts->find(ordinal); found != contexts->end()) return found->second;
  CUdevice device;
  Check(cuDeviceGet(&device, ordinal), "cuDeviceGet(" + std::to_string(ordinal) + ")");
  CUcontext context;
  Check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  contexts->emplace(ordinal, context);
  return context;
}

CurrentContext::CurrentContext(const Driver& driver, CUcontext context) : driver_(driver) {
  driver.Check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
}

CurrentContext::~CurrentContext() {
  CUcontext popped;
  driver_.cuCtxPopCurrent_v2(&popped);
}

}  // namespace jax_megamoe
