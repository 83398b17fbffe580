// Logic and shifts (PTX ISA 9.7.8).
#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

uint64_t ShiftRight(uint64_t a, uint32_t count, Type type) {
  const auto bits = static_cast<uint32_t>(Bits(type));
  if (IsSigned(type)) return static_cast<uint64_t>(Extend(a, type) >> std::min(count, 63u));
  return count >= bits ? 0 : Mask(a, Bits(type)) >> count;
}

// The table's bit i is the result where a, b, c are the bits of i, a the highest.
uint32_t LookUp(uint32_t a, uint32_t b, uint32_t c, int table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

}  // namespace

Outcome ExecuteLogic(Step& s) {
  const Instruction& inst = s.inst;
  const int bits = Bits(inst.type), n = inst.num_src;
  uint64_t* d = s.Dst();
  const uint64_t* a = s.Src(0);
  const uint64_t* b = n > 1 ? s.Src(1) : nullptr;
  const uint64_t* c = n > 2 ? s.Src(2) : nullptr;
  const auto each = [&](auto&& value) {
    ForEachLane(s.lanes, [&](int l) { d[l] = Mask(value(l), bits); });
  };
  switch (inst.op) {
    case Op::kAnd:
      each([&](int l) { return a[l] & b[l]; });
      break;
    case Op::kOr:
      each([&](int l) { return a[l] | b[l]; });
      break;
    case Op::kXor:
      each([&](int l) { return a[l] ^ b[l]; });
      break;
    case Op::kNot:
      each([&](int l) { return ~a[l]; });
      break;
    case Op::kShl:  // counts beyond the width give 0
      each([&](int l) {
        const auto count = static_cast<uint32_t>(b[l]);
        return count >= static_cast<uint32_t>(bits) ? 0 : a[l] << count;
      });
      break;
    case Op::kShr:
      each([&](int l) { return ShiftRight(a[l], static_cast<uint32_t>(b[l]), inst.type); });
      break;
    case Op::kLop3:
      each([&](int l) {
        return LookUp(static_cast<uint32_t>(a[l]), static_cast<uint32_t>(b[l]),
                      static_cast<uint32_t>(c[l]), inst.mode);
      });
      break;
    default:  // kShf; mode: to the right, mode2: the count wraps
      each([&](int l) {
        const uint64_t value = (a[l] & 0xffffffff) | b[l] << 32;
        auto count = static_cast<uint32_t>(c[l]);
        count = inst.mode2 ? count & 31 : std::min(count, 32u);
        return inst.mode ? value >> count : value << count >> 32;
      });
      break;
  }
  return Outcome::kNext;
}

}  // namespace emulator
