// Tensor copies by TMA (PTX ISA 9.7.9: cp.async.bulk.tensor, cp.reduce.async.bulk.tensor).
#include <cstring>

#include "../mbarrier.h"
#include "../step.h"

namespace emulator {
namespace {

// The map that an operand points to, and the coordinates that follow it.
void ReadMap(const Step& s, int lane, int place, AsyncWork& work) {
  const uint64_t address = s.Src(place)[lane];
  std::memcpy(&work.map, s.machine.ResolveGlobal(address, 128, false), sizeof work.map);
  if (work.map.magic != kTensorMapMagic) {
    Fail("no tensor map at 0x%llx (%s)", static_cast<unsigned long long>(address),
         s.machine.memory.Near(address).c_str());
  }
  if (address % 64)
    Fail("tensor map at 0x%llx: misaligned", static_cast<unsigned long long>(address));
  if (work.map.rank != s.inst.mode) {
    Fail("tensor map of rank %d used with %d coordinates", work.map.rank, s.inst.mode);
  }
  for (int i = 0; i < s.inst.mode; ++i) {
    work.coordinates[i] = static_cast<int32_t>(s.Src(place + 1 + i)[lane]);
  }
}

// An H200 stops with an illegal instruction at both; the PTX ISA does not name either rule.
void CheckLoadCoordinates(const AsyncWork& work) {
  const int64_t bits = int64_t{work.coordinates[0]} * work.map.ElementBits();
  if (work.map.rank == 1 && bits % 128) {
    Fail("TMA: load of a tensor of one dimension at element %d, not a multiple of 16 bytes",
         work.coordinates[0]);
  }
}

void CheckStoreCoordinates(const AsyncWork& work) {
  for (int i = 1; i < work.map.rank; ++i) {
    if (work.coordinates[i] < 0) {
      Fail("TMA: store at coordinate %d of dimension %d, below zero", work.coordinates[i], i);
    }
  }
}

void Load(Step& s, int lane) {
  AsyncWork work = WorkOf(s, AsyncWork::Kind::kTensorLoad, lane);
  work.shared = static_cast<uint32_t>(s.Src(0)[lane]);
  work.barrier = static_cast<uint32_t>(s.Src(1)[lane]);
  ReadMap(s, lane, 2, work);
  CheckLoadCoordinates(work);
  // With cta_group::2 (flags) the mbarrier may be the other CTA's of the pair.
  const uint32_t data = work.shared >> 24, barrier = work.barrier >> 24;
  if (data != s.cta.rank) Fail("TMA: destination in CTA %u", data);
  if (barrier != data && !(s.inst.flags && (barrier ^ data) == 1)) {
    Fail("TMA: mbarrier in CTA %u, data in CTA %u", barrier, data);
  }
  FindMbarrier(s.cta, work.barrier, false);
  if (!s.inst.mode2) return s.machine.Issue(std::move(work));
  // To the same offsets of each CTA of the mask, each with its own mbarrier.
  const uint64_t mask = s.Src(s.inst.num_src - 1)[lane] & 0xffff;
  for (uint32_t rank = 0; rank < 16; ++rank) {
    if (!(mask >> rank & 1)) continue;
    AsyncWork copy = work;
    copy.shared = SharedAddress(rank, work.shared & 0xffffff);
    copy.barrier = SharedAddress(rank, work.barrier & 0xffffff);
    s.machine.Issue(std::move(copy));
  }
}

void Store(Step& s, int lane) {
  AsyncWork work = WorkOf(s, AsyncWork::Kind::kTensorStore, lane);
  work.shared = static_cast<uint32_t>(s.Src(0)[lane]);
  work.reduction = s.inst.mode2 - 1;
  ReadMap(s, lane, 1, work);
  CheckStoreCoordinates(work);
  work.group = s.warp.bulk[lane].Join();
  s.machine.Issue(std::move(work));
}

}  // namespace

Outcome ExecuteTensorCopy(Step& s) {
  ForEachLane(s.lanes, [&](int l) { s.inst.op == Op::kTensorStore ? Store(s, l) : Load(s, l); });
  return Outcome::kNext;
}

}  // namespace emulator
