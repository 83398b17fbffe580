#include "slice.h"

namespace emulator {
namespace {

using Handler = Outcome (*)(Step&);
enum Kind { kPlain, kWhole };
struct OpInfo {
  const char* name;
  Handler handler;
  Kind kind;
};
constexpr OpInfo kOps[] = {
#define OP(name, class, kind) {#name, Execute##class, kind},
#include "opcodes.def"
#undef OP
};

}  // namespace

const char* Name(Op op) { return kOps[static_cast<int>(op)].name; }

bool Slice::Select(bool any) {
  LaneMask running = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (warp_.state[lane] == LaneState::kRun) running |= 1u << lane;
  }
  front_ = Front{};
  if (!running) return false;
  front_.pc = ~0u;
  if (any) {
    LaneMask rest = running;
    for (uint32_t skip = machine_.Random() % std::popcount(running); skip; --skip) rest &= rest - 1;
    front_.pc = warp_.pc[std::countr_zero(rest)];
  } else {
    ForEachLane(running, [&](int lane) { front_.pc = std::min(front_.pc, warp_.pc[lane]); });
  }
  ForEachLane(running, [&](int lane) {
    if (warp_.pc[lane] == front_.pc) {
      front_.lanes |= 1u << lane;
    } else {
      front_.other = std::min(front_.other, warp_.pc[lane]);
    }
  });
  return true;
}

void Slice::Leave() {
  ForEachLane(front_.lanes, [&](int lane) { warp_.pc[lane] = front_.pc; });
}

Outcome Slice::Execute(const Instruction& inst) {
  Cta& cta = *warp_.cta;
  Cluster& cluster = *cta.cluster;
  const Kernel& kernel = *cluster.grid->kernel;
  const OpInfo& info = kOps[static_cast<int>(inst.op)];
  LaneMask lanes = front_.lanes;
  if (inst.predicate >= 0) {
    const uint64_t* predicate = &warp_.registers[static_cast<size_t>(inst.predicate) * 32];
    ForEachLane(front_.lanes, [&](int lane) {
      if ((predicate[lane] & 1) == static_cast<uint64_t>(inst.negated)) lanes &= ~(1u << lane);
    });
    if (!lanes) return Outcome::kNext;
    if (lanes != front_.lanes && info.kind == kWhole) {  // the others are past it
      ForEachLane(front_.lanes & ~lanes, [&](int lane) { warp_.pc[lane] = front_.pc + 1; });
      front_.lanes = lanes;
      front_.other = std::min(front_.other, front_.pc + 1);
    }
  }
  ++machine_.counts.executed;
  ++machine_.clock;
  Step step{machine_, warp_, cta, cluster, *cluster.grid, kernel, inst, front_, lanes};
  return info.handler(step);
}

void Slice::Run(int budget) {
  const Instruction* code = warp_.cta->cluster->grid->kernel->code;
  machine_.warp_ = &warp_;
  bool any = warp_.diverge && machine_.settings.diverge;  // until the lanes meet others
  warp_.diverge = false;
  if (!Select(any)) return;
  while (budget-- > 0) {
    if (any ? front_.pc == front_.other : front_.pc >= front_.other) {
      Leave();
      any = false;
      if (!Select(false)) return;
    }
    const Instruction& inst = code[front_.pc];
    machine_.instruction_ = &inst;
    switch (Execute(inst)) {
      case Outcome::kNext:
        ++front_.pc;
        break;
      case Outcome::kNextYield:
        ++front_.pc;
        Leave();
        warp_.diverge = front_.other != ~0u && (machine_.Random() & 1);
        return;
      case Outcome::kStay:
        Leave();
        warp_.diverge = machine_.Random() & 1;
        return;
      case Outcome::kMoved:
        any = false;
        if (!Select(false)) return;
        break;
    }
  }
  Leave();
  warp_.diverge = front_.other != ~0u && (machine_.Random() & 3) == 0;
}

bool Converge(Step& s, LaneMask members) {
  members &= s.warp.live;
  if (s.lanes & ~members) {
    Fail("%s executed by lanes %08x outside its member mask %08x", Name(s.inst.op), s.lanes,
         members);
  }
  LaneMask here = s.lanes;
  for (int lane = 0; lane < 32; ++lane) {
    if (s.warp.state[lane] == LaneState::kCollective && s.warp.pc[lane] == s.front.pc) {
      here |= 1u << lane;
    }
  }
  if (members & ~here) {
    s.Move(s.lanes, s.front.pc, LaneState::kCollective);
    return false;
  }
  here &= members;
  s.Move(here, s.front.pc);
  s.front.lanes |= here;
  s.lanes = here;
  return true;
}

}  // namespace emulator
