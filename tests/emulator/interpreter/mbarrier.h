// mbarrier objects (PTX ISA 9.7.13.15): 64 bits in shared memory.
//
// The layout is this emulator's own, the ISA keeps it opaque: bits 0 to 19 the expected count, 20
// to 39 the pending count, 40 to 60 the transaction count (signed), 61 the phase's parity, 62 and
// 63 the value 2, by which an object that was never initialised is told.
#pragma once

#include <cstdint>
#include <string>

#include "state.h"

namespace emulator {

inline constexpr uint32_t kMaxArrivals = (1 << 20) - 1;

struct Mbarrier {
  uint32_t expected, pending;
  int64_t transactions;
  uint32_t parity;

  explicit Mbarrier(uint64_t word);
  Mbarrier(uint32_t count) : expected(count), pending(count), transactions(0), parity(0) {}
  uint64_t Word() const;
  // Adds to the counts; a phase that is complete ends. Throws Error for arrivals beyond the count.
  void Update(int64_t transactions_added, uint32_t arrivals);
  std::string Describe() const;
};

inline uint32_t Parity(uint64_t word) { return word >> 61 & 1; }
// An initialised object's word; throws Error for another address.
uint64_t* FindMbarrier(Cta& from, uint32_t address, bool own);
// What is known of an object's phases where overlaps are checked.
PhaseOrder& OrderOfPhases(Cta& from, uint32_t address);

}  // namespace emulator
