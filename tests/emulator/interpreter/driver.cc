// Stands in for libcuda.so.1 (JAX_MEGAMOE_LIBCUDA): the functions that ffi/cuda_driver.h declares,
// launches carried out by the machine. Device memory is the process's own.
//
// A "cubin" is the name of a kernel that emulator_driver_kernel registered. Launches whose
// parameters have a SymBuffer of several ranks wait for those of the other ranks and run together.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "error.h"
#include "ffi/cuda_driver.h"
#include "machine.h"
#include "tensor_map.h"
#include "tests/ffi/driver_contexts.h"

using namespace jax_megamoe;
using emulator::Format;
using emulator::Machine;

namespace {

constexpr size_t kMaxRanks = 72, kSymBufferBytes = 592;
constexpr int kDefaultSharedBytes = 48 << 10, kMaxSharedBytes = 227 << 10;
constexpr auto kPatience = std::chrono::seconds(300);  // for the launches of other ranks
constexpr CUresult kLaunchFailed = 719, kInvalidImage = 200;

struct DriverKernel {
  int index;  // in the machine
  std::vector<size_t> offsets, sizes;
};
struct Function {
  const DriverKernel* kernel;
  int shared_limit = kDefaultSharedBytes;
};

// One rank's launch, its parameters copied.
struct Launch {
  const DriverKernel* kernel;
  std::vector<uint8_t> block;  // the parameter block starts at its first multiple of 128
  uint32_t grid[3], threads[3], cluster[3] = {1, 1, 1};
  uint32_t shared;
  int rank = 0;

  uint8_t* Block() {
    const auto start = reinterpret_cast<uintptr_t>(block.data());
    return block.data() + (-start & 127);
  }
};
struct Group {
  std::vector<Launch> waiting;
  uint64_t generation = 0;
  CUresult result = kCudaSuccess;
};

struct State {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  Machine machine;
  std::map<std::string, DriverKernel> kernels;
  std::vector<std::unique_ptr<Function>> functions;
  std::map<std::pair<uint64_t, size_t>, Group> groups;  // by rank 0's buffer and number of ranks
  std::string error;
  uint64_t seed = 1;

  State() { machine.memory.whole_process = true; }
};
// Never destroyed: device threads may outlive the main one.
State& TheState() {
  static auto* state = new State;
  return *state;
}

CUresult Refuse(const std::string& why, CUresult result = kCudaErrorInvalidValue) {
  TheState().error = why;
  return result;
}

// The ranks that a launch belongs to: rank 0's buffer and their number; fills in the own rank.
std::pair<uint64_t, size_t> ReadGroup(const CUlaunchConfig&, Launch& launch) {
  const DriverKernel& kernel = *launch.kernel;
  for (size_t i = 0; i < kernel.sizes.size(); ++i) {
    if (kernel.sizes[i] != kSymBufferBytes) continue;
    struct {
      uint64_t base;
      int64_t offsets[kMaxRanks];
      uint32_t rank;
    } buffer;
    std::memcpy(&buffer, launch.Block() + kernel.offsets[i], sizeof buffer);
    launch.rank = static_cast<int>(buffer.rank);
    size_t ranks = 1;  // the own offset is 0, as are those of ranks that there are not
    for (const int64_t offset : buffer.offsets) ranks += offset != 0;
    return {buffer.base + buffer.offsets[0], ranks};
  }
  return {0, 1};
}

CUresult RunTogether(State& state, std::vector<Launch>& launches) {
  Machine& machine = state.machine;
  machine.ClearGrids();
  machine.Seed(state.seed + machine.counts.launches++);
  for (Launch& launch : launches) {
    auto grid = std::make_unique<emulator::Grid>();
    grid->kernel = machine.kernels[launch.kernel->index].get();
    grid->parameters = reinterpret_cast<uint64_t>(launch.Block());
    std::memcpy(grid->grid, launch.grid, sizeof launch.grid);
    std::memcpy(grid->block, launch.threads, sizeof launch.threads);
    std::memcpy(grid->cluster, launch.cluster, sizeof launch.cluster);
    grid->dynamic_shared = launch.shared;
    grid->rank = launch.rank;
    grid->total = uint64_t{launch.grid[0]} * launch.grid[1] * launch.grid[2] / grid->ClusterSize();
    machine.grids.push_back(std::move(grid));
  }
  CUresult result = kCudaSuccess;
  try {
    machine.Run();
  } catch (const std::exception& error) {
    state.error = error.what() + machine.Where();
    result = kLaunchFailed;
  }
  machine.ClearGrids();
  return result;
}

}  // namespace

extern "C" {

// The machine behind the driver, for emulator_set and emulator_get.
Machine* emulator_driver_machine() { return &TheState().machine; }
void emulator_driver_seed(uint64_t seed) { TheState().seed = seed; }

// Makes a kernel of that machine known by name, with the places of its parameters.
void emulator_driver_kernel(const char* name, int index, const uint64_t* offsets,
                            const uint64_t* sizes, int num_parameters) {
  std::lock_guard lock(TheState().mutex);
  DriverKernel kernel{index, {}, {}};
  kernel.offsets.assign(offsets, offsets + num_parameters);
  kernel.sizes.assign(sizes, sizes + num_parameters);
  TheState().kernels.emplace(name, std::move(kernel));
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  thread_local std::string text;
  text = "EMULATOR_ERROR_" + std::to_string(error);
  *name = text.c_str();
  return kCudaSuccess;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = TheState().error.c_str();
  return kCudaSuccess;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, int*, void**, unsigned, int*,
                           void**, unsigned) {
  std::lock_guard lock(TheState().mutex);
  const auto found = TheState().kernels.find(static_cast<const char*>(code));
  if (found == TheState().kernels.end()) return Refuse("unknown kernel", kInvalidImage);
  *library = reinterpret_cast<CUlibrary>(&found->second);
  return kCudaSuccess;
}

CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary) {
  *count = 1;
  return kCudaSuccess;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned, CUlibrary library) {
  *kernels = reinterpret_cast<CUkernel>(library);
  return kCudaSuccess;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  const auto& known = *reinterpret_cast<DriverKernel*>(kernel);
  if (index >= known.sizes.size()) return kCudaErrorInvalidValue;
  *offset = known.offsets[index];
  *size = known.sizes[index];
  return kCudaSuccess;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  std::lock_guard lock(TheState().mutex);
  if (stand_in::contexts.empty()) return stand_in::kInvalidContext;
  auto made = std::make_unique<Function>(Function{reinterpret_cast<DriverKernel*>(kernel)});
  *function = reinterpret_cast<CUfunction>(made.get());
  TheState().functions.push_back(std::move(made));
  return kCudaSuccess;
}

CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  std::lock_guard lock(TheState().mutex);
  if (attribute != kFunctionMaxDynamicSharedSizeBytes || value > kMaxSharedBytes) {
    return Refuse(Format("function attribute %d of %d", attribute, value));
  }
  reinterpret_cast<Function*>(function)->shared_limit = value;
  return kCudaSuccess;
}

CUresult cuFuncLoad(CUfunction) { return kCudaSuccess; }

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int data_type, uint32_t rank, void* address,
                                const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                const uint32_t* element_strides, int interleave, int swizzle, int,
                                int oob_fill) {
  if (reinterpret_cast<uintptr_t>(map) % 64) return Refuse("misaligned tensor map");
  try {
    const emulator::TensorMap encoded =
        emulator::Encode({data_type, rank, reinterpret_cast<uint64_t>(address), dims, strides, box,
                          element_strides, interleave, swizzle, oob_fill});
    std::memset(map, 0, sizeof *map);
    std::memcpy(map, &encoded, sizeof encoded);
  } catch (const std::exception& error) {
    return Refuse(error.what());
  }
  return kCudaSuccess;
}

// Work of a device is done when it is asked for, so streams have nothing to order.
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream) {
  std::memset(reinterpret_cast<void*>(address), value, count);
  return kCudaSuccess;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  State& state = TheState();
  const auto& launched = *reinterpret_cast<Function*>(function);
  const DriverKernel& kernel = *launched.kernel;
  if (static_cast<int>(config->shared_memory_bytes) > launched.shared_limit) {
    return Refuse("more shared memory than the function's attribute allows");
  }
  Launch launch;
  launch.kernel = &kernel;
  std::memcpy(launch.grid, config->grid, sizeof launch.grid);
  std::memcpy(launch.threads, config->block, sizeof launch.threads);
  launch.shared = config->shared_memory_bytes;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const CUlaunchAttribute& attribute = config->attributes[i];
    if (attribute.id == kLaunchClusterDimension) {
      std::memcpy(launch.cluster, attribute.value.cluster_dimension, sizeof launch.cluster);
    }
  }
  const size_t bytes = kernel.sizes.empty() ? 0 : kernel.offsets.back() + kernel.sizes.back();
  launch.block.assign(bytes + 256, 0);
  for (size_t i = 0; i < kernel.sizes.size(); ++i) {
    std::memcpy(launch.Block() + kernel.offsets[i], parameters[i], kernel.sizes[i]);
  }
  const auto [first, ranks] = ReadGroup(*config, launch);
  std::unique_lock lock(state.mutex);
  Group& group = state.groups[{first, ranks}];
  group.waiting.push_back(std::move(launch));
  if (group.waiting.size() < ranks) {
    const uint64_t generation = group.generation;
    const bool came =
        state.changed.wait_for(lock, kPatience, [&] { return group.generation != generation; });
    return came ? group.result : Refuse("the other ranks did not launch", kLaunchFailed);
  }
  // The last rank runs all.
  group.result = RunTogether(state, group.waiting);
  group.waiting.clear();
  ++group.generation;
  state.changed.notify_all();
  return group.result;
}
}
