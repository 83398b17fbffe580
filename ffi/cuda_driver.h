// The CUDA driver, opened at run time, so that this library builds without CUDA's headers and loads
// on machines without a GPU.
//
// The declarations restate what the CUDA driver API reference documents for CUDA 13 (structs
// CUlaunchConfig, CUlaunchAttribute and CUtensorMap, and the functions in struct Driver); their
// layout is part of the driver's stable ABI.

#ifndef JAX_MEGAMOE_FFI_CUDA_DRIVER_H_
#define JAX_MEGAMOE_FFI_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace jax_megamoe {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = uint64_t;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUfunction = struct CUfunc_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;

inline constexpr CUresult kCudaSuccess = 0;
inline constexpr CUresult kCudaErrorInvalidValue = 1;
inline constexpr int kFunctionMaxDynamicSharedSizeBytes = 8;
inline constexpr uint32_t kLaunchClusterDimension = 4;
inline constexpr uint32_t kLaunchProgrammaticStreamSerialization = 6;

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};
static_assert(sizeof(CUtensorMap) == 128);

struct CUlaunchAttribute {
  uint32_t id;
  char pad[4];
  union {
    char bytes[64];
    uint32_t cluster_dimension[3];
    int programmatic_stream_serialization_allowed;
  } value;
};
static_assert(sizeof(CUlaunchAttribute) == 72 && offsetof(CUlaunchAttribute, value) == 8);

struct CUlaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_memory_bytes;
  CUstream stream;
  CUlaunchAttribute* attributes;
  uint32_t num_attributes;
};
static_assert(sizeof(CUlaunchConfig) == 56 && offsetof(CUlaunchConfig, stream) == 32 &&
              offsetof(CUlaunchConfig, num_attributes) == 48);

// Entry points by the names that libcuda exports (the versions current in CUDA 13).
struct Driver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuCtxPushCurrent_v2)(CUcontext context);
  CUresult (*cuCtxPopCurrent_v2)(CUcontext* context);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, int* jit_options,
                                void** jit_values, unsigned num_jit_options, int* library_options,
                                void** library_values, unsigned num_library_options);
  CUresult (*cuLibraryGetKernelCount)(unsigned* count, CUlibrary library);
  CUresult (*cuLibraryEnumerateKernels)(CUkernel* kernels, unsigned count, CUlibrary library);
  CUresult (*cuKernelGetParamInfo)(CUkernel kernel, size_t index, size_t* offset, size_t* size);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuFuncLoad)(CUfunction function);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, int data_type, uint32_t rank, void* address,
                                     const uint64_t* dims, const uint64_t* strides,
                                     const uint32_t* box, const uint32_t* element_strides,
                                     int interleave, int swizzle, int l2_promotion, int oob_fill);
  CUresult (*cuMemsetD8Async)(CUdeviceptr address, unsigned char value, size_t count,
                              CUstream stream);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** parameters,
                               void** extra);

  // Opens libcuda.so.1, or the library that the environment variable JAX_MEGAMOE_LIBCUDA names, at
  // the first call. Throws LaunchError while there is none.
  static const Driver& Get();

  // Throws LaunchError if `result` is an error: `what: CUDA_ERROR_...: text`.
  void Check(CUresult result, std::string_view what) const;

  // The context that XLA uses too, retained once and for the rest of the process.
  CUcontext PrimaryContext(int ordinal) const;
};

// Makes a context current in a scope.
class CurrentContext {
 public:
  CurrentContext(const Driver& driver, CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const Driver& driver_;
};

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_CUDA_DRIVER_H_
