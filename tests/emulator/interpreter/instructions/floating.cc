// Floating point (PTX ISA 9.7.3), half precision (9.7.4) and mixed precision (9.7.5).
#include <cfenv>

#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

float Apply(Op op, float a, float b, float c, bool propagate) {
  switch (op) {
    case Op::kFAdd:
      return a + b;
    case Op::kFSub:
      return a - b;
    case Op::kFMul:
      return a * b;
    case Op::kFFma:
      return std::fma(a, b, c);
    case Op::kFDiv:
      return a / b;
    case Op::kFMin:
      return MinMax(a, b, false, propagate);
    case Op::kFMax:
      return MinMax(a, b, true, propagate);
    default:
      Fail("%s of float32", Name(op));
  }
}

// The same in another rounding; volatile keeps the compiler from moving the operation.
float ApplyRounded(Op op, float a, float b, float c, int rounding) {
  static constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
  if (rounding > kRp || op == Op::kFMin || op == Op::kFMax) Fail("rounding of %s", Name(op));
  std::fesetround(kModes[rounding]);
  volatile float x = a, y = b, z = c;
  volatile float result = Apply(op, x, y, z, false);
  std::fesetround(FE_TONEAREST);
  return result;
}

// One float32 operation with its flags. NaN has one bit pattern; abs and neg only change the sign.
uint32_t Single(const Instruction& inst, float a, float b, float c) {
  const bool flush = inst.flags & kFtz;
  if (flush) {
    a = FlushSubnormal(a);
    b = FlushSubnormal(b);
    c = FlushSubnormal(c);
  }
  if (inst.op == Op::kFAbs) return ToBits(a) & 0x7fffffff;
  if (inst.op == Op::kFNeg) return ToBits(a) ^ 0x80000000;
  float result = inst.mode ? ApplyRounded(inst.op, a, b, c, inst.mode)
                           : Apply(inst.op, a, b, c, inst.flags & kNan);
  if (flush) result = FlushSubnormal(result);
  if (inst.flags & kSat) result = result > 0 ? std::min(result, 1.0f) : 0.0f;
  return std::isnan(result) ? kNanF32 : ToBits(result);
}

// A 16-bit operation: exact in float64, or rounded to odd there, then rounded once.
uint32_t Half(const Instruction& inst, uint32_t a, uint32_t b, uint32_t c, Type type) {
  if (inst.op == Op::kFAbs) return a & 0x7fff;
  if (inst.op == Op::kFNeg) return (a & 0xffff) ^ 0x8000;
  double x = ReadFloat(a, type), y = ReadFloat(b, type), z = ReadFloat(c, type), result = 0;
  if (inst.flags & kFtz) {
    x = FlushSubnormal(static_cast<float>(x));
    y = FlushSubnormal(static_cast<float>(y));
    z = FlushSubnormal(static_cast<float>(z));
  }
  switch (inst.op) {
    case Op::kFAdd:
      result = AddToOdd(x, y);
      break;
    case Op::kFSub:
      result = AddToOdd(x, -y);
      break;
    case Op::kFMul:
      result = x * y;
      break;
    case Op::kFFma:
      result = AddToOdd(x * y, z);
      break;
    case Op::kFMin:
    case Op::kFMax:
      result = MinMax(static_cast<float>(x), static_cast<float>(y), inst.op == Op::kFMax,
                      inst.flags & kNan);
      break;
    default:
      Fail("%s of 16-bit floats", Name(inst.op));
  }
  if (inst.flags & kSat) result = result > 0 ? std::min(result, 1.0) : 0.0;
  return static_cast<uint32_t>(WriteFloat(result, type, static_cast<Rounding>(inst.mode)));
}

uint64_t Double(const Instruction& inst, double a, double b, double c) {
  if (inst.mode) Fail("rounding of float64");
  double result = 0;
  switch (inst.op) {
    case Op::kFAbs:
      return ToBits(a) & ~(1ull << 63);
    case Op::kFNeg:
      return ToBits(a) ^ 1ull << 63;
    case Op::kFAdd:
      result = a + b;
      break;
    case Op::kFSub:
      result = a - b;
      break;
    case Op::kFMul:
      result = a * b;
      break;
    case Op::kFFma:
      result = std::fma(a, b, c);
      break;
    case Op::kFDiv:
      result = a / b;
      break;
    case Op::kFMin:
      result = std::fmin(a, b);
      break;
    case Op::kFMax:
      result = std::fmax(a, b);
      break;
    default:
      Fail("%s of float64", Name(inst.op));
  }
  return std::isnan(result) ? kNanF64 : ToBits(result);
}

// Approximations: computed in float64 and rounded once; the ISA states how far a GPU may be off.
float Function(Op op, double x) {
  switch (op) {
    case Op::kEx2:
      return static_cast<float>(std::exp2(x));
    case Op::kLg2:
      return static_cast<float>(std::log2(x));
    case Op::kRcp:
      return static_cast<float>(1 / x);
    case Op::kRsqrt:
      return static_cast<float>(1 / std::sqrt(x));
    case Op::kSqrt:
      return static_cast<float>(std::sqrt(x));
    case Op::kTanh:
      return static_cast<float>(std::tanh(x));
    case Op::kSin:
      return static_cast<float>(std::sin(x));
    default:
      return static_cast<float>(std::cos(x));
  }
}

void Functions(const Step& s) {
  const Instruction& inst = s.inst;
  uint64_t* d = s.Dst();
  const uint64_t* a = s.Src();
  if (inst.type != Type::kF32) Fail("%s of a type other than float32", Name(inst.op));
  ForEachLane(s.lanes, [&](int l) {
    float x = ToFloat(a[l]);
    if (inst.flags & kFtz) x = FlushSubnormal(x);
    float result = Function(inst.op, x);
    if (inst.flags & kFtz) result = FlushSubnormal(result);
    d[l] = std::isnan(result) ? kNanF32 : ToBits(result);
  });
}

// ``add.f32.bf16 d, a, c``: all sources but the last are narrow.
void Mixed(const Step& s) {
  const Instruction& inst = s.inst;
  uint64_t* d = s.Dst();
  const uint64_t *a = s.Src(0), *b = s.Src(1);
  const uint64_t* c = inst.num_src > 2 ? s.Src(2) : nullptr;
  const bool two = inst.op == Op::kFFma;
  ForEachLane(s.lanes, [&](int l) {
    const auto x = static_cast<float>(ReadFloat(a[l], inst.type2));
    const auto y = two ? static_cast<float>(ReadFloat(b[l], inst.type2)) : ToFloat(b[l]);
    d[l] = Single(inst, x, y, c ? ToFloat(c[l]) : 0);
  });
}

}  // namespace

Outcome ExecuteFloating(Step& s) {
  const Instruction& inst = s.inst;
  const int n = inst.num_src;
  uint64_t* d = s.Dst();
  const uint64_t* a = s.Src(0);
  const uint64_t* b = n > 1 ? s.Src(1) : nullptr;
  const uint64_t* c = n > 2 ? s.Src(2) : nullptr;
  const auto each = [&](auto&& value) { ForEachLane(s.lanes, [&](int l) { d[l] = value(l); }); };
  if (inst.op >= Op::kEx2 && inst.op <= Op::kCos) {
    Functions(s);
  } else if (inst.op == Op::kCopysign) {  // the sign of a, the magnitude of b
    if (inst.type != Type::kF32) Fail("copysign of a type other than float32");
    each([&](int l) { return (b[l] & 0x7fffffff) | (a[l] & 0x80000000); });
  } else if (inst.type != inst.type2) {
    Mixed(s);
  } else if (inst.type == Type::kF32) {
    each([&](int l) {
      return Single(inst, ToFloat(a[l]), b ? ToFloat(b[l]) : 0, c ? ToFloat(c[l]) : 0);
    });
  } else if (inst.type == Type::kF32x2) {
    each([&](int l) {
      uint64_t result = 0;
      for (int shift = 0; shift < 64; shift += 32) {
        const auto part = [&](const uint64_t* v) { return v ? ToFloat(v[l] >> shift) : 0.0f; };
        result |= uint64_t{Single(inst, part(a), part(b), part(c))} << shift;
      }
      return result;
    });
  } else if (inst.type == Type::kF64) {
    each([&](int l) {
      return Double(inst, ToDouble(a[l]), b ? ToDouble(b[l]) : 0, c ? ToDouble(c[l]) : 0);
    });
  } else {
    const bool pair = inst.type == Type::kBf16x2 || inst.type == Type::kF16x2;
    const bool brain = inst.type == Type::kBf16x2 || inst.type == Type::kBf16;
    const Type type = brain ? Type::kBf16 : Type::kF16;
    each([&](int l) {
      uint64_t result = 0;
      for (int shift = 0; shift < (pair ? 32 : 16); shift += 16) {
        const auto part = [&](const uint64_t* v) {
          return v ? static_cast<uint32_t>(v[l] >> shift) & 0xffff : 0;
        };
        result |= uint64_t{Half(inst, part(a), part(b), part(c), type)} << shift;
      }
      return result;
    });
  }
  return Outcome::kNext;
}

}  // namespace emulator
