// Kernels loaded into the driver: once per process and device, kept until the process ends.
//
// Nothing is ever unloaded. Unloading, like loading, may wait for the device, and a kernel of
// another rank may be spinning there until this rank launches.

#ifndef JAX_MEGAMOE_FFI_KERNEL_MODULE_H_
#define JAX_MEGAMOE_FFI_KERNEL_MODULE_H_

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "ffi/cuda_driver.h"
#include "ffi/launch_plan.h"

namespace jax_megamoe {

class KernelModules {
 public:
  static KernelModules& Get();

  // The function of `kernel` on device `ordinal`, whose context must be current: loaded, and
  // allowed the launch's dynamic shared memory. Throws LaunchError if the machine code does not
  // hold exactly one kernel or that kernel's parameters are not the launch's arguments in number
  // and size.
  CUfunction Load(const Driver& driver, int ordinal, const Kernel& kernel, const std::string& cubin,
                  const KernelLaunch& launch);

 private:
  struct Function {
    CUfunction handle;
    uint32_t shared_memory_bytes = 0;  // allowed so far
  };
  CUkernel LoadLibrary(const Driver& driver, const Kernel& kernel, const std::string& cubin);

  std::mutex mutex_;
  std::map<std::string, CUkernel> kernels_;                    // by specification
  std::map<std::pair<std::string, int>, Function> functions_;  // and device
};

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_KERNEL_MODULE_H_
