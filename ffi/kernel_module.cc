#include "ffi/kernel_module.h"

#include "ffi/error.h"

namespace jax_megamoe {
namespace {

void CheckParameters(const Driver& driver, CUkernel kernel, const std::string& symbol,
                     const KernelLaunch& launch) {
  constexpr char kHint[] =
      "the kernel's source and the plan differ: check the kernel source's version";
  for (size_t i = 0; i <= launch.arguments.size(); ++i) {
    size_t offset = 0;
    size_t size = 0;
    const CUresult result = driver.cuKernelGetParamInfo(kernel, i, &offset, &size);
    const bool past_end = i == launch.arguments.size();
    if (result == kCudaErrorInvalidValue && past_end) return;
    if (result != kCudaSuccess && result != kCudaErrorInvalidValue) {
      driver.Check(result, "cuKernelGetParamInfo of " + symbol);
    }
    if (past_end || result == kCudaErrorInvalidValue) {
      Reject("kernel " + symbol, std::to_string(launch.arguments.size()) + " parameters",
             past_end ? "more" : std::to_string(i), kHint);
    }
    const Argument& argument = launch.arguments[i];
    if (size != argument.size) {
      Reject("kernel " + symbol + " parameter " + argument.name,
             std::to_string(argument.size) + " bytes", std::to_string(size), kHint);
    }
  }
}

}  // namespace

KernelModules& KernelModules::Get() {
  static auto* modules = new KernelModules;
  return *modules;
}

CUkernel KernelModules::LoadLibrary(const Driver& driver, const Kernel& kernel,
                                    const std::string& cubin) {
  if (const auto found = kernels_.find(kernel.spec); found != kernels_.end()) return found->second;
  CUlibrary library;
  driver.Check(
      driver.cuLibraryLoadData(&library, cubin.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
      "cuLibraryLoadData of " + kernel.symbol);
  unsigned count = 0;
  driver.Check(driver.cuLibraryGetKernelCount(&count, library), "cuLibraryGetKernelCount");
  if (count != 1) {
    Reject("machine code of " + kernel.symbol, "one kernel", std::to_string(count));
  }
  CUkernel handle;
  driver.Check(driver.cuLibraryEnumerateKernels(&handle, 1, library), "cuLibraryEnumerateKernels");
  kernels_.emplace(kernel.spec, handle);
  return handle;
}

CUfunction KernelModules::Load(const Driver& driver, int ordinal, const Kernel& kernel,
                               const std::string& cubin, const KernelLaunch& launch) {
  std::lock_guard lock(mutex_);
  const CUkernel handle = LoadLibrary(driver, kernel, cubin);
  CheckParameters(driver, handle, kernel.symbol, launch);
  const auto [entry, inserted] = functions_.try_emplace({kernel.spec, ordinal});
  Function& function = entry->second;
  if (inserted) {
    const CUresult result = driver.cuKernelGetFunction(&function.handle, handle);
    if (result != kCudaSuccess) functions_.erase(entry);
    driver.Check(result, "cuKernelGetFunction of " + kernel.symbol);
  }
  if (launch.shared_memory_bytes > function.shared_memory_bytes) {
    driver.Check(driver.cuFuncSetAttribute(function.handle, kFunctionMaxDynamicSharedSizeBytes,
                                           static_cast<int>(launch.shared_memory_bytes)),
                 kernel.symbol + " with " + std::to_string(launch.shared_memory_bytes) +
                     " bytes of shared memory");
    function.shared_memory_bytes = launch.shared_memory_bytes;
  }
  // Loading is lazy by default; the first launch must not be what loads.
  driver.Check(driver.cuFuncLoad(function.handle), "cuFuncLoad of " + kernel.symbol);
  return function.handle;
}

}  // namespace jax_megamoe
