// tcgen05.mma, .cp and .commit (PTX ISA 9.7.16): what they do when their turn comes.
//
// Rules and where they stand:
// - The instruction descriptor's fields: PTX ISA 9.7.16.4.2, Instruction descriptor, tables for
//   kind::f16, ::f8f6f4, ::mxf8f6f4 and ::mxf4*; CUTLASS, cute/arch/mma_sm100_desc.hpp,
//   InstrDescriptor and InstrDescriptorBlockScaled.
// - A CTA pair: A and the accumulator are halved by rows over the two CTAs, B by columns; each
//   reads its own scales, B's in full (PTX ISA 9.7.16.10, cta_group::2 data path organisation).
// - Scales: row r of 128 is in lane r % 32, column r / 32 of its tensor memory; the byte of the
// word
//   is the scale id, plus one for each further block along K (PTX ISA 9.7.16.10.7, Block scaling).
#include <cstring>
#include <vector>

#include "dot.h"
#include "error.h"
#include "machine.h"
#include "memory.h"
#include "numbers.h"
#include "operands.h"

namespace emulator {
namespace {

enum MmaKind { kF16Kind, kF8f6f4, kMxf8f6f4, kMxf4, kMxf4nvf4 };
constexpr uint32_t kRows = 128;  // of a CTA

struct Shape {
  uint32_t columns;
  int depth;  // elements along K
  int block;  // elements that share a scale
  Element a, b;
  bool scaled, ue8m0;
  uint32_t scale_id_a, scale_id_b;
};

size_t TensorIndex(uint32_t lane, uint32_t column) {
  if (lane >= kTensorLanes || column >= kTensorColumns) {
    Fail("tensor memory lane %u column %u", lane, column);
  }
  return static_cast<size_t>(lane) * kTensorColumns + column;
}

Element EightBits(uint32_t format) {
  if (format == 0) return Element::kE4m3;
  if (format == 1) return Element::kE5m2;
  if (format == 5) return Element::kE2m1Padded;
  Fail("MMA instruction descriptor: operand format %u", format);
}

Element SixteenBits(uint32_t format) {
  if (format > 1) Fail("MMA instruction descriptor: operand format %u", format);
  return format == 1 ? Element::kBf16 : Element::kF16;
}

// Scale vectors that a kind allows, and what they say (PTX ISA 9.7.16.10.7, table of scale_vec).
void ReadScaleVector(const TensorOperation& op, Shape& shape) {
  const uint32_t ids = shape.scale_id_a | shape.scale_id_b;
  switch (op.mode) {
    case kMxf8f6f4:
      if (op.mode2 > 1 && op.mode2 != 32) Fail("kind::mxf8f6f4 with scale vector %d", op.mode2);
      if (!shape.ue8m0) Fail("kind::mxf8f6f4 with UE4M3 scales");
      break;
    case kMxf4:
      if (op.mode2 == 4 || op.mode2 == 16) Fail("kind::mxf4 with scale vector %d", op.mode2);
      if (!shape.ue8m0) Fail("kind::mxf4 with UE4M3 scales");
      if (ids & 1) Fail("kind::mxf4 with an odd scale id");
      break;
    default:
      if (op.mode2 == 4 || op.mode2 == 16) {
        shape.block = 16;
        if (ids) Fail("kind::mxf4nvf4 with 16 elements a scale: the scale id must be 0");
      } else if (ids & 1) {
        Fail("kind::mxf4nvf4 with an odd scale id");
      }
  }
}

Shape ReadDescriptor(const TensorOperation& op) {
  const auto id = static_cast<uint32_t>(op.source[3]);
  const uint32_t a = id >> 7 & 7, b = id >> 10 & 7, rows = (id >> 24 & 31) << 4;
  Shape shape{(id >> 17 & 63) << 3, 32, 32, {}, {}, op.mode >= kMxf8f6f4, false, 0, 0};
  if (id & 7) Fail("MMA instruction descriptor: sparse");
  if (id >> 13 & 3) Fail("MMA instruction descriptor: negated operands");
  if (id >> 15 & 3) Fail("MMA instruction descriptor: MN-major operands are not emulated");
  if (shape.scaled) {
    if (id >> 31) Fail("MMA instruction descriptor: K");
    shape.scale_id_b = id >> 4 & 3;
    shape.scale_id_a = id >> 29 & 3;
    shape.ue8m0 = id >> 23 & 1;
  } else {
    if ((id >> 4 & 3) != 1) Fail("MMA instruction descriptor: accumulators other than float32");
    if (id >> 29) Fail("MMA instruction descriptor: reserved bits");
  }
  if (op.mode == kF16Kind) {
    shape.depth = 16;
    shape.a = SixteenBits(a);
    shape.b = SixteenBits(b);
  } else if (op.mode < kMxf4) {
    shape.a = EightBits(a);
    shape.b = EightBits(b);
  } else {
    if (a != 1 || b != 1) Fail("MMA instruction descriptor: operand formats %u and %u", a, b);
    shape.depth = 64;
    shape.a = shape.b = Element::kE2m1;
  }
  if (shape.scaled) ReadScaleVector(op, shape);
  if (rows != kRows * static_cast<uint32_t>(op.flags)) {
    Fail("MMA of %u rows by %d CTAs is not emulated", rows, op.flags);
  }
  if (shape.columns % 16 || shape.columns < 16 || shape.columns > 256) {
    Fail("MMA instruction descriptor: N %u", shape.columns);
  }
  return shape;
}

// Each quarter of the lanes holds the same scales (PTX ISA 9.7.16.10.7, Block Scaling).
void CheckQuarters(const Cta& cta, uint32_t lane, uint32_t column) {
  const size_t first = TensorIndex(lane, column);
  for (uint32_t quarter = 1; quarter < 4; ++quarter) {
    const size_t copy = TensorIndex(lane + 32 * quarter, column);
    if (cta.tensor[copy] != cta.tensor[first] ||
        cta.tensor_valid[copy] != cta.tensor_valid[first]) {
      Fail("MMA scales differ in tensor memory lanes %u and %u of column %u", lane,
           lane + 32 * quarter, column);
    }
  }
}

// Multiplies `count` rows of elements by their scales in a CTA's tensor memory.
void Scale(const Cta& cta, const Shape& shape, uint32_t address, uint32_t first_byte,
           uint32_t count, float* values, uint8_t* valid) {
  address &= 0x3fffffff;  // the upper bits repeat the scale id
  if (address >> 16) Fail("MMA scales at tensor memory lane %u", address >> 16);
  for (uint32_t row = 0; row < count; ++row) {
    const uint32_t lane = row % 32, column = address + row / 32;
    const size_t index = TensorIndex(lane, column);
    CheckQuarters(cta, lane, column);
    valid[row] &= cta.tensor_valid[index];
    for (int block = 0; block < shape.depth / shape.block; ++block) {
      const uint32_t byte = cta.tensor[index] >> (8 * (first_byte + block)) & 255;
      const float scale = shape.ue8m0 ? kUe8m0[byte] : kE4m3[byte & 127];
      float* at = values + static_cast<size_t>(row) * shape.depth + block * shape.block;
      for (int k = 0; k < shape.block; ++k) at[k] *= scale;
    }
  }
}

void Multiply(Cluster& cluster, const TensorOperation& op) {
  const Shape shape = ReadDescriptor(op);
  const uint32_t ctas = op.flags, first = ctas == 2 ? op.issuer & ~1u : op.issuer;
  const bool accumulate = op.source[shape.scaled ? 6 : 4] & 1;
  const auto target = static_cast<uint32_t>(op.source[0]);
  if (target >> 16) Fail("MMA accumulator at tensor memory lane %u", target >> 16);
  if (target + shape.columns > kTensorColumns) {
    Fail("MMA accumulator in columns %u to %u", target, target + shape.columns);
  }
  const int depth = shape.depth;
  std::vector<float> b(static_cast<size_t>(shape.columns) * depth);
  std::vector<uint8_t> valid_b(shape.columns, 1);
  const uint32_t share = shape.columns / ctas;
  for (uint32_t i = 0; i < ctas; ++i) {
    ReadRows(*cluster.ctas[first + i], op.source[2], share, shape.b,
             &b[static_cast<size_t>(i) * share * depth], depth, &valid_b[i * share], kBlackwell);
  }
  for (uint32_t i = 0; i < ctas; ++i) {
    Cta& cta = *cluster.ctas[first + i];
    if (target + shape.columns > cta.tensor_next) {
      Fail("MMA accumulator in columns %u to %u of %u allocated", target, target + shape.columns,
           cta.tensor_next);
    }
    std::vector<float> a(static_cast<size_t>(kRows) * depth), scaled_b(b);
    std::vector<uint8_t> valid_a(kRows, 1), valid_columns(valid_b);
    ReadRows(cta, op.source[1], kRows, shape.a, a.data(), depth, valid_a.data(), kBlackwell);
    if (shape.scaled) {
      Scale(cta, shape, static_cast<uint32_t>(op.source[4]), shape.scale_id_a, kRows, a.data(),
            valid_a.data());
      Scale(cta, shape, static_cast<uint32_t>(op.source[5]), shape.scale_id_b, shape.columns,
            scaled_b.data(), valid_columns.data());
    }
    for (uint32_t row = 0; row < kRows; ++row) {
      const size_t start = TensorIndex(row, target);
      for (uint32_t n = 0; n < shape.columns; ++n) {
        uint32_t& sum = cta.tensor[start + n];
        const float old = accumulate ? ToFloat(sum) : 0;
        sum = ToBits(AddDot(TensorCore::kBlackwell, old, &a[static_cast<size_t>(row) * depth],
                            &scaled_b[static_cast<size_t>(n) * depth], depth));
        uint8_t& valid = cta.tensor_valid[start + n];
        valid = valid_a[row] & valid_columns[n] & (accumulate ? valid : 1);
      }
    }
  }
}

// 32x128b.warpx4: 32 rows of 16 bytes, to lanes 0 to 31 and again to each further 32 lanes.
void CopyScales(Cluster& cluster, const TensorOperation& op) {
  const uint32_t ctas = op.mode, first = ctas == 2 ? op.issuer & ~1u : op.issuer;
  const auto target = static_cast<uint32_t>(op.source[0]);
  const uint64_t descriptor = op.source[1];
  if (target >> 16) Fail("tcgen05.cp to tensor memory lane %u", target >> 16);
  if (descriptor >> 61) Fail("tcgen05.cp of a swizzled layout is not emulated");
  for (uint32_t i = 0; i < ctas; ++i) {
    Cta& cta = *cluster.ctas[first + i];
    if (target + 4 > cta.tensor_next) Fail("tcgen05.cp to column %u, not allocated", target);
    for (uint32_t row = 0; row < 32; ++row) {
      const uint32_t address = DescriptorAddress(descriptor, row, 0, kBlackwell);
      const uint8_t* bytes = SharedBytes(cta, SharedAddress(cta.rank, address), 16, true);
      const uint8_t* valid = &cta.shared_valid[address];
      for (uint32_t quarter = 0; quarter < 4; ++quarter) {
        const size_t index = TensorIndex(row + 32 * quarter, target);
        std::memcpy(&cta.tensor[index], bytes, 16);
        for (int word = 0; word < 4; ++word) {
          cta.tensor_valid[index + word] = !std::memchr(valid + 4 * word, 0, 4);
        }
      }
    }
  }
}

void Commit(Machine& machine, Cluster& cluster, const TensorOperation& op) {
  Cta& cta = *cluster.ctas[op.issuer];
  const auto barrier = static_cast<uint32_t>(op.source[0]);
  if (!op.flags) return machine.UpdateMbarrier(cta, barrier, false, 0, 1, op.waited);
  for (uint32_t rank = 0; rank < 16; ++rank) {  // the same offset in each CTA of the mask
    if (!(op.source[1] >> rank & 1)) continue;
    machine.UpdateMbarrier(cta, SharedAddress(rank, barrier & 0xffffff), false, 0, 1, op.waited);
  }
}

}  // namespace

void Execute(Machine& machine, Cluster& cluster, const TensorOperation& operation) {
  ++machine.progress;
  switch (operation.op) {
    case Op::kTensorMma:
      ++machine.counts.matrix;
      return Multiply(cluster, operation);
    case Op::kTensorCopy:
      return CopyScales(cluster, operation);
    default:
      return Commit(machine, cluster, operation);
  }
}

}  // namespace emulator
