// mbarrier instructions (PTX ISA 9.7.13.15).
#include "../mbarrier.h"

#include <cstring>

#include "../step.h"

namespace emulator {
namespace {

uint32_t Address(const Step& s, int lane) {
  return static_cast<uint32_t>(s.Src(0)[lane] + s.inst.immediate);
}

void Init(Step& s) {
  const uint64_t* counts = s.Src(1);
  ForEachLane(s.lanes, [&](int l) {
    const uint32_t address = Address(s, l);
    if (address % 8) Fail("misaligned mbarrier 0x%x", address);
    const auto count = static_cast<uint32_t>(counts[l]);
    if (count > kMaxArrivals) Fail("mbarrier.init with a count of %u", count);
    // The ISA's range starts at 1; Humming's kernels pass 0 for barriers that nobody waits for.
    const uint64_t word = Mbarrier(std::max(count, 1u)).Word();
    std::memcpy(s.machine.ResolveShared(s.cta, address, 8, true, true), &word, 8);
    OrderOfPhases(s.cta, address) = {};
  });
  ++s.machine.progress;
}

// True where the phase of the wanted parity has ended. A warp whose lanes all wait for one object
// by try_wait (mode2) is set aside until that phase ends; test_wait does not block.
Outcome Test(Step& s) {
  const uint64_t* parities = s.Src(1);
  uint64_t* d = s.Dst();
  bool all = true, same = true;
  const uint64_t* waited = nullptr;
  uint32_t parity = 0;
  uint64_t results[32];
  ForEachLane(s.lanes, [&](int l) {
    const uint64_t* word = FindMbarrier(s.cta, Address(s, l), true);
    const uint32_t wanted = parities[l] & 1;
    results[l] = Parity(*word) != wanted;
    if (results[l]) {
      if (s.machine.overlap.Tracks() && OrderOfPhases(s.cta, Address(s, l)).completed) {
        s.warp.waited |= 1u << l;
      }
      return;
    }
    all = false;
    same &= !waited || (waited == word && parity == wanted);
    waited = word;
    parity = wanted;
  });
  ForEachLane(s.lanes, [&](int l) { d[l] = results[l]; });
  if (all) return Outcome::kNext;
  LaneMask running = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (s.warp.state[lane] == LaneState::kRun) running |= 1u << lane;
  }
  if (s.inst.mode2 && running == s.lanes && same) {
    s.warp.parked = waited;
    s.warp.parked_parity = parity;
  }
  return Outcome::kNextYield;
}

}  // namespace

Outcome ExecuteMbarrier(Step& s) {
  const Instruction& inst = s.inst;
  const bool own = inst.mode;
  const uint64_t* values = inst.num_src > 1 ? s.Src(1) : nullptr;
  const auto update = [&](int lane, int64_t transactions, uint32_t arrivals) {
    s.machine.UpdateMbarrier(s.cta, Address(s, lane), own, transactions, arrivals, s.Waited(lane));
  };
  switch (inst.op) {
    case Op::kBarrierInit:
      Init(s);
      break;
    case Op::kBarrierInval:
      ForEachLane(s.lanes, [&](int l) { *FindMbarrier(s.cta, Address(s, l), true) = 0; });
      break;
    case Op::kBarrierArriveOn:  // mode2: the value is bytes to expect, not a count
      ForEachLane(s.lanes, [&](int l) {
        const auto value = values ? static_cast<uint32_t>(values[l]) : 1;
        inst.mode2 ? update(l, value, 1) : update(l, 0, value);
      });
      break;
    case Op::kBarrierTransactions:  // mode2: complete
      ForEachLane(s.lanes, [&](int l) {
        const auto value = static_cast<int64_t>(static_cast<uint32_t>(values[l]));
        update(l, inst.mode2 ? -value : value, 0);
      });
      break;
    default:
      return Test(s);
  }
  return Outcome::kNext;
}

}  // namespace emulator
