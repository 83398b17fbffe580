// Launches of a stream that overlap: which accesses of one come too early for another.
//
// Launches run one after another here. On a GPU a launch with the attribute of programmatic stream
// serialization ("early") starts as soon as every CTA of the launch ahead has executed
// griddepcontrol.launch_dependents or exited, without that launch's stores being visible yet;
// griddepcontrol.wait blocks a thread until the prerequisite grids have completed and their memory
// is visible (PTX ISA 9.7.13, griddepcontrol; CUDA Programming Guide, Programmatic Dependent
// Launch). So what an early launch touches is held against what the launches ahead touched that
// may still be running, as if every launch started as soon as it may.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "state.h"

namespace emulator {

struct Region;

// Launches of a chain as bits: the first, an ordinary one, is bit 0; early ones follow it.
using LaunchSet = uint8_t;
inline constexpr size_t kMaxChain = 8;

// Which launches of the chain read and wrote a byte.
struct Touch {
  LaunchSet read = 0, written = 0;
};

// What orders an access behind the launches ahead.
struct Order {
  bool waited = true;        // its thread has waited, or is behind one that has
  bool noncoherent = false;  // ld.global.nc, which the memory consistency model leaves out
};

class Overlap {
 public:
  // Begins a launch. One that is not early starts when all before it have completed.
  void Begin(const std::string& name, bool early);
  // Keeps what the launch's grids did about their dependencies, all ranks' counted as one.
  void End(const std::vector<std::unique_ptr<Grid>>& grids);
  bool IsOn() const { return !chain_.empty(); }
  // Whether it matters in this launch who has waited.
  bool Tracks() const { return IsOn() && chain_.back().before; }
  // Throws Error where an access comes too early.
  void Note(Region& region, uint64_t address, uint64_t size, bool write, Order order);

 private:
  struct Launch {
    std::string name;
    LaunchSet before = 0;   // that may still be running when the launch starts
    LaunchSet after = 0;    // ... even when a thread of it has waited
    LaunchSet storing = 0;  // of `before`, those that let it start while they still store
    bool waits = false;     // a thread waited: the launch completes after those ahead of it
    bool late = false;      // it lets its successor start only after such a wait
    bool triggers = false;  // it lets its successor start before its own end
  };
  [[noreturn]] void Refuse(const Region& region, uint64_t offset, bool write, Order order) const;

  std::vector<Launch> chain_;
};

}  // namespace emulator
