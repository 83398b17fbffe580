// Tensor memory and the issue of tcgen05 operations (PTX ISA 9.7.16; ../tcgen05_work.cc executes).
#include <cstring>

#include "../memory.h"
#include "../step.h"

namespace emulator {
namespace {

void Alloc(Step& s) {
  const auto columns = static_cast<uint32_t>(s.Src(1)[0]);
  if (columns < 32 || columns > kTensorColumns || !std::has_single_bit(columns)) {
    Fail("tcgen05.alloc of %u columns", columns);
  }
  // Each CTA of a pair executes the instruction, and both get the same columns.
  if (s.cta.tensor.empty()) {
    s.cta.tensor.assign(size_t{kTensorLanes} * kTensorColumns, 0x7fc00000);
    s.cta.tensor_valid.assign(s.cta.tensor.size(), 0);
  }
  if (s.cta.tensor_next + columns > kTensorColumns) {
    Fail("tcgen05.alloc: %u columns of tensor memory are left: it would wait for ever",
         kTensorColumns - s.cta.tensor_next);
  }
  const uint32_t first = s.cta.tensor_next;
  s.cta.tensor_next += columns;
  const auto address = static_cast<uint32_t>(s.Src(0)[0] + s.inst.immediate);
  std::memcpy(s.machine.ResolveShared(s.cta, address, 4, true, true), &first, 4);
  ++s.machine.progress;
}

void Dealloc(Step& s) {
  const auto first = static_cast<uint32_t>(s.Src(0)[0]),
             columns = static_cast<uint32_t>(s.Src(1)[0]);
  if (first + columns != s.cta.tensor_next) {
    Fail("tcgen05.dealloc of columns %u to %u; allocated are %u", first, first + columns,
         s.cta.tensor_next);
  }
  s.cta.tensor_next = first;
  ++s.machine.progress;
}

struct Place {
  uint32_t lane, column;
};

// Where register i of a lane lies, by shape (PTX ISA 9.7.16.2.3, tensor memory data movement).
Place PlaceOf(int shape, uint32_t lane, uint32_t i) {
  switch (shape) {
    case 0:  // 32x32b
      return {lane, i};
    case 2:  // 16x128b
      return {lane / 4 + 8 * (i & 1), i / 2 * 4 + lane % 4};
    default:  // 16x256b
      return {lane / 4 + 8 * (i / 2 & 1), i / 4 * 8 + lane % 4 * 2 + (i & 1)};
  }
}

// A warp reaches the 32 lanes that its index modulo 4 names.
void Move(Step& s) {
  const bool load = s.inst.op == Op::kTensorLd;
  const auto address = static_cast<uint32_t>(s.Src(0)[0] + s.inst.immediate);
  ForEachLane(s.lanes, [&](int l) {
    if (static_cast<uint32_t>(s.Src(0)[l] + s.inst.immediate) != address) {
      Fail("%s: a warp's lanes have different addresses", Name(s.inst.op));
    }
  });
  const uint32_t quarter = s.warp.index % 4 * 32, at = address >> 16, column0 = address & 0xffff;
  if ((at & 0x60) && (at & 0x60) != quarter) {
    Fail("%s of tensor memory lane %u by warp %u", Name(s.inst.op), at, s.warp.index);
  }
  if (s.inst.mode && (at & 15)) Fail("%s: 16 lanes from lane %u", Name(s.inst.op), at);
  const int registers = load ? s.inst.num_dst : s.inst.num_src - 1;
  bool invalid = false;
  for (int i = 0; i < registers; ++i) {
    for (uint32_t l = 0; l < 32; ++l) {
      Place place = PlaceOf(s.inst.mode, l, i);
      place.lane += quarter + (at & 31);
      place.column += column0;
      if (place.lane >= kTensorLanes || place.column >= s.cta.tensor_next) {
        Fail("tensor memory lane %u column %u; %u columns are allocated", place.lane, place.column,
             s.cta.tensor_next);
      }
      const size_t index = static_cast<size_t>(place.lane) * kTensorColumns + place.column;
      if (load) {
        s.Dst(i)[l] = s.cta.tensor[index];
        invalid |= !s.cta.tensor_valid[index];
      } else {
        s.cta.tensor[index] = static_cast<uint32_t>(s.Src(1 + i)[l]);
        s.cta.tensor_valid[index] = 1;
      }
    }
  }
  if (invalid) s.machine.NoteUninitialised("tensor", Format("address 0x%x", address));
  if (!load) ++s.machine.progress;
}

void Issue(Step& s) {
  ForEachLane(s.lanes, [&](int l) {
    TensorOperation operation{};
    operation.op = s.inst.op;
    for (int i = 0; i < s.inst.num_src; ++i) operation.source[i] = s.Src(i)[l];
    operation.mode = s.inst.mode;
    operation.mode2 = s.inst.mode2;
    operation.flags = s.inst.flags;
    operation.line = s.inst.line;
    operation.issuer = s.cta.rank;
    operation.waited = s.Waited(l);
    s.machine.Issue(s.cluster, operation);
  });
}

}  // namespace

Outcome ExecuteTcgen05(Step& s) {
  switch (s.inst.op) {
    case Op::kTensorCopy:
    case Op::kTensorMma:
    case Op::kTensorCommit:
      Issue(s);
      return Outcome::kNext;
    default:
      break;
  }
  if (!Converge(s, kAllLanes)) return Outcome::kMoved;
  if (s.lanes != kAllLanes) Fail("%s by part of a warp", Name(s.inst.op));
  switch (s.inst.op) {
    case Op::kTensorAlloc:
      Alloc(s);
      break;
    case Op::kTensorDealloc:
      Dealloc(s);
      break;
    case Op::kTensorWait:
      break;
    default:
      Move(s);
  }
  return Outcome::kNext;
}

}  // namespace emulator
