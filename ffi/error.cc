#include "ffi/error.h"

#include <cstddef>

namespace jax_megamoe {
namespace {

// Bytes of the well-formed UTF-8 sequence that `text` starts with; 0 if there is none (Unicode
// standard, table 3-7).
size_t SequenceBytes(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return 1;
  size_t size = 0;
  unsigned char low = 0x80;  // bounds of the second byte
  unsigned char high = 0xBF;
  if (first >= 0xC2 && first <= 0xDF) {
    size = 2;
  } else if (first >= 0xE0 && first <= 0xEF) {
    size = 3;
    if (first == 0xE0) low = 0xA0;   // not an overlong form
    if (first == 0xED) high = 0x9F;  // not a surrogate
  } else if (first >= 0xF0 && first <= 0xF4) {
    size = 4;
    if (first == 0xF0) low = 0x90;
    if (first == 0xF4) high = 0x8F;  // not past U+10FFFF
  }
  if (size == 0 || text.size() < size || byte(1) < low || byte(1) > high) return 0;
  for (size_t i = 2; i < size; ++i) {
    if (byte(i) < 0x80 || byte(i) > 0xBF) return 0;
  }
  return size;
}

bool IsControl(char c) { return (c >= 0 && c < 0x20 && c != '\n' && c != '\t') || c == 0x7F; }

}  // namespace

bool IsUtf8(std::string_view text) {
  while (!text.empty()) {
    const size_t size = SequenceBytes(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

std::string Printable(std::string_view text) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string printable;
  printable.reserve(text.size());
  while (!text.empty()) {
    const size_t size = SequenceBytes(text);
    if (size == 0 || (size == 1 && IsControl(text[0]))) {
      const auto byte = static_cast<unsigned char>(text[0]);
      printable += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
      text.remove_prefix(1);
    } else {
      printable.append(text.substr(0, size));
      text.remove_prefix(size);
    }
  }
  return printable;
}

}  // namespace jax_megamoe
