#include "ffi/launch_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "ffi/tensor_map.h"

namespace jax_megamoe {
namespace {

constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kUint32Max = std::numeric_limits<uint32_t>::max();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxSteps = 64;

std::string Range(int64_t minimum, int64_t maximum) {
  return "an integer in [" + std::to_string(minimum) + ", " + std::to_string(maximum) + "]";
}

// Attributes are flat, their names paths: "steps.0.arguments.3.dims". A list "a" of n entries is
// the integer attribute "a" = n and attributes "a.0..." to "a.<n-1>...". A reader looks at one
// path.
class Reader {
 public:
  explicit Reader(const ffi::Dictionary& attributes, std::string path = "")
      : attributes_(attributes), path_(std::move(path)) {}

  std::string Path(std::string_view name) const {
    return path_.empty() ? std::string(name) : path_ + "." + std::string(name);
  }

  int64_t Int(std::string_view name, int64_t minimum, int64_t maximum) const {
    const int64_t value = Get<int64_t>(name, "an int64");
    if (value < minimum || value > maximum) {
      Reject(Path(name), Range(minimum, maximum), std::to_string(value));
    }
    return value;
  }

  float Float(std::string_view name) const {
    const double value = Get<double>(name, "a float64");
    if (std::isfinite(value) && std::abs(value) > std::numeric_limits<float>::max()) {
      char digits[32];
      std::snprintf(digits, sizeof digits, "%g", value);
      Reject(Path(name), "a number that a float32 can hold", digits);
    }
    return static_cast<float>(value);
  }

  bool Bool(std::string_view name) const { return Get<bool>(name, "a bool"); }

  std::string String(std::string_view name) const {
    const std::string text(Get<std::string_view>(name, "a string"));
    if (!IsUtf8(text)) Reject(Path(name), "UTF-8", text);
    return text;
  }

  template <typename T, size_t n>
  void Ints(std::string_view name, size_t count, int64_t minimum, int64_t maximum,
            std::array<T, n>* values) const {
    const auto span = Get<ffi::Span<const int64_t>>(name, "an array of int64");
    if (span.size() != count) {
      Reject(Path(name), "an array of " + std::to_string(count) + " int64",
             std::to_string(span.size()));
    }
    for (size_t i = 0; i < count; ++i) {
      if (span[i] < minimum || span[i] > maximum) {
        Reject(Path(name) + "[" + std::to_string(i) + "]", Range(minimum, maximum),
               std::to_string(span[i]));
      }
      (*values)[i] = static_cast<T>(span[i]);
    }
  }

  std::vector<Reader> List(std::string_view name, int64_t minimum, int64_t maximum) const {
    const int64_t count = Int(name, minimum, maximum);
    std::vector<Reader> entries;
    for (int64_t i = 0; i < count; ++i) {
      entries.emplace_back(attributes_, Path(name) + "." + std::to_string(i));
    }
    return entries;
  }

 private:
  template <typename T>
  T Get(std::string_view name, std::string_view type) const {
    const std::string path = Path(name);
    if (!attributes_.contains(path)) Reject(path, type, "no such attribute");
    ffi::ErrorOr<T> value = attributes_.get<T>(path);
    if (!value.has_value()) {
      Reject(path, type, "an attribute of another type");
    }
    return *value;
  }

  const ffi::Dictionary& attributes_;
  std::string path_;
};

Address DecodeAddress(const Reader& reader, const LaunchPlan& plan) {
  const std::string base = reader.String("base");
  if (base == "null") return {};
  Address address;
  if (base == "operand") {
    address.base = Address::Base::kOperand;
  } else if (base == "result") {
    address.base = Address::Base::kResult;
  } else if (base == "symmetric_buffer") {
    address.base = Address::Base::kSymmetricBuffer;
  } else {
    Reject(reader.Path("base"), "null, operand, result or symmetric_buffer", base);
  }
  if (address.base == Address::Base::kSymmetricBuffer) {
    if (!plan.uses_symmetric_buffer()) {
      Reject(reader.Path("base"), "no symmetric_buffer in a plan without buffer_key", base);
    }
  } else {
    const bool operand = address.base == Address::Base::kOperand;
    const size_t count = operand ? plan.num_operands : plan.num_results;
    const int64_t index = reader.Int("index", 0, kInt32Max);
    if (static_cast<size_t>(index) >= count) {
      Reject(reader.Path("index"), "an index of " + std::to_string(count) + " " + base + "s",
             std::to_string(index));
    }
    address.index = index;
  }
  address.offset = reader.Int("offset", 0, kInt64Max);
  return address;
}

TensorMap DecodeTensorMap(const Reader& reader, const LaunchPlan& plan) {
  TensorMap map;
  map.base = DecodeAddress(reader, plan);
  if (map.base.base == Address::Base::kNull) Reject(reader.Path("base"), "an array", "null");
  map.rank = reader.Int("rank", 1, kMaxTensorMapRank);
  map.data_type = reader.Int("dtype", 0, 15);
  // The limits of cuTensorMapEncodeTiled.
  reader.Ints("dims", map.rank, 1, int64_t{1} << 32, &map.dims);
  reader.Ints("strides", map.rank - 1, 0, (int64_t{1} << 40) - 1, &map.strides);
  reader.Ints("box", map.rank, 1, 256, &map.box);
  map.interleave = reader.Int("interleave", 0, 2);
  map.swizzle = reader.Int("swizzle", 0, 6);
  map.l2_promotion = reader.Int("l2_promotion", 0, 3);
  map.oob_fill = reader.Int("oob_fill", 0, 1);
  return map;
}

// Sizes and alignments are those of the C++ types that the kernels declare.
struct Layout {
  size_t size;
  size_t alignment;
};

size_t Aligned(size_t offset, size_t alignment) {
  return (offset + alignment - 1) / alignment * alignment;
}

// What may be an argument or a field of one; nothing, for other kinds.
template <typename Value>
std::optional<Layout> DecodeScalar(const Reader& reader, const LaunchPlan& plan,
                                   const std::string& kind, Value* value) {
  if (kind == "pointer") {
    *value = DecodeAddress(reader, plan);
    return Layout{8, 8};
  }
  if (kind == "bool") {
    *value = reader.Bool("value");
    return Layout{1, 1};
  }
  if (kind == "uint32") {
    *value = static_cast<uint32_t>(reader.Int("value", 0, kUint32Max));
    return Layout{4, 4};
  }
  if (kind == "float32") {
    *value = reader.Float("value");
    return Layout{4, 4};
  }
  return std::nullopt;
}

// Fields lie as in a C++ struct of these types.
Layout DecodeStruct(const Reader& reader, const LaunchPlan& plan, StructArgument* argument) {
  Layout whole{0, 1};
  for (const Reader& entry : reader.List("fields", 1, kMaxFields)) {
    Field& field = argument->fields.emplace_back();
    field.name = entry.String("name");
    const std::string kind = entry.String("kind");
    const std::optional<Layout> layout = DecodeScalar(entry, plan, kind, &field.value);
    if (!layout) Reject(entry.Path("kind"), "pointer, bool, uint32 or float32", kind);
    field.offset = Aligned(whole.size, layout->alignment);
    whole = {field.offset + layout->size, std::max(whole.alignment, layout->alignment)};
  }
  return {Aligned(whole.size, whole.alignment), whole.alignment};
}

Layout DecodeValue(const Reader& reader, const LaunchPlan& plan, Argument* argument) {
  const std::string kind = reader.String("kind");
  if (const auto layout = DecodeScalar(reader, plan, kind, &argument->value)) return *layout;
  if (kind == "tensor_map") {
    argument->value = DecodeTensorMap(reader, plan);
    return {128, 128};
  }
  if (kind == "struct") {
    return DecodeStruct(reader, plan, &argument->value.emplace<StructArgument>());
  }
  if (kind != "symmetric_buffer") {
    Reject(reader.Path("kind"),
           "pointer, bool, uint32, float32, symmetric_buffer, tensor_map or struct", kind);
  }
  if (!plan.uses_symmetric_buffer()) {
    Reject(reader.Path("kind"), "no symmetric_buffer in a plan without buffer_key", kind);
  }
  argument->value = SymmetricBufferArgument{};
  return {8 * (1 + kMaxNumRanks + 1), 8};
}

std::vector<Argument> DecodeArguments(const Reader& reader, const LaunchPlan& plan) {
  std::vector<Argument> arguments;
  size_t end = 0;
  for (const Reader& entry : reader.List("arguments", 0, kMaxParameters)) {
    Argument& argument = arguments.emplace_back();
    argument.name = entry.String("name");
    const Layout layout = DecodeValue(entry, plan, &argument);
    argument.size = layout.size;
    argument.offset = Aligned(end, layout.alignment);
    end = argument.offset + argument.size;
  }
  if (end > kMaxParameterBytes) {
    Reject(reader.Path("arguments"),
           "at most " + std::to_string(kMaxParameterBytes) + " bytes of parameters",
           std::to_string(end));
  }
  return arguments;
}

KernelLaunch DecodeKernelLaunch(const Reader& reader, const LaunchPlan& plan) {
  KernelLaunch launch;
  launch.kernel = reader.Int("kernel", 0, static_cast<int64_t>(plan.kernels.size()) - 1);
  reader.Ints("grid", 3, 1, kInt32Max, &launch.grid);
  reader.Ints("block", 3, 1, 1024, &launch.block);
  reader.Ints("cluster", 3, 1, 16, &launch.cluster);
  for (size_t i = 0; i < 3; ++i) {
    if (launch.grid[i] % launch.cluster[i] != 0) {
      Reject(reader.Path("grid") + "[" + std::to_string(i) + "]",
             "a multiple of the cluster's " + std::to_string(launch.cluster[i]),
             std::to_string(launch.grid[i]));
    }
  }
  launch.shared_memory_bytes = reader.Int("smem", 0, kInt32Max);
  launch.programmatic_serialization = reader.Bool("programmatic_serialization");
  launch.arguments = DecodeArguments(reader, plan);
  return launch;
}

void CheckAccess(const Access& access, const char* kind, size_t index, uint64_t num_bytes) {
  const uint64_t offset = access.address->offset;
  if (offset <= num_bytes && access.extent <= num_bytes - offset) return;
  std::string name = "steps." + std::to_string(access.step);
  if (access.argument != nullptr) name += " argument " + access.argument->name;
  if (access.field != nullptr) name += " field " + access.field->name;
  const bool symmetric = access.address->base == Address::Base::kSymmetricBuffer;
  const std::string array = symmetric ? kind : std::string(kind) + " " + std::to_string(index);
  Reject(name, "offset and extent inside the " + std::to_string(num_bytes) + " bytes of " + array,
         "offset " + std::to_string(offset) + " and extent " + std::to_string(access.extent));
}

void CheckArray(const Access& access, const char* kind,
                const std::vector<CallBuffers::Array>& arrays) {
  const size_t index = access.address->index;
  const CallBuffers::Array& array = arrays[index];
  if (array.data == nullptr && array.num_bytes > 0) {
    Reject(kind + (" " + std::to_string(index)), "an address", "null");
  }
  CheckAccess(access, kind, index, array.num_bytes);
}

void CheckCount(const char* what, size_t expected, size_t got) {
  if (expected != got) Reject(what, std::to_string(expected), std::to_string(got));
}

}  // namespace

LaunchPlan DecodeLaunchPlan(const ffi::Dictionary& attributes) {
  const Reader reader(attributes);
  const int64_t version = reader.Int("plan_version", 0, kInt64Max);
  if (version != kPlanVersion) {
    Reject("plan_version", std::to_string(kPlanVersion), std::to_string(version),
           "the Python and C++ halves of jax_megamoe differ, or a cached executable is older than "
           "this version: reinstall jax-megamoe, or clear JAX's compilation cache");
  }
  LaunchPlan plan;
  plan.num_ranks = reader.Int("num_ranks", 1, kMaxNumRanks);
  plan.num_operands = reader.Int("num_operands", 0, kInt32Max);
  plan.num_results = reader.Int("num_results", 0, kInt32Max);
  plan.buffer_key = reader.String("buffer_key");
  plan.buffer_bytes = reader.Int("buffer_bytes", 0, kInt64Max);
  for (const Reader& entry : reader.List("kernels", 0, kMaxSteps)) {
    plan.kernels.push_back({entry.String("symbol"), entry.String("spec")});
  }
  for (const Reader& entry : reader.List("steps", 1, kMaxSteps)) {
    const std::string kind = entry.String("kind");
    if (kind == "launch") {
      plan.steps.emplace_back(DecodeKernelLaunch(entry, plan));
    } else if (kind == "fill") {
      const Address address = DecodeAddress(entry, plan);
      if (address.base == Address::Base::kNull) Reject(entry.Path("base"), "an array", "null");
      plan.steps.emplace_back(
          Fill{address, static_cast<uint64_t>(entry.Int("num_bytes", 1, kInt64Max))});
    } else {
      Reject(entry.Path("kind"), "launch or fill", kind);
    }
  }
  for (const Access& access : ListAccesses(plan)) {
    if (access.address->base == Address::Base::kSymmetricBuffer) {
      CheckAccess(access, "the symmetric buffer", 0, plan.buffer_bytes);
    }
  }
  return plan;
}

std::vector<Access> ListAccesses(const LaunchPlan& plan) {
  std::vector<Access> accesses;
  for (size_t i = 0; i < plan.steps.size(); ++i) {
    if (const auto* fill = std::get_if<Fill>(&plan.steps[i])) {
      accesses.push_back({&fill->address, fill->num_bytes, i, nullptr});
      continue;
    }
    for (const Argument& argument : std::get<KernelLaunch>(plan.steps[i]).arguments) {
      if (const auto* map = std::get_if<TensorMap>(&argument.value)) {
        accesses.push_back({&map->base, ExtentBytes(*map), i, &argument});
      } else if (const auto* pointer = std::get_if<Address>(&argument.value)) {
        accesses.push_back({pointer, 0, i, &argument});
      } else if (const auto* structure = std::get_if<StructArgument>(&argument.value)) {
        for (const Field& field : structure->fields) {
          const auto* address = std::get_if<Address>(&field.value);
          if (address != nullptr) accesses.push_back({address, 0, i, &argument, &field});
        }
      }
    }
  }
  return accesses;
}

void CheckBounds(const LaunchPlan& plan, const std::vector<Access>& accesses,
                 const CallBuffers& buffers) {
  CheckCount("number of operands", plan.num_operands, buffers.operands.size());
  CheckCount("number of results", plan.num_results, buffers.results.size());
  for (const Access& access : accesses) {
    if (access.address->base == Address::Base::kOperand) {
      CheckArray(access, "operand", buffers.operands);
    } else if (access.address->base == Address::Base::kResult) {
      CheckArray(access, "result", buffers.results);
    }
  }
}

}  // namespace jax_megamoe
