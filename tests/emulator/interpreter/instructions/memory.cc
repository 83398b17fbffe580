// Loads, stores and atomics (PTX ISA 9.7.9 ld, st, st.bulk; 9.7.13 atom, red).
#include <cstring>

#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

// A float sum in the type itself; 16-bit floats in pairs (PTX ISA 9.7.13, atom.add).
uint64_t AddFloats(Type type, uint64_t a, uint64_t b) {
  switch (type) {
    case Type::kF32: {
      const float sum = ToFloat(a) + ToFloat(b);
      return std::isnan(sum) ? kNanF32 : ToBits(sum);
    }
    case Type::kF64:
      return ToBits(ToDouble(a) + ToDouble(b));
    case Type::kF16:
    case Type::kBf16:
      return WriteFloat(AddToOdd(ReadFloat(a, type), ReadFloat(b, type)), type);
    default: {
      const Type half = type == Type::kF16x2 ? Type::kF16 : Type::kBf16;
      return AddFloats(half, a >> 16, b >> 16) << 16 | AddFloats(half, a, b);
    }
  }
}

bool IsFloat(Type type) {
  return type == Type::kF32 || type == Type::kF64 || type == Type::kF16 || type == Type::kBf16 ||
         type == Type::kF16x2 || type == Type::kBf16x2;
}

void Load(Step& s) {
  const Instruction& inst = s.inst;
  const uint64_t* base = s.Src();
  const int size = Bits(inst.type) / 8, count = inst.num_dst;
  uint64_t addresses[32];  // a destination may be the base
  ForEachLane(s.lanes, [&](int l) { addresses[l] = base[l] + inst.immediate; });
  ForEachLane(s.lanes, [&](int l) {
    const uint8_t* from = s.machine.Resolve(s.warp, l, static_cast<Space>(inst.mode), addresses[l],
                                            size * count, false, inst.mode2);
    for (int i = 0; i < count; ++i) {
      uint64_t value = 0;
      std::memcpy(&value, from + i * size, size);
      s.Dst(i)[l] = IsSigned(inst.type) ? static_cast<uint64_t>(Extend(value, inst.type)) : value;
    }
  });
}

void Store(Step& s) {
  const Instruction& inst = s.inst;
  const uint64_t* base = s.Src();
  const int size = Bits(inst.type) / 8, count = inst.num_src - 1;
  ForEachLane(s.lanes, [&](int l) {
    uint8_t* to = s.machine.Resolve(s.warp, l, static_cast<Space>(inst.mode),
                                    base[l] + inst.immediate, size * count, true);
    for (int i = 0; i < count; ++i) {
      const uint64_t value = s.Src(1 + i)[l];
      std::memcpy(to + i * size, &value, size);
    }
  });
  if (inst.mode != kLocal) ++s.machine.progress;
}

// st.bulk: zeros, of a size in a register.
void StoreBulk(Step& s) {
  const uint64_t *base = s.Src(0), *size = s.Src(1), *value = s.Src(2);
  ForEachLane(s.lanes, [&](int l) {
    if (value[l]) Fail("st.bulk of a value other than 0");
    const auto address = static_cast<uint32_t>(base[l] + s.inst.immediate);
    if (address % 8 || size[l] % 8) Fail("st.bulk: address and size are multiples of 8");
    std::memset(s.machine.ResolveShared(s.cta, address, size[l], true, true), 0, size[l]);
  });
  ++s.machine.progress;
}

void Atomic(Step& s) {
  const Instruction& inst = s.inst;
  const uint64_t *base = s.Src(0), *values = s.Src(1);
  const uint64_t* swaps = inst.num_src > 2 ? s.Src(2) : nullptr;
  const int size = Bits(inst.type) / 8;
  ForEachLane(s.lanes, [&](int l) {
    const auto space = static_cast<Space>(inst.mode);
    const uint64_t address = base[l] + inst.immediate;
    uint8_t* at = s.machine.Resolve(s.warp, l, space, address, size, false);
    s.machine.Resolve(s.warp, l, space, address, size, true);
    uint64_t old = 0;
    std::memcpy(&old, at, size);
    const uint64_t value =
        Combine(static_cast<AtomicOp>(inst.mode2), inst.type, old, values[l], swaps ? swaps[l] : 0);
    if (value != old) {
      std::memcpy(at, &value, size);
      ++s.machine.progress;
    }
    if (inst.num_dst) s.Dst()[l] = old;
  });
}

}  // namespace

uint64_t Combine(AtomicOp op, Type type, uint64_t old, uint64_t value, uint64_t swap) {
  const int bits = Bits(type);
  old = Mask(old, bits);
  value = Mask(value, bits);
  if (IsFloat(type) && op != AtomicOp::kExch && op != AtomicOp::kCas) {
    if (op != AtomicOp::kAdd) Fail("atomic minimum or maximum of floats");
    return AddFloats(type, old, value);
  }
  switch (op) {
    case AtomicOp::kAdd:
      return Mask(old + value, bits);
    case AtomicOp::kMin:
      return Less(value, old, type) ? value : old;
    case AtomicOp::kMax:
      return Less(old, value, type) ? value : old;
    case AtomicOp::kAnd:
      return old & value;
    case AtomicOp::kOr:
      return old | value;
    case AtomicOp::kXor:
      return old ^ value;
    case AtomicOp::kExch:
      return value;
    case AtomicOp::kCas:
      return old == value ? Mask(swap, bits) : old;
    case AtomicOp::kInc:
      return old >= value ? 0 : old + 1;
    case AtomicOp::kDec:
      return old == 0 || old > value ? value : old - 1;
  }
  Fail("atomic operation");
}

Outcome ExecuteMemory(Step& s) {
  switch (s.inst.op) {
    case Op::kLoad:
      Load(s);
      // flags: perhaps part of a polling loop, so another warp gets its turn
      return s.inst.flags ? Outcome::kNextYield : Outcome::kNext;
    case Op::kStore:
      Store(s);
      break;
    case Op::kStoreBulk:
      StoreBulk(s);
      break;
    default:
      Atomic(s);
      break;
  }
  return Outcome::kNext;
}

}  // namespace emulator
