#include "error.h"

#include <cstdarg>
#include <cstdio>

namespace emulator {
namespace {

std::string Write(const char* format, va_list arguments) {
  char text[2048];
  vsnprintf(text, sizeof text, format, arguments);
  return text;
}

}  // namespace

std::string Format(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Write(format, arguments);
  va_end(arguments);
  return text;
}

void Fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Write(format, arguments);
  va_end(arguments);
  throw Error(text);
}

}  // namespace emulator
