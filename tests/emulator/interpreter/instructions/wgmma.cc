// Matrix multiplication by a warpgroup (PTX ISA 9.7.15, wgmma.mma_async).
//
// A product is computed when all four warps have come to it; wgmma.fence, .commit_group and
// .wait_group have nothing left to do.
#include <algorithm>

#include "../dot.h"
#include "../numbers.h"
#include "../operands.h"
#include "../step.h"

namespace emulator {
namespace {

constexpr int kRows = 64;

template <typename Holds>
bool AllWarps(const Step& s, Holds&& holds) {
  const uint32_t first = s.warp.index & ~3u;
  for (uint32_t i = first; i < first + 4; ++i) {
    if (i >= s.cta.warps.size()) Fail("wgmma by less than four warps");
    if (!holds(*s.cta.warps[i])) return false;
  }
  return true;
}

// A's rows of this warp: from registers, or from shared memory (which has all 64 rows).
std::vector<float> ReadLeft(const Step& s, Element element, int depth) {
  std::vector<float> rows(16 * static_cast<size_t>(depth));
  if (!s.inst.flags) {
    std::vector<float> all(kRows * static_cast<size_t>(depth));
    std::vector<uint8_t> valid(kRows, 1);
    ReadRows(s.cta, s.Src(2)[0], kRows, element, all.data(), depth, valid.data(), kHopper);
    const size_t start = s.warp.index % 4 * rows.size();
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(start), rows.size(), rows.begin());
    return rows;
  }
  // Word i of a lane: row lane / 4 + 8 (i & 1), from column lane % 4 in the half i / 2 of K.
  const int per_word = 32 / ElementBits(element);
  for (int i = 0; i < 4; ++i) {
    const uint64_t* words = s.Src(2 + i);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (i & 1), k = lane % 4 * per_word + i / 2 * (depth / 2);
      for (int j = 0; j < per_word; ++j) {
        rows[row * depth + k + j] = DecodeElement(element, static_cast<uint32_t>(words[lane]), j);
      }
    }
  }
  return rows;
}

void Multiply(Step& s) {
  const auto left = static_cast<Element>(s.inst.mode2 & 15),
             right = static_cast<Element>(s.inst.mode2 >> 4);
  const int columns = s.inst.mode, depth = 256 / ElementBits(left);
  const uint64_t descriptor = s.Src(0)[0];
  ForEachLane(s.lanes, [&](int l) {
    if (s.Src(0)[l] != descriptor || (!s.inst.flags && s.Src(2)[l] != s.Src(2)[0])) {
      Fail("wgmma: a warp's lanes have different descriptors");
    }
  });
  const bool accumulate = s.Src(1)[0] & 1;
  const std::vector<float> a = ReadLeft(s, left, depth);
  std::vector<float> b(static_cast<size_t>(columns) * depth);
  std::vector<uint8_t> valid(columns, 1);
  ReadRows(s.cta, descriptor, columns, right, b.data(), depth, valid.data(), kHopper);
  const TensorCore core = s.machine.settings.exact_sums ? TensorCore::kBlackwell
                          : depth == 16                 ? TensorCore::kHopper16
                                                        : TensorCore::kHopperFp8;
  // Sum i of a lane: row lane / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2 (lane % 4) + i % 2.
  for (int i = 0; i < s.inst.num_dst; ++i) {
    uint64_t* sums = s.Dst(i);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const float old = accumulate ? ToFloat(sums[lane]) : 0;
      sums[lane] = ToBits(AddDot(core, old, &a[static_cast<size_t>(row) * depth],
                                 &b[static_cast<size_t>(column) * depth], depth));
    }
  }
  ++s.machine.counts.matrix;
  ++s.machine.progress;
}

}  // namespace

Outcome ExecuteWgmma(Step& s) {
  if (!Converge(s, kAllLanes)) return Outcome::kMoved;
  if (s.lanes != kAllLanes) Fail("wgmma by part of a warp");
  Warp& warp = s.warp;
  if (warp.wgmma_arrived == warp.wgmma_done) {
    ++warp.wgmma_arrived;
    ++s.machine.progress;
  }
  const uint64_t turn = warp.wgmma_arrived;
  if (!AllWarps(s, [&](const Warp& w) { return w.wgmma_arrived >= turn; })) return Outcome::kStay;
  const bool together = s.machine.settings.whole_warpgroups;
  if (warp.wgmma_computed < turn) {
    Multiply(s);
    warp.wgmma_computed = turn;
    if (together) return Outcome::kStay;
  }
  if (together && !AllWarps(s, [&](const Warp& w) { return w.wgmma_computed >= turn; })) {
    return Outcome::kStay;
  }
  warp.wgmma_done = turn;
  ++s.machine.progress;
  return Outcome::kNext;
}

}  // namespace emulator
