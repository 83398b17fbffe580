// Memory: named regions of the process for global memory, and the CTAs' shared memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "overlap.h"
#include "state.h"

namespace emulator {

// Generic addresses of shared and local memory carry these bits.
inline constexpr uint64_t kSharedWindow = 1ull << 56, kLocalWindow = 2ull << 56;
// Offset of a CTA's shared memory in its window: the driver keeps the first KiB.
inline constexpr uint32_t kSharedBase = 1024;
// A shared address is the CTA's rank in the cluster, then 24 bits of offset.
inline constexpr uint32_t SharedAddress(uint32_t rank, uint32_t offset) {
  return rank << 24 | offset;
}

struct Region {
  uint64_t base, size;
  std::string name;
  bool writable;
  std::unique_ptr<std::vector<uint8_t>> valid;  // a flag a byte, where writes are tracked
  std::unique_ptr<std::vector<Touch>> touched;  // a byte each, where overlaps are checked
};

// Global memory. Every access must lie in one region; with `whole_process`, in mapped memory.
class GlobalMemory {
 public:
  bool whole_process = false;

  void Add(uint64_t base, uint64_t size, std::string name, bool writable, bool track);
  void Clear() { regions_.clear(); }
  // Throws Error for an access outside all regions, or a write to a read-only one.
  Region& Find(uint64_t address, uint64_t size, bool write);
  // Flags a byte: whether it was ever written.
  void ReadValid(uint64_t address, uint64_t size, uint8_t* valid);
  void WriteValid(uint64_t address, uint64_t size, const uint8_t* valid);
  void MarkValid(uint64_t address, uint64_t size);
  // Offset of the first byte that was never written; -1 if there is none.
  int64_t FirstInvalid(uint64_t address, uint64_t size);
  // Keeps from now on who touches writable regions; `anew`: forgets who did.
  void KeepTouched(bool anew);
  // The region that an address is in or just behind.
  std::string Near(uint64_t address) const;

 private:
  Region* Lookup(uint64_t address, uint64_t size);
  bool Mapped(uint64_t address, uint64_t size) const;
  void ReadMaps();

  std::vector<Region> regions_;  // by base
  size_t last_ = 0;
  std::vector<std::pair<uint64_t, uint64_t>> maps_;
  Region process_{0, ~0ull, "process memory", true, nullptr, nullptr};
};

// The CTA that a shared address is in.
Cta& CtaOf(Cluster& cluster, uint32_t address);
// Throws Error unless the bytes lie in that CTA's allocation (and it is `from` itself, if `own`).
uint8_t* SharedBytes(Cta& from, uint32_t address, uint64_t size, bool own);
uint8_t* SharedValid(Cta& from, uint32_t address);

}  // namespace emulator
