#include "ffi/attributes.h"

#include <utility>

namespace jax_megamoe {
namespace {

XLA_FFI_ByteSpan Span(const std::string& text) { return {text.data(), text.size()}; }

template <typename T>
XLA_FFI_Scalar Scalar(XLA_FFI_DataType type, T& value) {
  return {type, &value};
}

}  // namespace

Attributes::Attributes(Values values) : values_(std::move(values)) {
  entries_.reserve(values_.size());  // pointers into it must stay
  for (auto& [name, value] : values_) {
    Entry& entry = entries_.emplace_back(Entry{Span(name), {}});
    XLA_FFI_AttrType type = XLA_FFI_AttrType_SCALAR;
    if (auto* flag = std::get_if<bool>(&value)) {
      entry.value = Scalar(XLA_FFI_DataType_PRED, *flag);
    } else if (auto* integer = std::get_if<int64_t>(&value)) {
      entry.value = Scalar(XLA_FFI_DataType_S64, *integer);
    } else if (auto* number = std::get_if<double>(&value)) {
      entry.value = Scalar(XLA_FFI_DataType_F64, *number);
    } else if (auto* text = std::get_if<std::string>(&value)) {
      entry.value = Span(*text);
      type = XLA_FFI_AttrType_STRING;
    } else {
      auto& integers = std::get<std::vector<int64_t>>(value);
      entry.value = XLA_FFI_Array{XLA_FFI_DataType_S64, integers.size(), integers.data()};
      type = XLA_FFI_AttrType_ARRAY;
    }
    names_.push_back(&entry.name);
    types_.push_back(type);
    pointers_.push_back(std::visit([](auto& held) -> void* { return &held; }, entry.value));
  }
  attributes_.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  attributes_.size = static_cast<int64_t>(entries_.size());
  attributes_.types = types_.data();
  attributes_.names = names_.data();
  attributes_.attrs = pointers_.data();
}

}  // namespace jax_megamoe
