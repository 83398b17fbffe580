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

class LaunchError : public std::runtime_error {
 public:
  LaunchError(ffi::ErrorCode code, const std::string& message)
      : std::runtime_error(message), code(code) {}

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
