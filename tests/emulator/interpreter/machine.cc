#include "machine.h"

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <utility>

#include "error.h"
#include "mbarrier.h"
#include "slice.h"

namespace emulator {
namespace {

constexpr size_t kLogLimit = 20000;
constexpr int kReportLimit = 200;
constexpr int kTensorBurst = 24;  // tcgen05 operations a round at most

std::string DescribeState(LaneState state) {
  static constexpr const char* kNames[] = {
      "running",      "waits for its warp's lanes", "waits at bar.warp",
      "waits at bar", "waits for its cluster",      "exited"};
  return kNames[static_cast<int>(state)];
}

}  // namespace

Machine::Machine() { Seed(1); }

void Machine::Seed(uint64_t seed) {
  random_ = seed * 0x9e3779b97f4a7c15ull + 0x1234567;
  for (int i = 0; i < 8; ++i) Random();
}

uint32_t Machine::Random() {
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  return static_cast<uint32_t>(random_ >> 11);
}

double Machine::RandomFraction() { return Random() * 0x1p-32; }

std::string Machine::Where() const {
  if (!warp_) return "";
  const Cta& cta = *warp_->cta;
  return Format(" [rank %d CTA %u warp %u, PTX line %d %s]", cta.cluster->grid->rank, cta.linear,
                warp_->index, instruction_ ? instruction_->line : 0,
                instruction_ ? Name(instruction_->op) : "");
}

void Machine::NoteUninitialised(const char* what, const std::string& where) {
  const int line = instruction_ ? instruction_->line : 0;
  if (uninitialised_lines_[line]++ == 0 && log.size() < kLogLimit) {
    log += "uninitialised " + std::string(what) + " memory read: " + where + Where() + "\n";
  }
  const std::string kind = what;
  (kind == "shared"   ? counts.uninitialised_shared
   : kind == "tensor" ? counts.uninitialised_tensor
                      : counts.uninitialised_global)++;
  if (settings.strict) Fail("read of %s memory that was never written: %s", what, where.c_str());
}

uint8_t* Machine::ResolveGlobal(uint64_t address, uint64_t size, bool write, Order order) {
  Region& region = memory.Find(address, size, write);
  if (region.touched) overlap.Note(region, address, size, write, order);
  if (region.valid) {
    uint8_t* valid = region.valid->data() + (address - region.base);
    if (write) {
      std::memset(valid, 1, size);
    } else if (std::memchr(valid, 0, size)) {
      NoteUninitialised("global", Format("%s+%llu", region.name.c_str(),
                                         static_cast<unsigned long long>(address - region.base)));
    }
  }
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* Machine::ResolveShared(Cta& cta, uint32_t address, uint64_t size, bool write, bool own) {
  uint8_t* bytes = SharedBytes(cta, address, size, own);
  uint8_t* valid = SharedValid(cta, address);
  if (write) {
    std::memset(valid, 1, size);
  } else if (std::memchr(valid, 0, size)) {
    NoteUninitialised("shared", Format("offset %d", static_cast<int>(address & 0xffffff) -
                                                        static_cast<int>(kSharedBase)));
  }
  return bytes;
}

uint8_t* Machine::Resolve(Warp& warp, int lane, Space space, uint64_t address, uint32_t size,
                          bool write, bool noncoherent) {
  if (space == kGeneric) {
    const uint64_t window = address >> 56;
    space = window == 1 ? kClusterShared : window == 2 ? kLocal : kGlobal;
    if (window) address &= 0xffffffff;
  }
  if (address % size) {
    Fail("misaligned %s of %u bytes at 0x%llx", write ? "write" : "read", size,
         static_cast<unsigned long long>(address));
  }
  switch (space) {
    case kShared:
    case kClusterShared: {
      const auto at = static_cast<uint32_t>(address);
      return ResolveShared(*warp.cta, at, size, write, space == kShared);
    }
    case kLocal: {
      const uint64_t bytes = warp.cta->cluster->grid->kernel->local_bytes;
      address &= 0xffffffff;
      if (address + size > bytes) {
        Fail("local access at %llu of %llu bytes", static_cast<unsigned long long>(address),
             static_cast<unsigned long long>(bytes));
      }
      return &warp.local[lane * bytes + address];
    }
    default:
      return ResolveGlobal(address, size, write, {(warp.waited >> lane & 1) != 0, noncoherent});
  }
}

void Machine::UpdateMbarrier(Cta& from, uint32_t address, bool own, int64_t transactions,
                             uint32_t arrivals, bool waited) {
  uint64_t* word = FindMbarrier(from, address, own);
  Mbarrier barrier(*word);
  const uint32_t parity = barrier.parity;
  barrier.Update(transactions, arrivals);
  *word = barrier.Word();
  if (overlap.Tracks()) {
    OrderOfPhases(from, address).Arrive(waited, parity != barrier.parity);
  }
  ++progress;
}

void Machine::Issue(AsyncWork work) {
  work.line = instruction_ ? instruction_->line : 0;
  if (overlap.IsOn()) NoteOverlap(*this, work);
  while (settings.delay == 0) {
    if (Advance(*this, work)) return;
    if (work.kind == AsyncWork::Kind::kArrive) break;  // other work has to come first
  }
  async_.push_back(std::move(work));
}

void Machine::Issue(Cluster& cluster, const TensorOperation& operation) {
  if (settings.delay == 0) return Execute(*this, cluster, operation);
  cluster.tensor_operations.push_back(operation);
}

void Machine::ClearGrids() {
  grids.clear();
  async_.clear();
  warp_ = nullptr;
  instruction_ = nullptr;
}

void Machine::StartCluster(Grid& grid) {
  auto cluster = std::make_unique<Cluster>();
  cluster->grid = &grid;
  const uint64_t index = grid.next++;
  const uint32_t wide = grid.grid[0] / grid.cluster[0], high = grid.grid[1] / grid.cluster[1];
  const uint64_t at[3] = {index % wide, index / wide % high, index / wide / high};
  const uint32_t threads = grid.Threads();
  for (uint32_t rank = 0; rank < grid.ClusterSize(); ++rank) {
    auto cta = std::make_unique<Cta>();
    cta->cluster = cluster.get();
    cta->rank = rank;
    const uint32_t inner[3] = {rank % grid.cluster[0], rank / grid.cluster[0] % grid.cluster[1],
                               rank / grid.cluster[0] / grid.cluster[1]};
    for (int i = 0; i < 3; ++i) {
      cta->id[i] = static_cast<uint32_t>(at[i]) * grid.cluster[i] + inner[i];
    }
    cta->linear = cta->id[0] + grid.grid[0] * (cta->id[1] + grid.grid[1] * cta->id[2]);
    const size_t bytes = kSharedBase + grid.kernel->dynamic_at + grid.dynamic_shared;
    cta->shared.assign(bytes, 0xff);
    cta->shared_valid.assign(bytes, 0);
    cta->live_threads = threads;
    for (uint32_t first = 0; first < threads; first += 32) {
      auto warp = std::make_unique<Warp>();
      warp->cta = cta.get();
      warp->index = first / 32;
      warp->registers.assign(static_cast<size_t>(grid.kernel->num_registers) * 32,
                             0xdeadbeefdeadbeef);
      warp->local.assign(static_cast<size_t>(32) * grid.kernel->local_bytes, 0xff);
      for (uint32_t lane = 0; lane < 32; ++lane) {
        const bool live = first + lane < threads;
        warp->state[lane] = live ? LaneState::kRun : LaneState::kExited;
        if (live) warp->live |= 1u << lane;
      }
      cta->warps.push_back(std::move(warp));
    }
    cluster->ctas.push_back(std::move(cta));
  }
  grid.clusters.push_back(std::move(cluster));
}

void Machine::StartGrids() {
  size_t resident = 0;
  for (const auto& grid : grids) resident += grid->clusters.size() * grid->ClusterSize();
  for (auto& grid : grids) {
    while (grid->next < grid->total && resident < settings.max_resident) {
      StartCluster(*grid);
      resident += grid->ClusterSize();
    }
  }
}

std::vector<Warp*> Machine::LiveWarps() {
  std::vector<Warp*> warps;
  for (auto& grid : grids) {
    for (auto& cluster : grid->clusters) {
      for (auto& cta : cluster->ctas) {
        for (auto& warp : cta->warps) {
          if (warp->live) warps.push_back(warp.get());
        }
      }
    }
  }
  return warps;
}

void Machine::RunWarps(std::vector<Warp*>& order) {
  for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[Random() % i]);
  for (Warp* warp : order) {
    if (warp->parked) {
      if (Parity(*warp->parked) == warp->parked_parity) continue;
      warp->parked = nullptr;
    }
    const int span = settings.slice_max - settings.slice_min + 1;
    Slice(*this, *warp).Run(settings.slice_min + static_cast<int>(Random() % span));
  }
  warp_ = nullptr;
}

void Machine::RunAsync() {
  if (async_.empty()) return;
  std::vector<AsyncWork> pending;
  pending.swap(async_);
  for (size_t i = pending.size(); i > 1; --i) {
    std::swap(pending[i - 1], pending[Random() % i]);
  }
  for (AsyncWork& work : pending) {
    if (RandomFraction() < settings.delay || !Advance(*this, work)) {
      async_.push_back(std::move(work));
    }
  }
  if (!async_.empty() && settings.delay > 0) ++progress;
}

void Machine::RunTensorOperations() {
  for (auto& grid : grids) {
    for (auto& cluster : grid->clusters) {
      auto& queue = cluster->tensor_operations;
      if (queue.empty()) continue;
      ++progress;
      // In order of issue; how many are done a round varies.
      for (uint32_t n = Random() % kTensorBurst; n && !queue.empty(); --n) {
        if (RandomFraction() < settings.delay / 8) break;
        const TensorOperation operation = queue.front();
        queue.pop_front();
        Execute(*this, *cluster, operation);
      }
    }
  }
}

void Machine::Retire() {
  for (auto& grid : grids) {
    for (size_t i = 0; i < grid->clusters.size();) {
      Cluster& cluster = *grid->clusters[i];
      const bool works = std::any_of(async_.begin(), async_.end(), [&](const AsyncWork& work) {
        return work.cta->cluster == &cluster;
      });
      if (cluster.LiveThreads() || works || !cluster.tensor_operations.empty()) {
        ++i;
        continue;
      }
      for (const auto& cta : cluster.ctas) {
        if (cta->tensor_next) {
          Fail("rank %d CTA %u ended with %u columns of tensor memory allocated", grid->rank,
               cta->linear, cta->tensor_next);
        }
        grid->waits |= cta->waits;
        grid->triggers |= cta->triggers;
        grid->late |= cta->Late();
      }
      grid->clusters.erase(grid->clusters.begin() + static_cast<int64_t>(i));
      ++progress;
    }
  }
}

// The processor's own arithmetic for a while: XLA's threads, from which a driver's functions and
// callbacks are called, flush subnormal numbers to zero.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&saved_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t saved_;
};

void Machine::Run() {
  const DefaultArithmetic arithmetic;
  for (auto& grid : grids) grid->id = settings.grid_id ? settings.grid_id : next_grid_id_++;
  uint64_t last_progress = progress, still = 0;
  for (;;) {
    StartGrids();
    std::vector<Warp*> order = LiveWarps();
    const bool left = std::any_of(grids.begin(), grids.end(), [](const auto& grid) {
      return grid->next < grid->total || !grid->clusters.empty();
    });
    if (!left) break;
    ++counts.rounds;
    RunWarps(order);
    RunAsync();
    RunTensorOperations();
    Retire();
    if (progress != last_progress) {
      still = 0;
      last_progress = progress;
    } else if (++still > settings.stall_rounds) {
      Fail("deadlock: no progress in %llu rounds\n%s", static_cast<unsigned long long>(still),
           Report().c_str());
    }
    if (settings.max_instructions && counts.executed > settings.max_instructions) {
      Fail("limit of %llu instructions reached\n%s",
           static_cast<unsigned long long>(settings.max_instructions), Report().c_str());
    }
  }
}

std::string Machine::Report() const {
  std::string text;
  int lines = 0;
  for (const auto& grid : grids) {
    for (const auto& cluster : grid->clusters) {
      for (const auto& cta : cluster->ctas) {
        for (const auto& warp : cta->warps) {
          std::map<std::pair<uint32_t, LaneState>, LaneMask> places;
          ForEachLane(warp->live,
                      [&](int lane) { places[{warp->pc[lane], warp->state[lane]}] |= 1u << lane; });
          for (const auto& [place, lanes] : places) {
            if (lines++ >= kReportLimit) continue;
            const Instruction& inst = grid->kernel->code[place.first];
            const std::string barrier =
                warp->parked ? " for mbarrier: " + Mbarrier(*warp->parked).Describe() : "";
            text +=
                Format("rank %d CTA %u warp %2u lanes %08x %s%s at PTX line %d %s\n", grid->rank,
                       cta->linear, warp->index, lanes, DescribeState(place.second).c_str(),
                       barrier.c_str(), inst.line, Name(inst.op));
          }
        }
      }
    }
  }
  return text;
}

}  // namespace emulator
