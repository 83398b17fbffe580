#include "memory.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "error.h"

namespace emulator {

using Number = unsigned long long;  // for printf

void GlobalMemory::Add(uint64_t base, uint64_t size, std::string name, bool writable, bool track) {
  Region region{base, size, std::move(name), writable, nullptr, nullptr};
  if (track) region.valid = std::make_unique<std::vector<uint8_t>>(size, 0);
  const auto by_base = [](const Region& a, uint64_t b) { return a.base < b; };
  auto at = std::lower_bound(regions_.begin(), regions_.end(), base, by_base);
  if (at != regions_.end() && at->base == base) {
    *at = std::move(region);
  } else {
    regions_.insert(at, std::move(region));
  }
  last_ = 0;
}

Region* GlobalMemory::Lookup(uint64_t address, uint64_t size) {
  const auto holds = [&](const Region& r) {
    return address >= r.base && address + size <= r.base + r.size;
  };
  if (last_ < regions_.size() && holds(regions_[last_])) return &regions_[last_];
  const auto by_base = [](uint64_t a, const Region& b) { return a < b.base; };
  auto after = std::upper_bound(regions_.begin(), regions_.end(), address, by_base);
  if (after != regions_.begin() && holds(*--after)) {
    last_ = after - regions_.begin();
    return &*after;
  }
  if (!whole_process) return nullptr;
  if (!Mapped(address, size)) ReadMaps();
  return Mapped(address, size) ? &process_ : nullptr;
}

Region& GlobalMemory::Find(uint64_t address, uint64_t size, bool write) {
  Region* region = Lookup(address, size);
  if (!region) {
    Fail("global %s of %llu bytes at 0x%llx: %s", write ? "write" : "read",
         static_cast<Number>(size), static_cast<Number>(address), Near(address).c_str());
  }
  if (write && !region->writable) {
    Fail("write to read-only %s+%llu", region->name.c_str(),
         static_cast<Number>(address - region->base));
  }
  return *region;
}

void GlobalMemory::ReadValid(uint64_t address, uint64_t size, uint8_t* valid) {
  const Region& region = Find(address, size, false);
  if (region.valid) {
    std::memcpy(valid, region.valid->data() + (address - region.base), size);
  } else {
    std::memset(valid, 1, size);
  }
}

void GlobalMemory::WriteValid(uint64_t address, uint64_t size, const uint8_t* valid) {
  Region& region = Find(address, size, true);
  if (region.valid) std::memcpy(region.valid->data() + (address - region.base), valid, size);
}

void GlobalMemory::MarkValid(uint64_t address, uint64_t size) {
  Region& region = Find(address, size, false);
  if (region.valid) std::memset(region.valid->data() + (address - region.base), 1, size);
}

int64_t GlobalMemory::FirstInvalid(uint64_t address, uint64_t size) {
  Region& region = Find(address, size, false);
  if (!region.valid) return -1;
  const auto first = region.valid->begin() + static_cast<int64_t>(address - region.base);
  const auto found = std::find(first, first + static_cast<int64_t>(size), 0);
  return found == first + static_cast<int64_t>(size) ? -1 : found - first;
}

void GlobalMemory::KeepTouched(bool anew) {
  for (Region& r : regions_) {
    if (r.writable && (anew || !r.touched))
      r.touched = std::make_unique<std::vector<Touch>>(r.size);
  }
}

std::string GlobalMemory::Near(uint64_t address) const {
  const Region* nearest = nullptr;
  for (const Region& r : regions_) {
    const bool near = address >= r.base && address < r.base + r.size + (1 << 20);
    if (near && (!nearest || r.base > nearest->base)) nearest = &r;
  }
  if (!nearest) return "no region";
  return Format("%s+%llu (size %llu)", nearest->name.c_str(),
                static_cast<Number>(address - nearest->base), static_cast<Number>(nearest->size));
}

bool GlobalMemory::Mapped(uint64_t address, uint64_t size) const {
  return std::any_of(maps_.begin(), maps_.end(), [&](const auto& map) {
    return address >= map.first && address + size <= map.second;
  });
}

void GlobalMemory::ReadMaps() {
  maps_.clear();
  FILE* file = std::fopen("/proc/self/maps", "r");
  char line[512];
  while (file && std::fgets(line, sizeof line, file)) {
    Number start = 0, end = 0;
    char readable = '-';
    if (std::sscanf(line, "%llx-%llx %c", &start, &end, &readable) != 3 || readable != 'r')
      continue;
    if (!maps_.empty() && maps_.back().second == start) {
      maps_.back().second = end;
    } else {
      maps_.emplace_back(start, end);
    }
  }
  if (file) std::fclose(file);
}

Cta& CtaOf(Cluster& cluster, uint32_t address) {
  const uint32_t rank = address >> 24;
  if (rank >= cluster.ctas.size()) {
    Fail("shared address 0x%x: CTA %u of a cluster of %zu", address, rank, cluster.ctas.size());
  }
  return *cluster.ctas[rank];
}

uint8_t* SharedBytes(Cta& from, uint32_t address, uint64_t size, bool own) {
  Cta& cta = CtaOf(*from.cluster, address);
  const uint32_t offset = address & 0xffffff;
  if (own && &cta != &from) {
    Fail("shared::cta access to CTA %u's memory, address 0x%x", cta.rank, address);
  }
  if (offset < kSharedBase || offset + size > cta.shared.size()) {
    Fail("shared access of %llu bytes at offset %d of %zu", static_cast<Number>(size),
         static_cast<int>(offset) - static_cast<int>(kSharedBase), cta.shared.size() - kSharedBase);
  }
  return &cta.shared[offset];
}

uint8_t* SharedValid(Cta& from, uint32_t address) {
  return &CtaOf(*from.cluster, address).shared_valid[address & 0xffffff];
}

}  // namespace emulator
