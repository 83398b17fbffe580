// The state of a launch: grids, clusters, CTAs, warps.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "instruction.h"

namespace emulator {

using LaneMask = uint32_t;
inline constexpr LaneMask kAllLanes = ~0u;

struct Cluster;
struct Cta;
struct Grid;

enum class LaneState : uint8_t {
  kRun,
  kCollective,  // waits for other lanes at an instruction of the whole warp
  kWarpSync,    // waits at bar.warp.sync
  kBarrier,     // waits at a named barrier of the CTA
  kCluster,     // waits for the cluster's barrier
  kExited,
};

// One group of asynchronous copies of a thread.
struct CopyGroup {
  int unread = 0;     // copies whose source is still to be read
  int unwritten = 0;  // copies that are not done
};
struct CopyGroups {
  std::deque<std::shared_ptr<CopyGroup>> committed;
  std::shared_ptr<CopyGroup> open;

  CopyGroup& Open() {
    if (!open) open = std::make_shared<CopyGroup>();
    return *open;
  }
  // The open group, with one more copy to wait for.
  std::shared_ptr<CopyGroup> Join() {
    CopyGroup& group = Open();
    ++group.unread;
    ++group.unwritten;
    return open;
  }
  // Closes the open group; one without copies is done at once.
  void Commit() {
    Open();
    committed.push_back(std::move(open));
    open = nullptr;
  }
};

struct Warp {
  Cta* cta = nullptr;
  uint32_t index = 0;               // in its CTA
  std::vector<uint64_t> registers;  // [register][lane]
  std::vector<uint8_t> local;       // [lane][byte]
  uint32_t pc[32] = {};
  LaneState state[32] = {};
  LaneMask sync_mask[32] = {};      // of a lane in kWarpSync
  uint32_t barrier[32] = {};        // of a lane in kBarrier
  uint32_t cluster_phase[32] = {};  // at the lane's last arrival
  LaneMask live = 0;
  LaneMask waited = 0;               // lanes behind a griddepcontrol.wait
  bool diverge = false;              // the next slice may start with any lane
  std::map<int, CopyGroups> bulk;    // by lane: cp.async.bulk
  std::map<int, CopyGroups> copies;  // by lane: cp.async
  const uint64_t* parked = nullptr;  // an mbarrier that the whole warp waits for
  uint32_t parked_parity = 0;
  uint64_t wgmma_arrived = 0, wgmma_computed = 0, wgmma_done = 0;
};

struct NamedBarrier {
  uint32_t arrived = 0, expected = 0;
  bool waited = false;  // one of those that arrived is behind a griddepcontrol.wait
};

// Whether what arrived at an mbarrier is behind a griddepcontrol.wait.
struct PhaseOrder {
  bool pending = false;    // something of this phase or one before
  bool completed = false;  // something of a phase that has completed

  void Arrive(bool waited, bool completes) {
    pending |= waited;
    if (completes) completed = pending;
  }
};

inline constexpr uint32_t kTensorLanes = 128, kTensorColumns = 512;

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;  // in the cluster
  uint32_t id[3] = {};
  uint32_t linear = 0;  // in the grid
  std::vector<uint8_t> shared, shared_valid;
  NamedBarrier barriers[16];
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t live_threads = 0;
  std::vector<uint32_t> tensor;  // [lane][column]; empty until the first allocation
  std::vector<uint8_t> tensor_valid;
  uint32_t tensor_next = 0;               // columns allocated
  std::map<uint32_t, PhaseOrder> phases;  // by the mbarrier's offset, where overlaps are checked
  // griddepcontrol: a thread waited; one let dependents start; one did so without having waited.
  bool waits = false, triggers = false, triggers_early = false;

  // It lets dependents start only after a thread has waited; its exit does so too.
  bool Late() const { return triggers ? !triggers_early : waits; }
};

// An asynchronous tcgen05 instruction, in the cluster's order of issue.
struct TensorOperation {
  Op op;
  uint64_t source[8];
  int mode, mode2, flags, line;
  uint32_t issuer;  // rank of the CTA
  bool waited;      // its thread is behind a griddepcontrol.wait
};

struct Cluster {
  Grid* grid = nullptr;
  std::vector<std::unique_ptr<Cta>> ctas;
  uint32_t arrived = 0, phase = 0;  // of its barrier
  PhaseOrder order;
  std::deque<TensorOperation> tensor_operations;

  uint32_t LiveThreads() const {
    uint32_t threads = 0;
    for (const auto& cta : ctas) threads += cta->live_threads;
    return threads;
  }
};

struct Grid {
  const Kernel* kernel = nullptr;
  uint64_t parameters = 0;  // address of the parameter block
  uint32_t grid[3] = {}, block[3] = {}, cluster[3] = {};
  uint32_t dynamic_shared = 0;
  int rank = 0;
  uint64_t id = 0;               // %gridid
  uint64_t next = 0, total = 0;  // clusters started, and all
  std::vector<std::unique_ptr<Cluster>> clusters;
  // Of CTAs that have ended: one waits; one lets dependents start before its end; one is late.
  bool waits = false, triggers = false, late = false;

  uint32_t ClusterSize() const { return cluster[0] * cluster[1] * cluster[2]; }
  uint32_t Threads() const { return block[0] * block[1] * block[2]; }
};

}  // namespace emulator
