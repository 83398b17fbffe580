// Comparison and selection (PTX ISA 9.7.6 and 9.7.7).
#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

// The order is that of COMPARISONS in ptx/encoding.py.
enum Comparison {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kLo,
  kLs,
  kHi,
  kHs,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kIsNan
};

bool CompareFloats(int comparison, double a, double b) {
  const bool unordered = std::isnan(a) || std::isnan(b);
  switch (comparison) {
    case kEq:
      return a == b;
    case kNe:
      return !unordered && a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kEqu:
      return unordered || a == b;
    case kNeu:
      return unordered || a != b;
    case kLtu:
      return unordered || a < b;
    case kLeu:
      return unordered || a <= b;
    case kGtu:
      return unordered || a > b;
    case kGeu:
      return unordered || a >= b;
    case kNum:
      return !unordered;
    case kIsNan:
      return unordered;
    default:
      Fail("comparison %d of floats", comparison);
  }
}

template <typename T>
bool CompareOrdered(int comparison, T a, T b) {
  switch (comparison) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    default:
      Fail("comparison %d of integers", comparison);
  }
}

bool CompareIntegers(int comparison, uint64_t a, uint64_t b, Type type) {
  const int64_t x = Extend(a, type), y = Extend(b, type);
  if (IsSigned(type) && comparison < kLo) return CompareOrdered(comparison, x, y);
  static constexpr int kUnsigned[] = {kLt, kLe, kGt, kGe};  // of lo, ls, hi, hs
  if (comparison >= kLo && comparison <= kHs) comparison = kUnsigned[comparison - kLo];
  return CompareOrdered(comparison, static_cast<uint64_t>(x), static_cast<uint64_t>(y));
}

bool Compare(const Instruction& inst, uint64_t a, uint64_t b) {
  switch (inst.type) {
    case Type::kF32: {
      float x = ToFloat(a), y = ToFloat(b);
      if (inst.flags & kFtz) {
        x = FlushSubnormal(x);
        y = FlushSubnormal(y);
      }
      return CompareFloats(inst.mode, x, y);
    }
    case Type::kF64:
    case Type::kF16:
    case Type::kBf16:
      return CompareFloats(inst.mode, ReadFloat(a, inst.type), ReadFloat(b, inst.type));
    case Type::kF16x2:
    case Type::kBf16x2:
    case Type::kF32x2:
      Fail("comparison of packed floats");
    default:
      return CompareIntegers(inst.mode, a, b, inst.type);
  }
}

bool Combine(int boolean, bool a, bool b) {
  return boolean == 1 ? a && b : boolean == 2 ? a || b : a != b;
}

void Setp(const Step& s) {
  const Instruction& inst = s.inst;
  const uint64_t *a = s.Src(0), *b = s.Src(1);
  const uint64_t* c = inst.mode2 ? s.Src(2) : nullptr;
  uint64_t* p = s.Dst(0);
  uint64_t* q = inst.num_dst > 1 ? s.Dst(1) : nullptr;
  ForEachLane(s.lanes, [&](int l) {
    const bool holds = Compare(inst, a[l], b[l]);
    const bool with = c && (c[l] & 1);
    const bool first = c ? Combine(inst.mode2, holds, with) : holds;
    const bool second = c ? Combine(inst.mode2, !holds, with) : !holds;
    p[l] = first;
    if (q) q[l] = second;
  });
}

}  // namespace

Outcome ExecuteCompare(Step& s) {
  const Instruction& inst = s.inst;
  if (inst.op == Op::kSetp) {
    Setp(s);
    return Outcome::kNext;
  }
  uint64_t* d = s.Dst();
  const uint64_t *a = s.Src(0), *b = s.Src(1);
  if (inst.op == Op::kSelp) {
    const uint64_t* c = s.Src(2);
    const int bits = Bits(inst.type);
    ForEachLane(s.lanes, [&](int l) { d[l] = Mask(c[l] & 1 ? a[l] : b[l], bits); });
    return Outcome::kNext;
  }
  // kSet: all ones or 1.0; type2 is the result's
  const uint64_t yes = inst.type2 == Type::kF32 ? ToBits(1.0f) : Mask(~0ull, Bits(inst.type2));
  ForEachLane(s.lanes, [&](int l) { d[l] = Compare(inst, a[l], b[l]) ? yes : 0; });
  return Outcome::kNext;
}

}  // namespace emulator
