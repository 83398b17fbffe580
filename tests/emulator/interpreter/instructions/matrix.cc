// Warp matrices (PTX ISA 9.7.14: ldmatrix, stmatrix, mma.sync).
#include <cstring>

#include "../dot.h"
#include "../memory.h"
#include "../numbers.h"
#include "../operands.h"
#include "../step.h"

namespace emulator {
namespace {

// A row of 16 bytes, at an address that may be generic or a shared one.
uint8_t* Row(Step& s, int lane, uint64_t address, bool write) {
  address += s.inst.immediate;
  if (address >> 32 == 0) address |= kSharedWindow;
  return s.machine.Resolve(s.warp, lane, kGeneric, address, 16, write);
}

// 8x8 elements of 16 bits: lane 4 r + c / 2 holds row r, columns c and c + 1; transposed, row and
// column exchange.
void Store16(Step& s) {
  const uint64_t* base = s.Src();
  for (int matrix = 0; matrix < s.inst.mode; ++matrix) {
    const uint64_t* words = s.Src(1 + matrix);
    for (int r = 0; r < 8; ++r) {
      uint8_t* bytes = Row(s, matrix * 8 + r, base[matrix * 8 + r], true);
      for (int c = 0; c < 8; ++c) {
        const int row = s.inst.mode2 ? c : r, column = s.inst.mode2 ? r : c;
        const auto half = static_cast<uint16_t>(words[row * 4 + column / 2] >> (16 * (column & 1)));
        std::memcpy(bytes + 2 * c, &half, 2);
      }
    }
  }
}

// m16n8 of bytes, transposed: row r of the 8 is 16 bytes (CUTLASS, Copy_Traits<SM100_U8x4_STSM_T>).
void Store8(Step& s) {
  const uint64_t* base = s.Src();
  for (int matrix = 0; matrix < s.inst.mode; ++matrix) {
    const uint64_t* words = s.Src(1 + matrix);
    for (int r = 0; r < 8; ++r) {
      uint8_t* bytes = Row(s, matrix * 8 + r, base[matrix * 8 + r], true);
      for (int i = 0; i < 16; ++i) {
        const int lane = r / 2 + 4 * (i % 8), byte = (r & 1) + 2 * (i / 8);
        bytes[i] = static_cast<uint8_t>(words[lane] >> (8 * byte));
      }
    }
  }
}

void Load16(Step& s) {
  uint64_t base[32];
  std::memcpy(base, s.Src(), sizeof base);
  for (int matrix = 0; matrix < s.inst.mode; ++matrix) {
    uint16_t element[8][8];
    for (int r = 0; r < 8; ++r) {
      std::memcpy(element[r], Row(s, matrix * 8 + r, base[matrix * 8 + r], false), 16);
    }
    uint64_t* words = s.Dst(matrix);
    for (int lane = 0; lane < 32; ++lane) {
      const int r = lane / 4, c = lane % 4 * 2;
      const uint32_t low = s.inst.mode2 ? element[c][r] : element[r][c];
      const uint32_t high = s.inst.mode2 ? element[c + 1][r] : element[r][c + 1];
      words[lane] = low | high << 16;
    }
  }
}

// Element types of mma.sync; the order is that of _ELEMENTS in ptx/decode/matrix.py.
enum MmaElement { kMmaF16, kMmaBf16, kMmaE4m3, kMmaE5m2, kMmaS8, kMmaU8, kMmaE2m1 };
constexpr Element kElements[] = {Element::kF16,  Element::kBf16, Element::kE4m3, Element::kE5m2,
                                 Element::kE4m3, Element::kE4m3, Element::kE2m1};

float DecodeMma(int type, uint32_t word, int index) {
  if (type == kMmaS8) return static_cast<float>(static_cast<int8_t>(word >> (8 * index)));
  if (type == kMmaU8) return static_cast<float>(static_cast<uint8_t>(word >> (8 * index)));
  return DecodeElement(kElements[type], word, index);
}

// Fragments: a group of 4 lanes holds row lane / 4 (and that + 8 in odd words of a); in a row, lane
// % 4 has the elements of its 32 bits, words further along K follow in steps of 4 lanes' elements
// (PTX ISA 9.7.14.5, Matrix fragments for mma.m16n8k*).
constexpr int kMaxDepth = 64;

// `container` bits hold an element; 4-bit ones beside 8-bit ones stand in the middle of a byte.
void ReadFragment(const Step& s, int first, int rows, int depth, int type, int container,
                  float (*out)[kMaxDepth]) {
  const int per_word = 32 / container, row_words = rows / 8;
  const int words = depth * rows * container / 1024;
  const bool shifted = type == kMmaE2m1 && container == 8;
  for (int word = 0; word < words; ++word) {
    const uint64_t* values = s.Src(first + word);
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (word % row_words);
      const int k = (lane % 4 + word / row_words * 4) * per_word;
      const auto bits = static_cast<uint32_t>(values[lane]);
      for (int i = 0; i < per_word; ++i) {
        out[row][k + i] = shifted ? kE2m1[bits >> (8 * i + 2) & 15] : DecodeMma(type, bits, i);
      }
    }
  }
}

// Block scales: a lane of each group of 4 holds a row's scales; the selectors say which lane (of a
// pair for a) and which bytes (PTX ISA 9.7.14.5, Block scaling for mma.sync).
void ScaleFragment(const Step& s, int first, int rows, int depth, float (*values)[kMaxDepth]) {
  const int vector = s.inst.flags & 255, block = depth / vector;
  const bool exponents = s.inst.flags & 256;
  const uint64_t *words = s.Src(first), *bytes = s.Src(first + 1), *threads = s.Src(first + 2);
  for (int row = 0; row < rows; ++row) {
    const auto thread = static_cast<int>(threads[0]);
    // a: lanes 4 g + 2 t and 4 g + 2 t + 1 hold rows g and g + 8; b: lane 4 g + t holds column g.
    const int lane = rows == 16 ? row % 8 * 4 + thread * 2 + row / 8 : row * 4 + thread;
    for (int i = 0; i < vector; ++i) {
      const uint32_t byte = words[lane] >> (8 * (bytes[0] + i)) & 255;
      const float scale = exponents ? kUe8m0[byte] : kE4m3[byte & 127];
      for (int k = 0; k < block; ++k) values[row][i * block + k] *= scale;
    }
  }
}

void Multiply(Step& s) {
  const int depth = s.inst.mode, type_a = s.inst.mode2 & 15, type_b = s.inst.mode2 >> 4;
  const auto bits = [](int type) { return type <= kMmaBf16 ? 16 : type == kMmaE2m1 ? 4 : 8; };
  // kind::mxf8f6f4 (one scale a row) holds every element in a byte.
  const int container = (s.inst.flags & 255) == 1 ? 8 : std::max(bits(type_a), bits(type_b));
  const int words_a = depth * container * 16 / 1024, words_b = depth * container * 8 / 1024;
  static thread_local float a[16][kMaxDepth], b[8][kMaxDepth];
  ReadFragment(s, 0, 16, depth, type_a, container, a);
  ReadFragment(s, words_a, 8, depth, type_b, container, b);
  const int sums = words_a + words_b;
  if (s.inst.flags) {
    ScaleFragment(s, sums + 4, 16, depth, a);
    ScaleFragment(s, sums + 7, 8, depth, b);
  }
  const bool exact = s.inst.flags || s.machine.settings.exact_sums;
  const TensorCore core = exact             ? TensorCore::kBlackwell
                          : container == 16 ? TensorCore::kHopper16
                                            : TensorCore::kWarpFp8;
  const bool integer = type_a == kMmaS8 || type_a == kMmaU8;
  uint64_t results[4][32];
  for (int i = 0; i < 4; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4 + 8 * (i / 2), column = lane % 4 * 2 + (i & 1);
      const uint64_t old = s.Src(sums + i)[lane];
      if (integer) {
        int64_t sum = static_cast<int32_t>(old);
        for (int k = 0; k < depth; ++k) sum += static_cast<int64_t>(a[row][k] * b[column][k]);
        results[i][lane] = static_cast<uint32_t>(sum);
      } else {
        results[i][lane] = ToBits(AddDot(core, ToFloat(old), a[row], b[column], depth));
      }
    }
  }
  for (int i = 0; i < 4; ++i) std::memcpy(s.Dst(i), results[i], sizeof results[i]);
  ++s.machine.counts.matrix;
}

}  // namespace

Outcome ExecuteMatrix(Step& s) {
  if (!Converge(s, kAllLanes)) return Outcome::kMoved;
  if (s.lanes != kAllLanes) Fail("%s by part of a warp", Name(s.inst.op));
  switch (s.inst.op) {
    case Op::kStoreMatrix:
      s.inst.flags ? Store8(s) : Store16(s);
      ++s.machine.progress;
      break;
    case Op::kLoadMatrix:
      Load16(s);
      break;
    default:
      Multiply(s);
  }
  return Outcome::kNext;
}

}  // namespace emulator
