// The machine: memory, kernels, the grids of a launch, and the order in which warps run.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "async_work.h"
#include "instruction.h"
#include "memory.h"
#include "overlap.h"
#include "state.h"

namespace emulator {

struct Settings {
  double delay = 0;                    // chance a round that asynchronous work stays pending
  uint64_t stall_rounds = 3000;        // rounds without progress that are a deadlock
  uint64_t max_instructions = 0;       // of a machine; 0: no limit
  int slice_min = 8, slice_max = 200;  // instructions of a warp's turn
  bool strict = false;                 // a read of bytes that were never written is an error
  bool diverge = true;  // diverged lanes may run in any order, not just lowest address first
  bool whole_warpgroups = true;  // a warpgroup's warps leave a wgmma together
  bool exact_sums = false;       // Hopper's tensor cores add as nearly exactly as Blackwell's
  uint64_t grid_id = 0;          // %gridid of every grid, as graph replays have; 0: counted
  uint64_t smid_offset = 0;      // %smid of the first CTA
  size_t max_resident = 4096;    // CTAs
};

struct Counts {
  uint64_t executed = 0, rounds = 0, matrix = 0, launches = 0;
  uint64_t uninitialised_shared = 0, uninitialised_tensor = 0, uninitialised_global = 0;
};

class Machine {
 public:
  Settings settings;
  Counts counts;
  GlobalMemory memory;
  Overlap overlap;
  std::vector<std::unique_ptr<Kernel>> kernels;
  std::vector<std::unique_ptr<Grid>> grids;
  std::string error, log;
  uint64_t progress = 0;  // counts what changed the state: without it, a deadlock
  uint64_t clock = 0;

  Machine();
  void Seed(uint64_t seed);
  // Runs all grids to their end, together; throws Error.
  void Run();
  void ClearGrids();

  // An address of any space as bytes of this process; throws Error outside of what may be accessed.
  uint8_t* Resolve(Warp& warp, int lane, Space space, uint64_t address, uint32_t size, bool write,
                   bool noncoherent = false);
  uint8_t* ResolveGlobal(uint64_t address, uint64_t size, bool write, Order order = {});
  uint8_t* ResolveShared(Cta& cta, uint32_t address, uint64_t size, bool write, bool own);
  // Counts a read of bytes that were never written; an error in strict mode.
  void NoteUninitialised(const char* what, const std::string& where);

  // `waited`: what arrives is behind a griddepcontrol.wait.
  void UpdateMbarrier(Cta& from, uint32_t address, bool own, int64_t transactions,
                      uint32_t arrivals, bool waited);
  void Issue(AsyncWork work);
  void Issue(Cluster& cluster, const TensorOperation& operation);

  uint32_t Random();
  double RandomFraction();
  // The instruction being executed, for messages.
  std::string Where() const;
  bool IsRunning(const Warp& warp) const { return warp_ == &warp; }

 private:
  friend class Slice;
  void StartGrids();
  void StartCluster(Grid& grid);
  std::vector<Warp*> LiveWarps();
  void RunWarps(std::vector<Warp*>& order);
  void RunAsync();
  void RunTensorOperations();
  void Retire();
  std::string Report() const;

  std::vector<AsyncWork> async_;
  uint64_t random_ = 1, next_grid_id_ = 1;
  std::map<int, uint64_t> uninitialised_lines_;
  Warp* warp_ = nullptr;
  const Instruction* instruction_ = nullptr;
};

// Executes a tcgen05 operation that was issued before (tcgen05_work.cc).
void Execute(Machine& machine, Cluster& cluster, const TensorOperation& operation);

}  // namespace emulator
