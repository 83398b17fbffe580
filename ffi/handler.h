// The FFI handlers: XLA's stages onto Program.

#ifndef JAX_MEGAMOE_FFI_HANDLER_H_
#define JAX_MEGAMOE_FFI_HANDLER_H_

#include "ffi/error.h"
#include "ffi/launch.h"

namespace jax_megamoe {

// The state of a call site. One type a platform, because XLA gives a type its number per platform.
struct CudaProgram : Program {
  using Program::Program;
  static ffi::TypeId id;
};
struct CpuProgram : Program {
  using Program::Program;
  static ffi::TypeId id;
};

// Handlers by stage. `captured` is the target for CUDA graphs: its execute stage carries the
// command-buffer trait.
struct Stages {
  XLA_FFI_Handler* instantiate;
  XLA_FFI_Handler* prepare;  // null on the CPU platform, where XLA does not run this stage
  XLA_FFI_Handler* execute;
};
Stages CudaStages(bool captured);
Stages CpuStages(bool captured);

const XLA_FFI_TypeInfo* CudaTypeInfo();
const XLA_FFI_TypeInfo* CpuTypeInfo();

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_HANDLER_H_
