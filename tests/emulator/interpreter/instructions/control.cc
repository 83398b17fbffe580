// Control flow (PTX ISA 9.7.12), griddepcontrol (9.7.13), trap (9.7.19), printf and assert (CUDA's
// device functions).
#include <cstring>
#include <string>

#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

constexpr size_t kLogLimit = 40000;

Outcome Return(Step& s) {
  s.Move(s.lanes, s.front.pc, LaneState::kExited);
  s.warp.live &= ~s.lanes;
  s.cta.live_threads -= std::popcount(s.lanes);
  ++s.machine.progress;
  for (LaneState& state : s.warp.state) {  // fewer lanes to wait for
    if (state == LaneState::kCollective || state == LaneState::kWarpSync) state = LaneState::kRun;
  }
  FinishClusterBarrier(s.cluster);
  return Outcome::kMoved;
}

std::string Text(Step& s, uint64_t address) {
  std::string text;
  for (;; ++address) {
    const char c = static_cast<char>(*s.machine.ResolveGlobal(address, 1, false));
    if (!c) return text;
    text += c;
  }
}

std::string Print(Step& s, uint64_t format_address, uint64_t arguments, int lane) {
  const std::string format = Text(s, format_address);
  const uint8_t* local = &s.warp.local[static_cast<size_t>(lane) * s.kernel.local_bytes];
  uint64_t at = static_cast<uint32_t>(arguments);
  std::string text;
  for (size_t i = 0; i < format.size(); ++i) {
    if (format[i] != '%') {
      text += format[i];
      continue;
    }
    bool wide = false;
    while (format[++i] == 'l') wide = true;
    const char kind = format[i];
    const bool eight = wide || std::strchr("spfge", kind);
    if (eight) at = (at + 7) & ~7ull;
    uint64_t value = 0;
    std::memcpy(&value, local + at, eight ? 8 : 4);
    at += eight ? 8 : 4;
    if (kind == 's') {
      text += Text(s, value);
    } else if (std::strchr("fge", kind)) {
      text += Format("%g", ToDouble(value));
    } else if (kind == 'd' || kind == 'i') {
      text += std::to_string(Extend(value, wide ? Type::kS64 : Type::kS32));
    } else {
      text += std::to_string(value);
    }
  }
  return text;
}

}  // namespace

Outcome ExecuteControl(Step& s) {
  const Instruction& inst = s.inst;
  switch (inst.op) {
    case Op::kBranch:
      if (s.front.other == ~0u) {  // no other lanes: no need to choose anew
        s.front.pc = inst.target - 1;
        return Outcome::kNext;
      }
      s.Move(s.lanes, inst.target);
      return Outcome::kMoved;
    case Op::kBranchIndexed: {
      const uint64_t* index = s.Src();
      ForEachLane(s.lanes, [&](int l) {
        const auto i = static_cast<uint32_t>(index[l]);
        if (i + 1 >= static_cast<uint32_t>(inst.num_src)) Fail("brx.idx with index %u", i);
        s.warp.pc[l] = s.kernel.pool[inst.src + 1 + i];
      });
      return Outcome::kMoved;
    }
    case Op::kReturn:
      return Return(s);
    case Op::kGridWait:
      s.warp.waited |= s.lanes;
      s.cta.waits = true;
      return Outcome::kNext;
    case Op::kGridTrigger:
      s.cta.triggers = true;
      s.cta.triggers_early |= (s.lanes & ~s.warp.waited) != 0;
      return Outcome::kNext;
    case Op::kTrap:
      Fail("trap");
    case Op::kAssertFail: {
      const int l = s.FirstLane();
      Fail("assertion failed: %s (%s:%u)", Text(s, s.Src(0)[l]).c_str(),
           Text(s, s.Src(1)[l]).c_str(), static_cast<uint32_t>(s.Src(2)[l]));
    }
    default:  // kPrintf
      ForEachLane(s.lanes, [&](int l) {
        if (s.machine.log.size() < kLogLimit) {
          s.machine.log += "printf: " + Print(s, s.Src(0)[l], s.Src(1)[l], l);
        }
      });
      return Outcome::kNext;
  }
}

}  // namespace emulator
