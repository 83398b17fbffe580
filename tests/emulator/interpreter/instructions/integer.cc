// Integer arithmetic (PTX ISA 9.7.1).
#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

__extension__ using Wide = __int128;
__extension__ using UnsignedWide = unsigned __int128;

uint64_t MultiplyHigh(uint64_t a, uint64_t b, Type type) {
  const int64_t x = Extend(a, type), y = Extend(b, type);
  const int bits = Bits(type);
  if (IsSigned(type)) return Mask(static_cast<uint64_t>((Wide{x} * y) >> bits), bits);
  const UnsignedWide product = UnsignedWide{static_cast<uint64_t>(x)} * static_cast<uint64_t>(y);
  return Mask(static_cast<uint64_t>(product >> bits), bits);
}

uint64_t MultiplyWide(uint64_t a, uint64_t b, Type type) {
  return static_cast<uint64_t>(Extend(a, type)) * static_cast<uint64_t>(Extend(b, type));
}

uint64_t Divide(uint64_t a, uint64_t b, Type type, bool remainder) {
  const int64_t x = Extend(a, type), y = Extend(b, type);
  if (y == 0) Fail("division by zero");  // unspecified in the ISA
  if (!IsSigned(type)) {
    const auto u = static_cast<uint64_t>(x), v = static_cast<uint64_t>(y);
    return remainder ? u % v : u / v;
  }
  if (y == -1) return remainder ? 0 : -static_cast<uint64_t>(x);
  return static_cast<uint64_t>(remainder ? x % y : x / y);
}

uint64_t FindLeadingBit(uint64_t a, Type type, bool shift_amount) {
  const int bits = Bits(type);
  uint64_t value = Mask(a, bits);
  if (IsSigned(type) && Extend(a, type) < 0) value = Mask(~value, bits);
  if (!value) return 0xffffffff;
  const int place = 63 - std::countl_zero(value);
  return shift_amount ? bits - 1 - place : place;
}

// The n-th set bit from a base (PTX ISA 9.7.1, fns).
uint32_t FindNthSet(uint32_t mask, uint32_t base, int32_t offset) {
  if (offset == 0) return mask >> (base & 31) & 1 ? base : ~0u;
  int32_t left = std::abs(offset) - 1;
  const int32_t step = offset < 0 ? -1 : 1;
  for (auto at = static_cast<int32_t>(base); at >= 0 && at < 32; at += step) {
    if ((mask >> at & 1) && left-- == 0) return at;
  }
  return ~0u;
}

uint64_t Extract(uint64_t value, uint32_t start, uint32_t length, Type type) {
  const uint32_t bits = Bits(type);
  if (!length) return 0;
  uint64_t field = start >= bits ? 0 : Mask(value, bits) >> start;
  if (length < 64) field &= (uint64_t{1} << length) - 1;
  if (IsSigned(type)) {
    const uint32_t sign = std::min(start + length - 1, bits - 1);
    const uint32_t filled = std::min(length, start >= bits ? 0 : bits - start);
    if ((value >> sign & 1) && filled < 64) field |= ~uint64_t{0} << filled;
  }
  return Mask(field, bits);
}

uint64_t Insert(uint64_t field, uint64_t into, uint32_t start, uint32_t length, int bits) {
  into = Mask(into, bits);
  if (!length || start >= static_cast<uint32_t>(bits)) return into;
  const uint64_t mask = (length >= 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1) << start;
  return Mask((into & ~mask) | (field << start & mask), bits);
}

uint32_t DotBytes(uint64_t a, uint64_t b, uint64_t c, Type type_a, Type type_b) {
  auto sum = static_cast<uint32_t>(c);
  for (int i = 0; i < 4; ++i) {
    const auto byte = [&](uint64_t v, Type type) {
      return Extend(v >> (8 * i), type == Type::kS32 ? Type::kS8 : Type::kU8);
    };
    sum += static_cast<uint32_t>(byte(a, type_a) * byte(b, type_b));
  }
  return sum;
}

// Two 16-bit integers in a word.
uint32_t Packed(Op op, uint64_t a, uint64_t b, Type type) {
  const Type half = type == Type::kU16x2 ? Type::kU16 : Type::kS16;
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const uint64_t x = a >> shift, y = b >> shift;
    uint64_t value = 0;
    switch (op) {
      case Op::kAdd:
        value = x + y;
        break;
      case Op::kMin:
        value = Less(x, y, half) ? x : y;
        break;
      case Op::kMax:
        value = Less(y, x, half) ? x : y;
        break;
      default:
        Fail("%s of packed 16-bit integers", Name(op));
    }
    result |= static_cast<uint32_t>(value & 0xffff) << shift;
  }
  return result;
}

}  // namespace

Outcome ExecuteInteger(Step& s) {
  const Instruction& inst = s.inst;
  const Type type = inst.type;
  const int bits = Bits(type), n = inst.num_src;
  uint64_t* d = s.Dst();
  const uint64_t* a = s.Src(0);
  const uint64_t* b = n > 1 ? s.Src(1) : nullptr;
  const uint64_t* c = n > 2 ? s.Src(2) : nullptr;
  const auto each = [&](auto&& value) {
    ForEachLane(s.lanes, [&](int l) { d[l] = Mask(value(l), bits); });
  };
  const auto wide = [&](auto&& value) {
    ForEachLane(s.lanes, [&](int l) { d[l] = Mask(value(l), bits * 2); });
  };
  const auto word = [&](auto&& value) { ForEachLane(s.lanes, [&](int l) { d[l] = value(l); }); };
  if (type == Type::kU16x2 || type == Type::kS16x2) {
    word([&](int l) { return Packed(inst.op, a[l], b[l], type); });
    return Outcome::kNext;
  }
  switch (inst.op) {
    case Op::kAdd:
      each([&](int l) { return a[l] + b[l]; });
      break;
    case Op::kSub:
      each([&](int l) { return a[l] - b[l]; });
      break;
    case Op::kMulLo:
      each([&](int l) { return a[l] * b[l]; });
      break;
    case Op::kMulHi:
      each([&](int l) { return MultiplyHigh(a[l], b[l], type); });
      break;
    case Op::kMulWide:
      wide([&](int l) { return MultiplyWide(a[l], b[l], type); });
      break;
    case Op::kMadLo:
      each([&](int l) { return a[l] * b[l] + c[l]; });
      break;
    case Op::kMadHi:
      each([&](int l) { return MultiplyHigh(a[l], b[l], type) + c[l]; });
      break;
    case Op::kMadWide:
      wide([&](int l) { return MultiplyWide(a[l], b[l], type) + c[l]; });
      break;
    case Op::kDiv:
    case Op::kRem:
      each([&](int l) { return Divide(a[l], b[l], type, inst.op == Op::kRem); });
      break;
    case Op::kAbs:
      each([&](int l) { return static_cast<uint64_t>(std::abs(Extend(a[l], type))); });
      break;
    case Op::kNeg:
      each([&](int l) { return -a[l]; });
      break;
    case Op::kMin:
      each([&](int l) { return Less(a[l], b[l], type) ? a[l] : b[l]; });
      break;
    case Op::kMax:
      each([&](int l) { return Less(b[l], a[l], type) ? a[l] : b[l]; });
      break;
    case Op::kPopc:
      word([&](int l) { return std::popcount(Mask(a[l], bits)); });
      break;
    case Op::kClz:
      word([&](int l) { return std::countl_zero(Mask(a[l], bits)) - (64 - bits); });
      break;
    case Op::kBrev:
      word([&](int l) {
        uint64_t reversed = 0;
        for (int i = 0; i < bits; ++i) reversed |= (a[l] >> i & 1) << (bits - 1 - i);
        return reversed;
      });
      break;
    case Op::kBfind:
      word([&](int l) { return FindLeadingBit(a[l], type, inst.mode); });
      break;
    case Op::kFns:
      word([&](int l) {
        return FindNthSet(static_cast<uint32_t>(a[l]), static_cast<uint32_t>(b[l]),
                          static_cast<int32_t>(c[l]));
      });
      break;
    case Op::kBfe:
      word([&](int l) { return Extract(a[l], b[l] & 255, c[l] & 255, type); });
      break;
    case Op::kBfi: {
      const uint64_t* length = s.Src(3);
      word([&](int l) { return Insert(a[l], b[l], c[l] & 255, length[l] & 255, bits); });
      break;
    }
    default:  // kDp4a
      word([&](int l) { return DotBytes(a[l], b[l], c[l], type, inst.type2); });
      break;
  }
  return Outcome::kNext;
}

}  // namespace emulator
