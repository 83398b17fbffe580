// The one exception of this library. It never leaves it: handler.cc turns it into an ffi::Error and
// module.cc into a Python exception.

#ifndef JAX_MEGAMOE_FFI_ERROR_H_
#define JAX_MEGAMOE_FFI_ERROR_H_

#include <stdexcept>
#include <string>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_megamoe {

namespace ffi = ::xla::ffi;

// `text` as every receiver of an error takes it: UTF-8 without control characters but newline and
// tab. Other bytes become "\\xNN". Paths, plans and other libraries put any bytes into messages;
// XLA and Python cut them at a NUL, and Python replaces an error whose text it cannot decode.
std::string Printable(std::string_view text);

bool IsUtf8(std::string_view text);

class LaunchError : public std::runtime_error {
 public:
  LaunchError(ffi::ErrorCode code, const std::string& message)
      : std::runtime_error(Printable(message)), code(code) {}

  const ffi::ErrorCode code;
};

// `argument: expected ..., got ...; hint`, the wording of jax_megamoe/_checks.py.
inline std::string Message(std::string_view argument, std::string_view expected,
                           std::string_view got, std::string_view hint = {}) {
  std::string text(argument);
  text.append(": expected ").append(expected).append(", got ").append(got);
  if (!hint.empty()) text.append("; ").append(hint);
  return text;
}

[[noreturn]] inline void Reject(std::string_view argument, std::string_view expected,
                                std::string_view got, std::string_view hint = {}) {
  throw LaunchError(ffi::ErrorCode::kInvalidArgument, Message(argument, expected, got, hint));
}

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_ERROR_H_
