#include "ffi/launch.h"

#include <cstring>
#include <utility>

#include "ffi/error.h"
#include "ffi/kernel_module.h"
#include "ffi/tensor_map.h"

namespace jax_megamoe {
namespace {

// What addresses stand for in one call.
struct Bases {
  const CallBuffers& buffers;
  const SymmetricBuffer* symmetric_buffer;

  uint64_t Resolve(const Address& address) const {
    switch (address.base) {
      case Address::Base::kNull:
        return 0;
      case Address::Base::kOperand:
        return reinterpret_cast<uint64_t>(buffers.operands[address.index].data) + address.offset;
      case Address::Base::kResult:
        return reinterpret_cast<uint64_t>(buffers.results[address.index].data) + address.offset;
      case Address::Base::kSymmetricBuffer:
        return static_cast<uint64_t>(symmetric_buffer->argument.base) + address.offset;
    }
    return 0;
  }
};

// Kernel parameters as the driver takes them: one pointer each, into one block.
class Parameters {
 public:
  Parameters(const Driver& driver, const std::vector<Argument>& arguments, const Bases& bases) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const Argument& argument = arguments[i];
      std::byte* at = block_ + argument.offset;
      pointers_[i] = at;
      if (const auto* map = std::get_if<TensorMap>(&argument.value)) {
        EncodeTensorMap(driver, *map, argument.name.c_str(), bases.Resolve(map->base),
                        reinterpret_cast<CUtensorMap*>(at));
      } else if (const auto* structure = std::get_if<StructArgument>(&argument.value)) {
        std::memset(at, 0, argument.size);  // also between the fields
        for (const Field& field : structure->fields) {
          StoreScalar(at + field.offset, field.value, bases);
        }
      } else if (std::holds_alternative<SymmetricBufferArgument>(argument.value)) {
        Store(at, bases.symmetric_buffer->argument);
      } else {
        StoreScalar(at, argument.value, bases);
      }
    }
  }

  void** pointers() { return pointers_; }

 private:
  template <typename T>
  static void Store(std::byte* at, const T& value) {
    std::memcpy(at, &value, sizeof value);
  }

  // An address or a number, of an argument or a field.
  template <typename Value>
  static void StoreScalar(std::byte* at, const Value& value, const Bases& bases) {
    if (const auto* address = std::get_if<Address>(&value)) {
      Store(at, bases.Resolve(*address));
    } else if (const auto* flag = std::get_if<bool>(&value)) {
      Store(at, *flag);
    } else if (const auto* integer = std::get_if<uint32_t>(&value)) {
      Store(at, *integer);
    } else {
      Store(at, std::get<float>(value));
    }
  }

  // 128 is the alignment of a tensor map as a parameter. A local block is enough, because the
  // driver copies it before cuLaunchKernelEx returns.
  alignas(128) std::byte block_[kMaxParameterBytes];
  void* pointers_[kMaxParameters];
};

void LaunchKernel(const Driver& driver, const KernelLaunch& launch, const std::string& symbol,
                  CUfunction function, CUstream stream, const Bases& bases) {
  Parameters parameters(driver, launch.arguments, bases);
  CUlaunchAttribute attributes[2] = {};
  CUlaunchConfig config = {};
  for (size_t i = 0; i < 3; ++i) {
    config.grid[i] = launch.grid[i];
    config.block[i] = launch.block[i];
  }
  config.shared_memory_bytes = launch.shared_memory_bytes;
  config.stream = stream;
  config.attributes = attributes;
  if (launch.cluster != std::array<uint32_t, 3>{1, 1, 1}) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchClusterDimension;
    for (size_t i = 0; i < 3; ++i) attribute.value.cluster_dimension[i] = launch.cluster[i];
  }
  if (launch.programmatic_serialization) {
    CUlaunchAttribute& attribute = attributes[config.num_attributes++];
    attribute.id = kLaunchProgrammaticStreamSerialization;
    attribute.value.programmatic_stream_serialization_allowed = 1;
  }
  const CUresult result =
      driver.cuLaunchKernelEx(&config, function, parameters.pointers(), nullptr);
  if (result != kCudaSuccess) driver.Check(result, "launch of " + symbol);
}

}  // namespace

Program::Program(LaunchPlan plan, bool captured)
    : plan_(std::move(plan)), accesses_(ListAccesses(plan_)), captured_(captured) {
  for (const Kernel& kernel : plan_.kernels) cubins_.push_back(Cubins::Get().Find(kernel));
}

Program::~Program() {
  for (const int ordinal : pinned_) SymmetricBuffers::Get().Unpin(plan_.buffer_key, ordinal);
}

std::shared_ptr<const SymmetricBuffer> Program::FindSymmetricBuffer(int ordinal) const {
  auto buffer = SymmetricBuffers::Get().Find(plan_.buffer_key, ordinal);
  const auto name = [&] { return "symmetric buffer \"" + plan_.buffer_key + "\""; };
  if (buffer->num_bytes < plan_.buffer_bytes) {
    Reject(name(), "at least " + std::to_string(plan_.buffer_bytes) + " bytes",
           std::to_string(buffer->num_bytes), "allocate it for this configuration");
  }
  if (buffer->num_ranks != plan_.num_ranks) {
    Reject(name(), std::to_string(plan_.num_ranks) + " ranks", std::to_string(buffer->num_ranks));
  }
  return buffer;
}

Program::Device Program::LoadOn(int ordinal) const {
  const Driver& driver = Driver::Get();
  Device device{driver.PrimaryContext(ordinal), {}};
  CurrentContext current(driver, device.context);
  for (const auto& step : plan_.steps) {
    const auto* launch = std::get_if<KernelLaunch>(&step);
    device.functions.push_back(launch == nullptr
                                   ? nullptr
                                   : KernelModules::Get().Load(driver, ordinal,
                                                               plan_.kernels[launch->kernel],
                                                               *cubins_[launch->kernel], *launch));
  }
  return device;
}

const Program::Device& Program::Prepared(int ordinal) {
  std::lock_guard lock(mutex_);
  if (const auto found = devices_.find(ordinal); found != devices_.end()) return found->second;
  // All devices of this process at once: when one has launched, its kernel spins for the others.
  std::set<int> ordinals = {ordinal};
  if (plan_.uses_symmetric_buffer()) {
    FindSymmetricBuffer(ordinal);
    // Without `ordinal`, if the buffer is unregistered between these two lines.
    for (const int each : SymmetricBuffers::Get().Ordinals(plan_.buffer_key)) ordinals.insert(each);
  }
  for (const int each : ordinals) {
    if (!devices_.contains(each)) devices_.emplace(each, LoadOn(each));
  }
  // Entries of a map stay where they are, so the reference outlives the lock.
  return devices_.at(ordinal);
}

void Program::Prepare(int ordinal, const CallBuffers& buffers) {
  CheckBounds(plan_, accesses_, buffers);
  Prepared(ordinal);
  if (!plan_.uses_symmetric_buffer()) return;
  FindSymmetricBuffer(ordinal);
  std::lock_guard lock(mutex_);
  // A CUDA graph keeps the address and replays it without calling this code again.
  if (captured_ && !pinned_.contains(ordinal)) {
    SymmetricBuffers::Get().Pin(plan_.buffer_key, ordinal);
    pinned_.insert(ordinal);
  }
}

void Program::Launch(int ordinal, CUstream stream, const CallBuffers& buffers) {
  CheckBounds(plan_, accesses_, buffers);
  const Device& device = Prepared(ordinal);
  // Held until all steps are enqueued: who unregisters the buffer waits for that.
  const auto symmetric_buffer =
      plan_.uses_symmetric_buffer() ? FindSymmetricBuffer(ordinal) : nullptr;
  const Driver& driver = Driver::Get();
  CurrentContext current(driver, device.context);
  const Bases bases{buffers, symmetric_buffer.get()};
  for (size_t i = 0; i < plan_.steps.size(); ++i) {
    if (const auto* fill = std::get_if<Fill>(&plan_.steps[i])) {
      driver.Check(driver.cuMemsetD8Async(bases.Resolve(fill->address), 0, fill->num_bytes, stream),
                   "cuMemsetD8Async");
      continue;
    }
    const auto& launch = std::get<KernelLaunch>(plan_.steps[i]);
    LaunchKernel(driver, launch, plan_.kernels[launch.kernel].symbol, device.functions[i], stream,
                 bases);
  }
}

}  // namespace jax_megamoe
