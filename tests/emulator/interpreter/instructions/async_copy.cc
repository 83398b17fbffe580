// Non-bulk asynchronous copies and stores (PTX ISA 9.7.9: cp.async, cp.async.mbarrier.arrive,
// st.async; 9.7.13: red.async).
#include <cstring>

#include "../step.h"

namespace emulator {
namespace {

void Copy(Step& s) {
  const uint64_t *to = s.Src(0), *from = s.Src(1), *sizes = s.Src(2);
  const auto size = static_cast<uint32_t>(s.inst.mode);
  ForEachLane(s.lanes, [&](int l) {
    AsyncWork work = WorkOf(s, AsyncWork::Kind::kCopy, l);
    work.shared = static_cast<uint32_t>(to[l]);
    work.global = from[l];
    work.size = size;
    work.source_size = std::min(static_cast<uint32_t>(sizes[l]), size);
    if (work.shared % size || work.global % size) Fail("cp.async: misaligned by %u bytes", size);
    work.group = s.warp.copies[l].Join();
    s.machine.Issue(std::move(work));
  });
}

void Commit(Step& s) {
  ForEachLane(s.lanes, [&](int l) { s.warp.copies[l].Commit(); });
}

// wait_group: all but the last N committed; wait_all (mode): the open one too.
Outcome Wait(Step& s) {
  bool done = true;
  ForEachLane(s.lanes, [&](int l) {
    const auto found = s.warp.copies.find(l);
    if (found == s.warp.copies.end()) return;
    auto& groups = found->second;
    while (!groups.committed.empty() && !groups.committed.front()->unwritten) {
      groups.committed.pop_front();
    }
    done &= static_cast<int64_t>(groups.committed.size()) <= s.inst.immediate;
    if (s.inst.mode && groups.open) done &= !groups.open->unwritten;
  });
  return done ? Outcome::kNext : Outcome::kStay;
}

// An arrival when the thread's copies so far are done. Without .noinc the pending count grows by
// one now, so that the arrival leaves it as it was.
void Arrive(Step& s) {
  const uint64_t* base = s.Src();
  ForEachLane(s.lanes, [&](int l) {
    const auto address = static_cast<uint32_t>(base[l] + s.inst.immediate);
    if (!s.inst.mode) Fail("cp.async.mbarrier.arrive without .noinc is not emulated");
    AsyncWork work = WorkOf(s, AsyncWork::Kind::kArrive, l);
    work.barrier = address;
    const CopyGroups& groups = s.warp.copies[l];
    work.after.assign(groups.committed.begin(), groups.committed.end());
    if (groups.open) work.after.push_back(groups.open);
    s.machine.Issue(std::move(work));
  });
}

void Store(Step& s) {
  const uint64_t *to = s.Src(0), *barrier = s.Src(1);
  const int size = Bits(s.inst.type) / 8, count = s.inst.num_src - 2;
  ForEachLane(s.lanes, [&](int l) {
    AsyncWork work = WorkOf(s, AsyncWork::Kind::kStoreAsync, l);
    work.shared = static_cast<uint32_t>(to[l]);
    work.barrier = static_cast<uint32_t>(barrier[l]);
    work.size = size * count;
    work.type = s.inst.type;
    if (s.inst.op == Op::kReduceAsync) work.reduction = s.inst.mode2;
    if (work.shared % work.size) Fail("%s: misaligned", Name(s.inst.op));
    CheckOneCta(s, work);
    for (int i = 0; i < count; ++i) std::memcpy(work.data + i * size, &s.Src(2 + i)[l], size);
    s.machine.Issue(std::move(work));
  });
}

}  // namespace

void CheckOneCta(const Step& step, const AsyncWork& work) {
  if (work.shared >> 24 != work.barrier >> 24) {
    Fail("%s: data and mbarrier in different CTAs", Name(step.inst.op));
  }
}

Outcome ExecuteAsyncCopy(Step& s) {
  switch (s.inst.op) {
    case Op::kCopyAsync:
      Copy(s);
      break;
    case Op::kCopyCommit:
      Commit(s);
      break;
    case Op::kCopyWait:
      return Wait(s);
    case Op::kCopyArrive:
      Arrive(s);
      break;
    default:
      Store(s);
  }
  return Outcome::kNext;
}

}  // namespace emulator
