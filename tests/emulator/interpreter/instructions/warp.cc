// Exchange within a warp (PTX ISA 9.7.9 shfl.sync; 9.7.13 vote.sync, match.sync, redux.sync,
// activemask, elect.sync).
#include <cstring>

#include "../numbers.h"
#include "../step.h"

namespace emulator {
namespace {

// Values of a source in all lanes, before any destination is written.
struct Values {
  uint64_t at[32];
  explicit Values(const uint64_t* source) { std::memcpy(at, source, sizeof at); }
  uint64_t operator[](int lane) const { return at[lane]; }
};

void Shuffle(const Step& s) {
  const Values a(s.Src(0)), b(s.Src(1)), c(s.Src(2));
  uint64_t* d = s.Dst(0);
  uint64_t* p = s.inst.num_dst > 1 ? s.Dst(1) : nullptr;
  ForEachLane(s.lanes, [&](int l) {
    const int b_low = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    const int highest = (l & segment) | (clamp & ~segment), lowest = l & segment;
    int from = 0;
    bool within = false;
    switch (s.inst.mode) {
      case 0:  // up
        from = l - b_low;
        within = from >= highest;
        break;
      case 1:  // down
        from = l + b_low;
        within = from <= highest;
        break;
      case 2:  // bfly
        from = l ^ b_low;
        within = from <= highest;
        break;
      default:  // idx
        from = lowest | (b_low & ~segment);
        within = from <= highest;
    }
    if (!within) from = l;
    if (!(s.lanes >> from & 1)) {
      Fail("shfl reads lane %d, outside the executing lanes %08x", from, s.lanes);
    }
    d[l] = a[from] & 0xffffffff;
    if (p) p[l] = within;
  });
}

void Vote(const Step& s) {
  const uint64_t* a = s.Src(0);
  LaneMask ballot = 0;
  ForEachLane(s.lanes, [&](int l) { ballot |= static_cast<LaneMask>(a[l] & 1) << l; });
  const uint64_t results[] = {ballot == s.lanes, ballot != 0, ballot == 0 || ballot == s.lanes,
                              ballot};
  uint64_t* d = s.Dst();
  ForEachLane(s.lanes, [&](int l) { d[l] = results[s.inst.mode]; });
}

// redux.sync of float32: with .NaN a NaN is returned, else it does not count; .abs compares
// magnitudes (sm_100a).
uint64_t ReduceFloats(const Step& s, const Values& a) {
  float result = NAN;
  bool first = true;
  if (s.inst.mode != 1 && s.inst.mode != 2) Fail("redux of floats other than min and max");
  ForEachLane(s.lanes, [&](int l) {
    float value = ToFloat(a[l]);
    if (s.inst.flags & kAbs) value = std::fabs(value);
    result = first ? value : MinMax(result, value, s.inst.mode == 2, s.inst.flags & kNan);
    first = false;
  });
  return std::isnan(result) ? kNanF32 : ToBits(result);
}

void Redux(const Step& s) {
  static constexpr AtomicOp kOps[] = {AtomicOp::kAdd, AtomicOp::kMin, AtomicOp::kMax,
                                      AtomicOp::kAnd, AtomicOp::kOr,  AtomicOp::kXor};
  const Values a(s.Src(0));
  uint64_t result = 0;
  if (s.inst.type == Type::kF32) {
    result = ReduceFloats(s, a);
  } else {
    bool first = true;
    ForEachLane(s.lanes, [&](int l) {
      result = first ? Mask(a[l], 32) : Combine(kOps[s.inst.mode], s.inst.type, result, a[l], 0);
      first = false;
    });
  }
  uint64_t* d = s.Dst();
  ForEachLane(s.lanes, [&](int l) { d[l] = result; });
}

void Match(const Step& s) {
  const Values a(s.Src(0));
  const int bits = Bits(s.inst.type);
  uint64_t* d = s.Dst(0);
  LaneMask equal[32] = {};
  ForEachLane(s.lanes, [&](int l) {
    ForEachLane(s.lanes, [&](int other) {
      if (Mask(a[l], bits) == Mask(a[other], bits)) equal[l] |= 1u << other;
    });
  });
  ForEachLane(s.lanes, [&](int l) {
    const bool all = equal[l] == s.lanes;
    d[l] = !s.inst.mode || all ? equal[l] : 0;
    if (s.inst.num_dst > 1) s.Dst(1)[l] = all;
  });
}

// Keeps the lanes that name the same member mask as the first one; the others come next.
LaneMask TakeMembers(Step& s) {
  static constexpr int kPlaces[] = {3, 1, 1, 1, 0};  // of shfl, vote, redux, match, elect
  const int place = kPlaces[static_cast<int>(s.inst.op) - static_cast<int>(Op::kShuffle)];
  const uint64_t* masks = s.Src(place);
  const auto members = static_cast<LaneMask>(masks[s.FirstLane()]);
  LaneMask same = 0;
  ForEachLane(s.lanes, [&](int l) {
    if (static_cast<LaneMask>(masks[l]) == members) same |= 1u << l;
  });
  if (same != s.lanes) {
    s.Move(s.lanes & ~same, s.front.pc);
    s.front.lanes = s.lanes = same;
    s.front.other = std::min(s.front.other, s.front.pc);
  }
  return members;
}

}  // namespace

Outcome ExecuteWarp(Step& s) {
  if (s.inst.op == Op::kActiveMask) {
    uint64_t* d = s.Dst();
    ForEachLane(s.lanes, [&](int l) { d[l] = s.lanes; });
    return Outcome::kNext;
  }
  if (!Converge(s, TakeMembers(s))) return Outcome::kMoved;
  switch (s.inst.op) {
    case Op::kShuffle:
      Shuffle(s);
      break;
    case Op::kVote:
      Vote(s);
      break;
    case Op::kRedux:
      Redux(s);
      break;
    case Op::kMatch:
      Match(s);
      break;
    default: {  // kElect: the lowest lane
      const int elected = s.FirstLane();
      ForEachLane(s.lanes, [&](int l) {
        s.Dst(0)[l] = elected;
        s.Dst(1)[l] = l == elected;
      });
    }
  }
  return Outcome::kNext;
}

}  // namespace emulator
