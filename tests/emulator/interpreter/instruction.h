// Instructions as the parser hands them over. The lists repeat those of ../ptx/encoding.py.
#pragma once

#include <cstdint>
#include <vector>

namespace emulator {

enum class Op : int32_t {
#define OP(name, class, kind) k##name,
#include "opcodes.def"
#undef OP
  kCount
};

enum class Type : int32_t {
  kB8,
  kB16,
  kB32,
  kB64,
  kU8,
  kU16,
  kU32,
  kU64,
  kS8,
  kS16,
  kS32,
  kS64,
  kF16,
  kBf16,
  kF32,
  kF64,
  kPred,
  kF32x2,
  kF16x2,
  kBf16x2,
  kB128,
  kE4m3x2,
  kE5m2x2,
  kE2m1x2,
  kUe8m0x2,
  kE2m3x2,
  kE3m2x2,
  kTf32,
  kU16x2,
  kS16x2,
  kE4m3,
  kE5m2,
  kE2m1
};  // clang-format off
inline constexpr int kTypeBits[] = {8,  16, 32, 64, 8,   16, 32, 64, 8,  16, 32, 64, 16, 16, 32, 64, 1,
                                    64, 32, 32, 128, 16, 16, 8,  16, 16, 16, 32, 32, 32, 8,  8,  4};
// clang-format on

constexpr int Bits(Type type) { return kTypeBits[static_cast<int>(type)]; }
constexpr bool IsSigned(Type type) { return type >= Type::kS8 && type <= Type::kS64; }

enum Space { kGeneric, kGlobal, kShared, kClusterShared, kLocal, kParameter };
enum Rounding { kRn, kRz, kRm, kRp, kRni, kRzi, kRmi, kRpi, kRna };
enum Flags { kFtz = 1, kNan = 2, kSat = 4, kSatfinite = 8, kRelu = 16, kAbs = 32, kNoftz = 64 };
enum class AtomicOp { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };

// `dst` and `src` are offsets into the kernel's pool: registers from 0, constants from -1 down.
struct Instruction {
  Op op;
  Type type, type2;
  int32_t mode, mode2, flags;
  int32_t predicate;  // a register, or -1
  int32_t negated;
  int32_t num_dst, num_src, dst, src;
  int64_t immediate;
  int32_t target, line;
};
static_assert(sizeof(Instruction) == 64, "the layout is that of ptx/encoding.py");

struct Kernel {
  const Instruction* code;
  const int32_t* pool;
  int num_registers;
  int local_bytes;
  int dynamic_at;                   // where dynamic shared memory starts, behind the static part
  uint64_t globals_base;            // of the module's variables
  std::vector<uint64_t> constants;  // each one repeated for the 32 lanes
};

const char* Name(Op op);

}  // namespace emulator
