// Moves, special registers and addresses (PTX ISA 9.7.9; special registers: 10).
#include "../memory.h"
#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

// The order is that of SPECIAL_REGISTERS in ptx/encoding.py.
enum SpecialRegister {
  kTid = 0,
  kNtid = 3,
  kCtaid = 6,
  kNctaid = 9,
  kLaneid = 12,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kGridid,
  kClock,
  kClockHi,
  kClock64,
  kTimer,
  kTimerLo,
  kTimerHi,
  kClusterCtarank,
  kClusterNctarank,
  kClusterCtaid,
  kClusterNctaid = kClusterCtaid + 3,
  kClusterid = kClusterNctaid + 3,
  kNclusterid = kClusterid + 3,
  kLanemaskEq = kNclusterid + 3,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kDynamicShared,
  kTotalShared
};

uint64_t ReadSpecial(const Step& s, int lane) {
  const int reg = s.inst.mode;
  const uint32_t thread = s.warp.index * 32 + lane;
  const uint32_t* block = s.grid.block;
  const uint32_t place[3] = {thread % block[0], thread / block[0] % block[1],
                             thread / block[0] / block[1]};
  const uint32_t below = (1u << lane) - 1;
  if (reg < kNtid) return place[reg - kTid];
  if (reg < kCtaid) return block[reg - kNtid];
  if (reg < kNctaid) return s.cta.id[reg - kCtaid];
  if (reg < kLaneid) return s.grid.grid[reg - kNctaid];
  if (reg >= kClusterCtaid && reg < kLanemaskEq) {
    const int axis = (reg - kClusterCtaid) % 3;
    const uint32_t size = s.grid.cluster[axis], at = s.cta.id[axis];
    if (reg < kClusterNctaid) return at % size;
    if (reg < kClusterid) return size;
    return reg < kNclusterid ? at / size : s.grid.grid[axis] / size;
  }
  switch (reg) {
    case kLaneid:
      return lane;
    case kWarpid:
      return s.warp.index;
    case kNwarpid:
      return s.cta.warps.size();
    case kSmid:
      return s.cta.linear + s.machine.settings.smid_offset;
    case kNsmid:
      return s.grid.grid[0] * s.grid.grid[1] * s.grid.grid[2] + s.machine.settings.smid_offset;
    case kGridid:
      return s.grid.id;
    case kClock:
    case kClock64:
    case kTimer:
    case kTimerLo:
      return ++s.machine.clock;
    case kClockHi:
    case kTimerHi:
      return s.machine.clock >> 32;
    case kClusterCtarank:
      return s.cta.rank;
    case kClusterNctarank:
      return s.cluster.ctas.size();
    case kLanemaskEq:
      return below + 1;
    case kLanemaskLt:
      return below;
    case kLanemaskLe:
      return below << 1 | 1;
    case kLanemaskGt:
      return ~(below << 1 | 1);
    case kLanemaskGe:
      return ~below;
    case kDynamicShared:
      return s.grid.dynamic_shared;
    case kTotalShared:
      return s.kernel.dynamic_at + s.grid.dynamic_shared;
    default:
      Fail("special register %d", reg);
  }
}

uint64_t Isspacep(uint64_t address, int space, uint32_t rank) {
  const uint64_t window = address >> 56;
  switch (space) {
    case kGlobal:
      return window == 0;
    case kShared:
      return window == 1 && static_cast<uint32_t>(address) >> 24 == rank;
    case kClusterShared:
      return window == 1;
    default:
      return window == 2;
  }
}

// Selects bytes; the selector's bit 3 repeats the byte's sign (PTX ISA 9.7.9, prmt).
uint32_t Permute(uint64_t a, uint64_t b, uint32_t selectors) {
  const uint64_t bytes = (a & 0xffffffff) | b << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t selector = selectors >> (4 * i) & 15;
    uint32_t byte = bytes >> (8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

void Pack(const Step& s) {
  const int bits = s.inst.mode;
  uint64_t packed[32] = {};
  for (int i = 0; i < s.inst.num_src; ++i) {
    const uint64_t* part = s.Src(i);
    ForEachLane(s.lanes, [&](int l) { packed[l] |= Mask(part[l], bits) << (i * bits); });
  }
  uint64_t* d = s.Dst();
  ForEachLane(s.lanes, [&](int l) { d[l] = packed[l]; });
}

void Unpack(const Step& s) {
  const int bits = s.inst.mode;
  uint64_t source[32];
  const uint64_t* a = s.Src();
  ForEachLane(s.lanes, [&](int l) { source[l] = a[l]; });
  for (int i = 0; i < s.inst.num_dst; ++i) {
    uint64_t* d = s.Dst(i);
    ForEachLane(s.lanes, [&](int l) { d[l] = Mask(source[l] >> (i * bits), bits); });
  }
}

uint64_t MapAddress(const Step& s, uint64_t address, uint64_t rank) {
  if (s.inst.mode == kGeneric && address >> 56 != 1) Fail("mapa of a generic address");
  if (rank >= s.cluster.ctas.size()) Fail("mapa to CTA %u", static_cast<uint32_t>(rank));
  const uint64_t mapped = SharedAddress(static_cast<uint32_t>(rank), address & 0xffffff);
  return s.inst.mode == kGeneric ? kSharedWindow | mapped : mapped;
}

}  // namespace

Outcome ExecuteMovement(Step& s) {
  const Instruction& inst = s.inst;
  if (inst.op == Op::kNop) return Outcome::kNext;
  uint64_t* d = s.Dst();
  const uint64_t* a = inst.num_src > 0 ? s.Src(0) : nullptr;
  const uint64_t* b = inst.num_src > 1 ? s.Src(1) : nullptr;
  const auto each = [&](auto&& value) { ForEachLane(s.lanes, [&](int l) { d[l] = value(l); }); };
  const auto same = [&](uint64_t value) { each([&](int) { return value; }); };
  const int bits = Bits(inst.type);
  switch (inst.op) {
    case Op::kMov:
      if (inst.type == Type::kB128) Fail("mov of 128 bits");
      each([&](int l) { return Mask(a[l], bits); });
      break;
    case Op::kPack:
      Pack(s);
      break;
    case Op::kUnpack:
      Unpack(s);
      break;
    case Op::kSpecialRegister:
      each([&](int l) { return Mask(ReadSpecial(s, l), bits); });
      break;
    case Op::kParameterAddress:
      same(s.grid.parameters + inst.immediate);
      break;
    case Op::kGlobalAddress:
      same(s.kernel.globals_base + inst.immediate);
      break;
    case Op::kSharedAddress:  // mode: dynamic shared memory
      same(SharedAddress(s.cta.rank, kSharedBase) + inst.immediate +
           (inst.mode ? s.kernel.dynamic_at : 0));
      break;
    case Op::kLocalAddress:
      same(inst.immediate);
      break;
    case Op::kToGeneric: {
      const uint64_t window = inst.mode == kLocal ? kLocalWindow : kSharedWindow;
      each([&](int l) { return window | static_cast<uint32_t>(a[l]); });
      break;
    }
    case Op::kFromGeneric: {
      const uint64_t window = inst.mode == kLocal ? 2 : 1;
      each([&](int l) {
        if (a[l] >> 56 != window) {
          Fail("cvta.to of 0x%llx, an address of another space",
               static_cast<unsigned long long>(a[l]));
        }
        return static_cast<uint64_t>(static_cast<uint32_t>(a[l]));
      });
      break;
    }
    case Op::kIsspacep:
      each([&](int l) { return Isspacep(a[l], inst.mode, s.cta.rank); });
      break;
    case Op::kPrmt: {
      const uint64_t* c = s.Src(2);
      each([&](int l) { return Permute(a[l], b[l], static_cast<uint32_t>(c[l])); });
      break;
    }
    case Op::kMapa:
      each([&](int l) { return MapAddress(s, a[l], b[l]); });
      break;
    default:  // kGetCtaRank
      each([&](int l) { return static_cast<uint32_t>(a[l]) >> 24; });
      break;
  }
  return Outcome::kNext;
}

}  // namespace emulator
