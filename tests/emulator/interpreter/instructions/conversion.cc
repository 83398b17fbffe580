// Conversion of numbers (PTX ISA 9.7.9, cvt).
#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

bool IsFloat(Type type) {
  return type == Type::kF16 || type == Type::kBf16 || type == Type::kF32 || type == Type::kF64;
}

double RoundToInteger(double value, int rounding) {
  switch (rounding) {
    case kRni:
      return std::nearbyint(value);
    case kRzi:
      return std::trunc(value);
    case kRmi:
      return std::floor(value);
    case kRpi:
      return std::ceil(value);
    default:
      Fail("rounding %d to an integer", rounding);
  }
}

uint64_t FloatToFloat(const Instruction& inst, uint64_t bits) {
  double value = ReadFloat(bits, inst.type2);
  if ((inst.flags & kFtz) && inst.type2 == Type::kF32) {
    value = FlushSubnormal(static_cast<float>(value));
  }
  int rounding = inst.mode;
  if (rounding >= kRni && rounding <= kRpi) {  // to an integral number in a float
    value = RoundToInteger(value, rounding);
    rounding = kRn;
  }
  if (inst.flags & kRelu) value = value > 0 || std::isnan(value) ? value : 0;
  if (inst.flags & kSat) value = value > 0 ? std::min(value, 1.0) : 0;
  if (inst.flags & kSatfinite) Fail("cvt.satfinite to this type");
  uint64_t result = WriteFloat(value, inst.type, static_cast<Rounding>(rounding));
  if ((inst.flags & kFtz) && inst.type == Type::kF32) {
    result = ToBits(FlushSubnormal(ToFloat(result)));
  }
  return result;
}

uint64_t IntegerToFloat(const Instruction& inst, uint64_t bits) {
  const int64_t value = Extend(bits, inst.type2);
  const bool is_signed = IsSigned(inst.type2);
  // long double holds 64 bits exactly; a double does for all but the 64-bit types.
  const auto wide = is_signed ? static_cast<long double>(value)
                              : static_cast<long double>(static_cast<uint64_t>(value));
  const auto exact = static_cast<double>(wide);
  if (static_cast<long double>(exact) == wide) {
    return WriteFloat(exact, inst.type, static_cast<Rounding>(inst.mode));
  }
  if (inst.mode != kRn) Fail("cvt of a large 64-bit integer with this rounding");
  if (inst.type == Type::kF64) return ToBits(exact);
  if (inst.type == Type::kF32) return ToBits(static_cast<float>(wide));
  return WriteFloat(exact, inst.type);
}

uint64_t FloatToInteger(const Instruction& inst, uint64_t source) {
  double value = ReadFloat(source, inst.type2);
  if (inst.flags & kFtz) value = FlushSubnormal(static_cast<float>(value));
  if (std::isnan(value)) {  // cvt: NaN becomes 0, or the largest for 64 bits
    return Bits(inst.type) == 64 ? 1ull << 63 : 0;
  }
  value = RoundToInteger(value, inst.mode);
  const int bits = Bits(inst.type);
  const bool is_signed = IsSigned(inst.type);
  const double high = std::ldexp(1.0, is_signed ? bits - 1 : bits), low = is_signed ? -high : 0;
  if (value < low) return is_signed ? Mask(1ull << (bits - 1), bits) : 0;
  if (value >= high) return Mask(~0ull, is_signed ? bits - 1 : bits);
  return Mask(
      is_signed ? static_cast<uint64_t>(static_cast<int64_t>(value)) : static_cast<uint64_t>(value),
      bits);
}

uint64_t IntegerToInteger(const Instruction& inst, uint64_t source) {
  const int64_t value = Extend(source, inst.type2);
  const int bits = Bits(inst.type);
  if (!(inst.flags & kSat)) return Mask(static_cast<uint64_t>(value), bits);
  __extension__ using Wide = __int128;
  const Wide wide = IsSigned(inst.type2) ? Wide{value} : Wide{static_cast<uint64_t>(value)};
  const bool is_signed = IsSigned(inst.type);
  const Wide high = (Wide{1} << (is_signed ? bits - 1 : bits)) - 1, low = is_signed ? -high - 1 : 0;
  return Mask(static_cast<uint64_t>(wide < low ? low : wide > high ? high : wide), bits);
}

uint64_t Convert(const Instruction& inst, uint64_t bits) {
  // It would be extended to the register, whose width is not known here.
  if (inst.type == Type::kS8) Fail("cvt to s8");
  if (IsFloat(inst.type)) {
    return IsFloat(inst.type2) ? FloatToFloat(inst, bits) : IntegerToFloat(inst, bits);
  }
  return IsFloat(inst.type2) ? FloatToInteger(inst, bits) : IntegerToInteger(inst, bits);
}

// Two floats into a packed type; `high` is the first source.
uint64_t Pack(const Instruction& inst, float high, float low) {
  const auto rounding = static_cast<Rounding>(inst.mode);
  const bool saturate = inst.flags & kSatfinite;
  if (inst.flags & kRelu) {
    high = high > 0 || std::isnan(high) ? high : 0;
    low = low > 0 || std::isnan(low) ? low : 0;
  }
  const auto pair = [&](auto&& encode, int bits) {
    return uint64_t{encode(high)} << bits | encode(low);
  };
  const auto small = [&](const FloatFormat& format, int bits) {
    if (!saturate || rounding != kRn) Fail("cvt to 8 bits or less without .rn.satfinite");
    return pair([&](float v) { return Encode(v, format, kRn, true); }, bits);
  };
  switch (inst.type) {
    case Type::kBf16x2:
      if (saturate)
        return pair([&](float v) { return Encode(v, kBf16Format, rounding, true); }, 16);
      return pair([&](float v) { return ToBf16(v, rounding); }, 16);
    case Type::kF16x2:
      return pair([&](float v) { return Encode(v, kF16Format, rounding, saturate); }, 16);
    case Type::kE4m3x2:
      return small(kE4m3Format, 8);
    case Type::kE5m2x2:
      return small(kE5m2Format, 8);
    case Type::kE2m1x2:
      return small(kE2m1Format, 4);
    case Type::kUe8m0x2:
      return pair([&](float v) { return ToUe8m0(v, rounding); }, 8);
    default:
      Fail("cvt to this packed type");
  }
}

// A packed source to two 16-bit floats.
uint64_t Unpack(const Instruction& inst, uint32_t bits) {
  const auto pair = [&](const float* table, int width) {
    const uint32_t mask = (1u << width) - 1;
    const auto encode = [&](float v) { return inst.type == Type::kF16x2 ? ToF16(v) : ToBf16(v); };
    return uint64_t{encode(table[bits >> width & mask])} << 16 | encode(table[bits & mask]);
  };
  const bool to_half = inst.type == Type::kF16x2, to_brain = inst.type == Type::kBf16x2;
  // Exact in both; .bf16x2 is what nvcc makes for SM100 and SM120.
  if ((to_half || to_brain) && inst.type2 == Type::kE4m3x2) return pair(kE4m3, 8);
  if ((to_half || to_brain) && inst.type2 == Type::kE5m2x2) return pair(kE5m2, 8);
  if ((to_half || to_brain) && inst.type2 == Type::kE2m1x2) return pair(kE2m1, 4);
  if (to_brain && inst.type2 == Type::kUe8m0x2) return pair(kUe8m0, 8);
  if (inst.type2 == Type::kF16x2 && (inst.type == Type::kE4m3x2 || inst.type == Type::kE5m2x2)) {
    return Pack(inst, FromF16(bits >> 16), FromF16(bits));
  }
  Fail("cvt between these packed types");
}

}  // namespace

Outcome ExecuteConversion(Step& s) {
  const Instruction& inst = s.inst;
  uint64_t* d = s.Dst();
  const uint64_t* a = s.Src(0);
  if (inst.op == Op::kCvt) {
    ForEachLane(s.lanes, [&](int l) { d[l] = Convert(inst, a[l]); });
  } else if (inst.num_src == 2) {
    if (inst.type2 != Type::kF32) Fail("cvt of two sources other than float32");
    const uint64_t* b = s.Src(1);
    ForEachLane(s.lanes, [&](int l) { d[l] = Pack(inst, ToFloat(a[l]), ToFloat(b[l])); });
  } else {
    ForEachLane(s.lanes, [&](int l) { d[l] = Unpack(inst, static_cast<uint32_t>(a[l])); });
  }
  return Outcome::kNext;
}

}  // namespace emulator
