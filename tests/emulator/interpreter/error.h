// Errors of the emulated program, with printf-like texts.
#pragma once

#include <stdexcept>
#include <string>

namespace emulator {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[gnu::format(printf, 1, 2)]] std::string Format(const char* format, ...);
[[noreturn, gnu::format(printf, 1, 2)]] void Fail(const char* format, ...);

}  // namespace emulator
