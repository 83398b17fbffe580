// Barriers of warps, CTAs and clusters (PTX ISA 9.7.13: bar.warp.sync, bar and barrier,
// barrier.cluster).
#include <utility>

#include "../step.h"

namespace emulator {
namespace {

Outcome WarpSync(Step& s) {
  const auto mask = static_cast<LaneMask>(s.Src()[s.FirstLane()]);
  if (s.lanes & ~mask) Fail("bar.warp.sync by lanes %08x outside %08x", s.lanes, mask);
  const LaneMask needed = mask & s.warp.live;
  LaneMask here = s.lanes;
  for (int lane = 0; lane < 32; ++lane) {
    if (s.warp.state[lane] == LaneState::kWarpSync && s.warp.sync_mask[lane] == mask) {
      here |= 1u << lane;
    }
  }
  if (needed & ~here) {
    s.Move(s.lanes, s.front.pc, LaneState::kWarpSync);
    ForEachLane(s.lanes, [&](int lane) { s.warp.sync_mask[lane] = mask; });
    return Outcome::kMoved;
  }
  if (s.warp.waited & here) s.warp.waited |= here;
  if (here == s.lanes) return Outcome::kNext;
  // Lanes may wait at several places in the code; each goes on from its own.
  ForEachLane(here & ~s.lanes, [&](int lane) {
    ++s.warp.pc[lane];
    s.warp.state[lane] = LaneState::kRun;
  });
  s.Move(s.lanes, s.front.pc + 1);
  return Outcome::kMoved;
}

// An aligned barrier is one instruction of the whole warp.
bool Align(Step& s) { return !s.inst.flags || Converge(s, kAllLanes); }

Outcome Named(Step& s) {
  if (!Align(s)) return Outcome::kMoved;
  const int first = s.FirstLane();
  const auto id = static_cast<uint32_t>(s.Src(0)[first]);
  const auto count = s.inst.num_src > 1 ? static_cast<uint32_t>(s.Src(1)[first])
                                        : static_cast<uint32_t>(s.cta.warps.size()) * 32;
  if (id > 15) Fail("barrier %u: there are 16", id);
  if (count % 32) Fail("barrier %u: the count %u is not a multiple of a warp", id, count);
  ForEachLane(s.lanes, [&](int lane) {
    if (static_cast<uint32_t>(s.Src(0)[lane]) != id) Fail("a warp's lanes name several barriers");
  });
  NamedBarrier& barrier = s.cta.barriers[id];
  if (barrier.arrived && barrier.expected != count) {
    Fail("barrier %u: counts %u and %u", id, barrier.expected, count);
  }
  barrier.expected = count;
  barrier.arrived += std::popcount(s.lanes);
  barrier.waited |= (s.warp.waited & s.lanes) != 0;
  ++s.machine.progress;
  if (barrier.arrived > count) Fail("barrier %u: %u arrived of %u", id, barrier.arrived, count);
  const bool waits = s.inst.op == Op::kBarrierSync;
  s.Move(s.lanes, s.front.pc + (waits ? 0 : 1), waits ? LaneState::kBarrier : LaneState::kRun);
  ForEachLane(s.lanes, [&](int lane) { s.warp.barrier[lane] = id; });
  if (barrier.arrived < count) return Outcome::kMoved;
  barrier.arrived = 0;
  const bool waited = std::exchange(barrier.waited, false);
  for (auto& warp : s.cta.warps) {
    for (int lane = 0; lane < 32; ++lane) {
      if (warp->state[lane] != LaneState::kBarrier || warp->barrier[lane] != id) continue;
      warp->state[lane] = LaneState::kRun;
      ++warp->pc[lane];
      if (waited) warp->waited |= 1u << lane;
    }
  }
  return Outcome::kMoved;
}

Outcome OfCluster(Step& s) {
  if (!Align(s)) return Outcome::kMoved;
  if (s.inst.op == Op::kClusterArrive) {
    s.Move(s.lanes, s.front.pc + 1);
    ForEachLane(s.lanes, [&](int lane) { s.warp.cluster_phase[lane] = s.cluster.phase; });
    s.cluster.arrived += std::popcount(s.lanes);
    s.cluster.order.Arrive((s.warp.waited & s.lanes) != 0, false);
    ++s.machine.progress;
    FinishClusterBarrier(s.cluster);
    return Outcome::kMoved;
  }
  ForEachLane(s.lanes, [&](int lane) {
    const bool passed = s.warp.cluster_phase[lane] < s.cluster.phase;
    s.warp.pc[lane] = s.front.pc + passed;
    s.warp.state[lane] = passed ? LaneState::kRun : LaneState::kCluster;
    if (passed && s.cluster.order.completed) s.warp.waited |= 1u << lane;
  });
  return Outcome::kMoved;
}

}  // namespace

void FinishClusterBarrier(Cluster& cluster) {
  const uint32_t threads = cluster.LiveThreads();  // threads that exited count as arrived
  if (!threads || !cluster.arrived || cluster.arrived < threads) return;
  cluster.arrived = 0;
  ++cluster.phase;
  cluster.order.Arrive(false, true);
  for (auto& cta : cluster.ctas) {
    for (auto& warp : cta->warps) {
      for (int lane = 0; lane < 32; ++lane) {
        if (warp->state[lane] != LaneState::kCluster) continue;
        if (warp->cluster_phase[lane] >= cluster.phase) continue;
        warp->state[lane] = LaneState::kRun;
        ++warp->pc[lane];
        if (cluster.order.completed) warp->waited |= 1u << lane;
      }
    }
  }
}

Outcome ExecuteBarrier(Step& s) {
  switch (s.inst.op) {
    case Op::kWarpSync:
      return WarpSync(s);
    case Op::kBarrierSync:
    case Op::kBarrierArrive:
      return Named(s);
    default:
      return OfCluster(s);
  }
}

}  // namespace emulator
