// A launch plan as C++ sees it: what jax_megamoe/launch/launcher.py encodes into the custom call's
// attributes, decoded and checked. Addresses are still names here: an operand, a result or the
// symmetric buffer, and a byte offset.

#ifndef JAX_MEGAMOE_FFI_LAUNCH_PLAN_H_
#define JAX_MEGAMOE_FFI_LAUNCH_PLAN_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "ffi/error.h"

namespace jax_megamoe {

// Equals jax_megamoe.plan.launch.PLAN_VERSION.
inline constexpr int64_t kPlanVersion = 1;
// DeepGEMM's SymBuffer has room for this many peers.
inline constexpr int64_t kMaxNumRanks = 72;
// Parameter bytes that every CUDA device takes.
inline constexpr size_t kMaxParameterBytes = 4096;
inline constexpr size_t kMaxParameters = 128;
inline constexpr size_t kMaxFields = 32;
inline constexpr size_t kMaxTensorMapRank = 5;

struct Address {
  enum class Base { kNull, kOperand, kResult, kSymmetricBuffer };
  Base base = Base::kNull;
  size_t index = 0;     // of the operand or result
  uint64_t offset = 0;  // bytes
};

// Arguments of cuTensorMapEncodeTiled; element strides are all one.
struct TensorMap {
  Address base;
  int data_type = 0;
  uint32_t rank = 0;
  std::array<uint64_t, kMaxTensorMapRank> dims{};
  std::array<uint64_t, kMaxTensorMapRank> strides{};  // bytes; of all dimensions but the innermost
  std::array<uint32_t, kMaxTensorMapRank> box{};
  int interleave = 0;
  int swizzle = 0;
  int l2_promotion = 0;
  int oob_fill = 0;
};

struct SymmetricBufferArgument {};

// A field of a struct that a kernel takes by value.
struct Field {
  std::string name;
  std::variant<Address, bool, uint32_t, float> value;
  size_t offset = 0;  // in the struct
};

struct StructArgument {
  std::vector<Field> fields;
};

struct Argument {
  std::string name;
  std::variant<Address, bool, uint32_t, float, SymmetricBufferArgument, TensorMap, StructArgument>
      value;
  size_t size = 0;    // bytes
  size_t offset = 0;  // in the parameter block
};

struct KernelLaunch {
  size_t kernel = 0;  // index into LaunchPlan::kernels
  std::array<uint32_t, 3> grid{};
  std::array<uint32_t, 3> block{};
  std::array<uint32_t, 3> cluster{};
  uint32_t shared_memory_bytes = 0;
  bool programmatic_serialization = false;
  std::vector<Argument> arguments;
};

// Zeroes bytes in stream order.
struct Fill {
  Address address;
  uint64_t num_bytes = 0;
};

// A kernel by its specification (JSON), which is also what a provider of machine code is given:
// nothing else identifies it. The symbol is for messages.
struct Kernel {
  std::string symbol;
  std::string spec;
};

struct LaunchPlan {
  uint32_t num_ranks = 0;
  size_t num_operands = 0;
  size_t num_results = 0;
  std::string buffer_key;  // empty: the plan touches no symmetric buffer
  uint64_t buffer_bytes = 0;
  std::vector<Kernel> kernels;
  std::vector<std::variant<KernelLaunch, Fill>> steps;

  bool uses_symmetric_buffer() const { return !buffer_key.empty(); }
};

// Decodes and checks the attributes. Throws LaunchError naming the attribute, what was expected and
// what was got.
LaunchPlan DecodeLaunchPlan(const ffi::Dictionary& attributes);

// Device addresses and byte sizes of a call's operands and results.
struct CallBuffers {
  struct Array {
    void* data;
    size_t num_bytes;
  };
  std::vector<Array> operands;
  std::vector<Array> results;
};

// What a step touches: `extent` bytes of an address of the plan.
struct Access {
  const Address* address;
  uint64_t extent;
  size_t step;
  const Argument* argument;      // null for a fill
  const Field* field = nullptr;  // of a struct
};

// Everything that the plan, which must outlive the list, touches.
std::vector<Access> ListAccesses(const LaunchPlan& plan);

// Checks a call's arrays: as many as the plan has, and around every access. Each launch does it, so
// it allocates nothing unless it throws LaunchError.
void CheckBounds(const LaunchPlan& plan, const std::vector<Access>& accesses,
                 const CallBuffers& buffers);

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_LAUNCH_PLAN_H_
