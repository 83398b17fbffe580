#include "overlap.h"

#include <bit>

#include "error.h"
#include "memory.h"

namespace emulator {

void Overlap::Begin(const std::string& name, bool early) {
  Launch launch{name};
  if (!early) {
    chain_.clear();
  } else if (chain_.empty()) {
    Fail("%s is the first launch and may not start early: what it overlaps is unknown",
         name.c_str());
  } else if (chain_.size() == kMaxChain) {
    Fail("%s: more than %zu launches that overlap", name.c_str(), kMaxChain);
  } else {
    const Launch& ahead = chain_.back();
    // It starts once all CTAs ahead let it: where one of them did so after its own wait, all that
    // the wait covers has completed.
    launch.before = 1u << (chain_.size() - 1) | (ahead.late ? ahead.after : ahead.before);
    // The wait covers the launch ahead, and what that one's end implies. A grid of which no thread
    // waits may end before the grids ahead of it.
    launch.after = ahead.waits ? ahead.after : ahead.before;
    // One that let its successor start by its end had no store left to do.
    for (size_t i = 0; i < chain_.size(); ++i) {
      if (chain_[i].triggers) launch.storing |= launch.before & 1u << i;
    }
  }
  chain_.push_back(launch);
}

void Overlap::End(const std::vector<std::unique_ptr<Grid>>& grids) {
  if (!IsOn()) return;
  Launch& launch = chain_.back();
  launch.waits = launch.late = true;
  for (const auto& grid : grids) {
    launch.waits &= grid->waits;
    launch.late &= grid->late;
    launch.triggers |= grid->triggers;
  }
}

void Overlap::Note(Region& region, uint64_t address, uint64_t size, bool write, Order order) {
  const Launch& launch = chain_.back();
  const LaunchSet own = 1u << (chain_.size() - 1);
  LaunchSet writers = order.waited ? launch.after : launch.before;
  const LaunchSet readers = write ? writers : 0;
  if (order.noncoherent) writers |= launch.storing;
  Touch* touched = region.touched->data() + (address - region.base);
  for (uint64_t i = 0; i < size; ++i) {
    if ((touched[i].written & writers) | (touched[i].read & readers)) {
      Refuse(region, address - region.base + i, write, order);
    }
    (write ? touched[i].written : touched[i].read) |= own;
  }
}

void Overlap::Refuse(const Region& region, uint64_t offset, bool write, Order order) const {
  const Launch& launch = chain_.back();
  const LaunchSet unordered = order.waited ? launch.after : launch.before;
  const Touch touch = (*region.touched)[offset];
  const bool stale = order.noncoherent && !(touch.written & unordered);
  const LaunchSet written = touch.written & (stale ? launch.storing : unordered);
  const LaunchSet others = written ? written : touch.read & unordered;
  const char* how = stale          ? "by ld.global.nc, which no wait orders"
                    : order.waited ? "after a griddepcontrol.wait that does not cover it"
                                   : "before griddepcontrol.wait";
  Fail("overlap: %s %s %s+%llu %s: %s, which %s it, may still run", launch.name.c_str(),
       write ? "writes" : "reads", region.name.c_str(), static_cast<unsigned long long>(offset),
       how, chain_[std::bit_width(others) - 1].name.c_str(), written ? "wrote" : "read");
}

}  // namespace emulator
