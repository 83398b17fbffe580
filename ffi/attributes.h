// Attributes made by hand in the form in which XLA hands them to a handler: for launches without
// XLA.

#ifndef JAX_MEGAMOE_FFI_ATTRIBUTES_H_
#define JAX_MEGAMOE_FFI_ATTRIBUTES_H_

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "ffi/error.h"

namespace jax_megamoe {

class Attributes {
 public:
  using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>>;
  using Values = std::map<std::string, Value>;  // sorted by name, as XLA's are

  explicit Attributes(Values values);
  Attributes(const Attributes&) = delete;
  Attributes& operator=(const Attributes&) = delete;

  // Valid as long as this object is.
  ffi::Dictionary dictionary() const { return ffi::Dictionary(&attributes_); }

 private:
  struct Entry {
    XLA_FFI_ByteSpan name;
    std::variant<XLA_FFI_Scalar, XLA_FFI_ByteSpan, XLA_FFI_Array> value;
  };
  Values values_;
  std::vector<Entry> entries_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<void*> pointers_;
  XLA_FFI_Attrs attributes_ = {};
};

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_ATTRIBUTES_H_
