// Bulk copies and reductions (PTX ISA 9.7.9: cp.async.bulk, cp.reduce.async.bulk, their groups).
#include "../mbarrier.h"
#include "../step.h"

namespace emulator {
namespace {

void CheckAlignment(const AsyncWork& work, uint64_t other) {
  if ((work.shared | other | work.size) % 16) {
    Fail("bulk copy of %u bytes between 0x%x and 0x%llx: all must be multiples of 16", work.size,
         work.shared, static_cast<unsigned long long>(other));
  }
}

AsyncWork Make(const Step& s, AsyncWork::Kind kind, int lane) {
  AsyncWork work = WorkOf(s, kind, lane);
  if (s.inst.op == Op::kBulkReduce) {
    work.reduction = s.inst.mode2;
    work.type = s.inst.type;
  }
  return work;
}

// mode: to the same offsets of each CTA of a mask.
void Load(Step& s) {
  ForEachLane(s.lanes, [&](int l) {
    AsyncWork work = Make(s, AsyncWork::Kind::kBulkLoad, l);
    work.shared = static_cast<uint32_t>(s.Src(0)[l]);
    work.global = s.Src(1)[l];
    work.size = static_cast<uint32_t>(s.Src(2)[l]);
    work.barrier = static_cast<uint32_t>(s.Src(3)[l]);
    CheckAlignment(work, work.global);
    FindMbarrier(s.cta, work.barrier, false);
    if (!s.inst.mode) return s.machine.Issue(std::move(work));
    for (uint32_t rank = 0; rank < 16; ++rank) {
      if (!(s.Src(4)[l] >> rank & 1)) continue;
      AsyncWork copy = work;
      copy.shared = SharedAddress(rank, work.shared & 0xffffff);
      copy.barrier = SharedAddress(rank, work.barrier & 0xffffff);
      s.machine.Issue(std::move(copy));
    }
  });
}

void Store(Step& s) {
  ForEachLane(s.lanes, [&](int l) {
    AsyncWork work = Make(s, AsyncWork::Kind::kBulkStore, l);
    work.global = s.Src(0)[l];
    work.shared = static_cast<uint32_t>(s.Src(1)[l]);
    work.size = static_cast<uint32_t>(s.Src(2)[l]);
    CheckAlignment(work, work.global);
    work.group = s.warp.bulk[l].Join();
    s.machine.Issue(std::move(work));
  });
}

void Shared(Step& s) {
  ForEachLane(s.lanes, [&](int l) {
    AsyncWork work = Make(s, AsyncWork::Kind::kBulkShared, l);
    work.shared = static_cast<uint32_t>(s.Src(0)[l]);
    work.shared_source = static_cast<uint32_t>(s.Src(1)[l]);
    work.size = static_cast<uint32_t>(s.Src(2)[l]);
    work.barrier = static_cast<uint32_t>(s.Src(3)[l]);
    CheckAlignment(work, work.shared_source);
    CheckOneCta(s, work);
    s.machine.Issue(std::move(work));
  });
}

void Commit(Step& s) {
  ForEachLane(s.lanes, [&](int l) { s.warp.bulk[l].Commit(); });
}

// All but the last N groups are done; with .read (mode), their sources have been read.
Outcome Wait(Step& s) {
  bool done = true;
  ForEachLane(s.lanes, [&](int l) {
    const auto found = s.warp.bulk.find(l);
    if (found == s.warp.bulk.end()) return;
    auto& groups = found->second.committed;
    while (!groups.empty() && !groups.front()->unwritten) groups.pop_front();
    const auto waited = static_cast<int64_t>(groups.size()) - s.inst.immediate;
    for (int64_t i = 0; i < waited; ++i) {
      done &= s.inst.mode ? groups[i]->unread == 0 : groups[i]->unwritten == 0;
    }
  });
  return done ? Outcome::kNext : Outcome::kStay;
}

}  // namespace

Outcome ExecuteBulkCopy(Step& s) {
  switch (s.inst.op) {
    case Op::kBulkLoad:
      Load(s);
      break;
    case Op::kBulkStore:
      Store(s);
      break;
    case Op::kBulkShared:
      Shared(s);
      break;
    case Op::kBulkReduce:  // mode: to shared memory
      s.inst.mode ? Shared(s) : Store(s);
      break;
    case Op::kBulkCommit:
      Commit(s);
      break;
    default:
      return Wait(s);
  }
  return Outcome::kNext;
}

}  // namespace emulator
