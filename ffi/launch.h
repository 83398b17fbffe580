// A plan made ready for this process: its kernels' machine code and, per device, loaded functions.

#ifndef JAX_MEGAMOE_FFI_LAUNCH_H_
#define JAX_MEGAMOE_FFI_LAUNCH_H_

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "ffi/cuda_driver.h"
#include "ffi/launch_plan.h"
#include "ffi/registry.h"

namespace jax_megamoe {

// One call site of one executable. Several devices and threads use it at once, and buffers may be
// registered and unregistered meanwhile: a launch that finds its buffer enqueues all steps before
// the buffer may go, another throws LaunchError before the first step.
class Program {
 public:
  // Gets the machine code of every kernel. With `captured`, launches may be captured into CUDA
  // graphs, which keep the symmetric buffer's address: the buffer is pinned while this lives.
  Program(LaunchPlan plan, bool captured);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Checks the call and the symmetric buffer and loads the kernels: on device `ordinal`, and on all
  // other devices of this process that share the buffer, for once one of them launches, loading may
  // wait on a kernel that waits for the others. Does no driver work when they are loaded already.
  void Prepare(int ordinal, const CallBuffers& buffers);

  // Enqueues the plan's steps. Loads nothing, allocates nothing on the device and waits for
  // nothing, if `Prepare` ran before. Checks its arrays, which need not be those of `Prepare`.
  void Launch(int ordinal, CUstream stream, const CallBuffers& buffers);

 private:
  struct Device {
    CUcontext context;
    std::vector<CUfunction> functions;  // by step; null for a fill
  };

  const Device& Prepared(int ordinal);
  Device LoadOn(int ordinal) const;
  std::shared_ptr<const SymmetricBuffer> FindSymmetricBuffer(int ordinal) const;

  const LaunchPlan plan_;
  const std::vector<Access> accesses_;  // into plan_
  const bool captured_;
  std::vector<std::shared_ptr<const std::string>> cubins_;  // by kernel
  std::mutex mutex_;
  std::map<int, Device> devices_;
  std::set<int> pinned_;
};

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_LAUNCH_H_
