// One instruction of one warp, as the functions under instructions/ see it.
#pragma once

#include <bit>
#include <cstdint>

#include "error.h"
#include "machine.h"

namespace emulator {

// The lanes of a warp that are at one instruction and run together.
struct Front {
  LaneMask lanes = 0;
  uint32_t pc = 0;
  uint32_t other = ~0u;  // the lowest instruction of the other lanes that can run
};

enum class Outcome {
  kNext,       // the lanes go on
  kNextYield,  // the lanes go on in the warp's next turn
  kStay,       // the lanes try again in the warp's next turn
  kMoved,      // the instruction set the lanes' places and states itself
};

struct Step {
  Machine& machine;
  Warp& warp;
  Cta& cta;
  Cluster& cluster;
  Grid& grid;
  const Kernel& kernel;
  const Instruction& inst;
  Front& front;
  LaneMask lanes;  // those that execute

  uint64_t* Register(int32_t operand) const {
    return operand >= 0 ? warp.registers.data() + static_cast<size_t>(operand) * 32
                        : const_cast<uint64_t*>(kernel.constants.data()) +
                              static_cast<size_t>(-1 - operand) * 32;
  }
  uint64_t* Dst(int i = 0) const { return Register(kernel.pool[inst.dst + i]); }
  const uint64_t* Src(int i = 0) const { return Register(kernel.pool[inst.src + i]); }
  // Whether a lane is behind a griddepcontrol.wait.
  bool Waited(int lane) const { return (warp.waited >> lane & 1) != 0; }
  int FirstLane() const { return std::countr_zero(lanes); }
  // Puts the lanes elsewhere: the outcome is kMoved.
  void Move(LaneMask moved, uint32_t pc, LaneState state = LaneState::kRun) const {
    for (LaneMask m = moved; m; m &= m - 1) {
      const int lane = std::countr_zero(m);
      warp.pc[lane] = pc;
      warp.state[lane] = state;
    }
  }
};

template <typename F>
inline void ForEachLane(LaneMask lanes, F&& f) {
  if (lanes == kAllLanes) {
    for (int lane = 0; lane < 32; ++lane) f(lane);
  } else {
    for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
  }
}

// Brings the lanes of a member mask together at an instruction: false if some are still missing, in
// which case those here wait (outcome kMoved); else `step.lanes` are all of them.
bool Converge(Step& step, LaneMask members);

// Work that a lane's instruction issues.
inline AsyncWork WorkOf(const Step& step, AsyncWork::Kind kind, int lane) {
  AsyncWork work;
  work.kind = kind;
  work.cta = &step.cta;
  work.waited = step.Waited(lane);
  return work;
}
// Fails for data that another CTA's mbarrier is to count (instructions/async_copy.cc).
void CheckOneCta(const Step& step, const AsyncWork& work);

// By class, in instructions/.
Outcome ExecuteMovement(Step& step);
Outcome ExecuteInteger(Step& step);
Outcome ExecuteLogic(Step& step);
Outcome ExecuteCompare(Step& step);
Outcome ExecuteFloating(Step& step);
Outcome ExecuteConversion(Step& step);
Outcome ExecuteMemory(Step& step);
Outcome ExecuteControl(Step& step);
Outcome ExecuteWarp(Step& step);
Outcome ExecuteBarrier(Step& step);
Outcome ExecuteMbarrier(Step& step);
Outcome ExecuteAsyncCopy(Step& step);
Outcome ExecuteBulkCopy(Step& step);
Outcome ExecuteTensorCopy(Step& step);
Outcome ExecuteMatrix(Step& step);
Outcome ExecuteWgmma(Step& step);
Outcome ExecuteTcgen05(Step& step);

// Integer and float reductions of atomics and copies (instructions/memory.cc).
uint64_t Combine(AtomicOp op, Type type, uint64_t old, uint64_t value, uint64_t swap);
// Lets threads of a cluster's barrier go on, if all have arrived (instructions/barrier.cc).
void FinishClusterBarrier(Cluster& cluster);

}  // namespace emulator
