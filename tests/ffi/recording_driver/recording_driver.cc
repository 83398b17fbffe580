// Stands in for libcuda.so.1: the driver functions that ffi/cuda_driver.h declares, recorded
// instead of carried out. A "cubin" here is text, one kernel a line: its name and the bytes of each
// parameter. Tests read the record as JSON through recording_log.

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "ffi/cuda_driver.h"
#include "tests/ffi/driver_contexts.h"

using namespace jax_megamoe;

namespace {

constexpr char kMapMark[8] = "mapped";

struct Kernel {
  std::string name;
  std::vector<size_t> sizes;
};
struct Library {
  std::vector<Kernel> kernels;
};
struct Function {
  const Kernel* kernel;
  int device;
};

std::mutex mutex;  // guards all below
std::vector<std::unique_ptr<Library>> libraries;
std::vector<std::unique_ptr<Function>> functions;
std::vector<std::string> log_entries;
std::vector<std::string> tensor_maps;
std::map<std::string, CUresult> failures;
struct Peek {
  size_t parameter;
  size_t size;
};
std::map<std::string, Peek> peeks;  // by kernel
std::string held_kernel;
int num_held = 0;
std::condition_variable held_changed;
std::string log_text;

// Builds one JSON object.
class Entry {
 public:
  Entry& Text(const char* key, const std::string& value) { return Raw(key, '"' + value + '"'); }
  Entry& Number(const char* key, uint64_t value) { return Raw(key, std::to_string(value)); }
  Entry& Raw(const char* key, const std::string& json) {
    text_ << (first_ ? "{" : ", ") << '"' << key << "\": " << json;
    first_ = false;
    return *this;
  }
  std::string Json() const { return text_.str() + "}"; }

 private:
  std::stringstream text_;
  bool first_ = true;
};

template <typename T>
std::string List(const T* values, size_t count) {
  std::ostringstream text;
  for (size_t i = 0; i < count; ++i) text << (i ? ", " : "[") << values[i];
  return (count ? text.str() : "[") + "]";
}

std::string Hex(const void* data, size_t size) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(data)[i];
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

// Records a call; returns the failure that a test asked for, or success.
CUresult Record(const char* function, Entry& entry) {
  entry.Text("call", function).Raw("device", std::to_string(stand_in::CurrentDevice()));
  log_entries.push_back(entry.Json());
  const auto found = failures.find(function);
  return found == failures.end() ? kCudaSuccess : found->second;
}

std::string Parameter(const void* data, size_t size) {
  if (size == sizeof(CUtensorMap) && std::memcmp(data, kMapMark, sizeof kMapMark) == 0) {
    uint64_t index;
    std::memcpy(&index, static_cast<const char*>(data) + sizeof kMapMark, sizeof index);
    return tensor_maps.at(index);
  }
  return '"' + Hex(data, size) + '"';
}

}  // namespace

extern "C" {

CUresult cuGetErrorName(CUresult error, const char** name) {
  thread_local std::string text;
  text = "RECORDED_ERROR_" + std::to_string(error);
  *name = text.c_str();
  return kCudaSuccess;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "from the recording driver";
  return kCudaSuccess;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void* code, int*, void**, unsigned, int*,
                           void**, unsigned) {
  std::lock_guard lock(mutex);
  auto loaded = std::make_unique<Library>();
  std::istringstream lines(static_cast<const char*>(code));
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    Kernel kernel;
    words >> kernel.name;
    for (size_t size; words >> size;) kernel.sizes.push_back(size);
    loaded->kernels.push_back(kernel);
  }
  *library = reinterpret_cast<CUlibrary>(loaded.get());
  const std::string name = loaded->kernels.empty() ? "" : loaded->kernels[0].name;
  libraries.push_back(std::move(loaded));
  return Record("cuLibraryLoadData", Entry{}.Text("kernel", name));
}

CUresult cuLibraryGetKernelCount(unsigned* count, CUlibrary library) {
  *count = reinterpret_cast<Library*>(library)->kernels.size();
  return kCudaSuccess;
}

CUresult cuLibraryEnumerateKernels(CUkernel* kernels, unsigned count, CUlibrary library) {
  auto& all = reinterpret_cast<Library*>(library)->kernels;
  for (unsigned i = 0; i < count && i < all.size(); ++i) {
    kernels[i] = reinterpret_cast<CUkernel>(&all[i]);
  }
  return kCudaSuccess;
}

CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t* offset, size_t* size) {
  const auto& sizes = reinterpret_cast<Kernel*>(kernel)->sizes;
  if (index >= sizes.size()) return kCudaErrorInvalidValue;
  *offset = 0;
  *size = sizes[index];
  return kCudaSuccess;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  std::lock_guard lock(mutex);
  if (stand_in::contexts.empty()) return stand_in::kInvalidContext;
  functions.push_back(std::make_unique<Function>(
      Function{reinterpret_cast<Kernel*>(kernel), stand_in::CurrentDevice()}));
  *function = reinterpret_cast<CUfunction>(functions.back().get());
  return Record("cuKernelGetFunction",
                Entry{}.Text("kernel", reinterpret_cast<Kernel*>(kernel)->name));
}

CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value) {
  std::lock_guard lock(mutex);
  return Record("cuFuncSetAttribute",
                Entry()
                    .Text("kernel", reinterpret_cast<Function*>(function)->kernel->name)
                    .Number("attribute", attribute)
                    .Number("value", value));
}

CUresult cuFuncLoad(CUfunction function) {
  std::lock_guard lock(mutex);
  return Record("cuFuncLoad",
                Entry{}.Text("kernel", reinterpret_cast<Function*>(function)->kernel->name));
}

// Refuses misaligned memory, as the driver does; the map it makes is a reference to its arguments.
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, int data_type, uint32_t rank, void* address,
                                const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                const uint32_t* element_strides, int interleave, int swizzle,
                                int l2_promotion, int oob_fill) {
  std::lock_guard lock(mutex);
  if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16) {
    return kCudaErrorInvalidValue;
  }
  for (uint32_t i = 0; i + 1 < rank; ++i) {
    if (strides[i] % 16) return kCudaErrorInvalidValue;
  }
  std::memset(map, 0, sizeof *map);
  const uint64_t index = tensor_maps.size();
  std::memcpy(map, kMapMark, sizeof kMapMark);
  std::memcpy(reinterpret_cast<char*>(map) + sizeof kMapMark, &index, sizeof index);
  tensor_maps.push_back(Entry()
                            .Number("base", reinterpret_cast<uint64_t>(address))
                            .Number("dtype", data_type)
                            .Raw("dims", List(dims, rank))
                            .Raw("strides", List(strides, rank - 1))
                            .Raw("box", List(box, rank))
                            .Raw("elem_strides", List(element_strides, rank))
                            .Number("interleave", interleave)
                            .Number("swizzle", swizzle)
                            .Number("l2", l2_promotion)
                            .Number("oob", oob_fill)
                            .Json());
  return kCudaSuccess;
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, CUstream stream) {
  std::lock_guard lock(mutex);
  return Record("cuMemsetD8Async", Entry()
                                       .Number("address", address)
                                       .Number("value", value)
                                       .Number("count", count)
                                       .Number("stream", reinterpret_cast<uint64_t>(stream)));
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void**) {
  std::unique_lock lock(mutex);
  const auto* launched = reinterpret_cast<Function*>(function);
  if (stand_in::CurrentDevice() != launched->device) return stand_in::kInvalidContext;
  if (launched->kernel->name == held_kernel) {
    ++num_held;
    held_changed.notify_all();
    held_changed.wait(lock, [&] { return launched->kernel->name != held_kernel; });
    --num_held;
  }
  std::string attributes;
  for (uint32_t i = 0; i < config->num_attributes; ++i) {
    const CUlaunchAttribute& attribute = config->attributes[i];
    const std::string value =
        attribute.id == kLaunchClusterDimension
            ? List(attribute.value.cluster_dimension, 3)
            : std::to_string(attribute.value.programmatic_stream_serialization_allowed);
    attributes += (i ? ", [" : "[") + std::to_string(attribute.id) + ", " + value + "]";
  }
  std::string values;
  const auto& sizes = launched->kernel->sizes;
  for (size_t i = 0; i < sizes.size(); ++i) {
    values += (i ? ", " : "") + Parameter(parameters[i], sizes[i]);
  }
  Entry entry;
  entry.Text("kernel", launched->kernel->name)
      .Raw("grid", List(config->grid, 3))
      .Raw("block", List(config->block, 3))
      .Number("smem", config->shared_memory_bytes)
      .Number("stream", reinterpret_cast<uint64_t>(config->stream))
      .Raw("launch_attrs", "[" + attributes + "]")
      .Raw("parameters", "[" + values + "]");
  if (const auto found = peeks.find(launched->kernel->name); found != peeks.end()) {
    const void* pointed = *static_cast<void**>(parameters[found->second.parameter]);
    entry.Text("peeked", Hex(pointed, found->second.size));
  }
  return Record("cuLaunchKernelEx", entry);
}

// Everything recorded since the last clear, a JSON object a line. The text lives until the next
// call.
const char* recording_log() {
  std::lock_guard lock(mutex);
  log_text.clear();
  for (const std::string& entry : log_entries) log_text += entry + "\n";
  return log_text.c_str();
}

void recording_clear() {
  std::lock_guard lock(mutex);
  log_entries.clear();
  failures.clear();
  peeks.clear();
}

// From now on `function` records its calls and returns `result`.
void recording_fail(const char* function, int result) {
  std::lock_guard lock(mutex);
  failures[function] = result;
}

// From now on launches of `kernel` do not return; those of the kernel before it do.
void recording_hold(const char* kernel) {
  std::lock_guard lock(mutex);
  held_kernel = kernel;
  held_changed.notify_all();
}

// Returns when a launch is being held.
void recording_wait_for_held() {
  std::unique_lock lock(mutex);
  held_changed.wait(lock, [] { return num_held > 0; });
}

// From now on launches of `kernel` record `size` bytes of (host) memory that a parameter points to.
void recording_peek(const char* kernel, size_t parameter, size_t size) {
  std::lock_guard lock(mutex);
  peeks[kernel] = {parameter, size};
}
}
