// The Python module jax_megamoe.runtime._ffi (see jax_megamoe/runtime/_ffi.pyi).

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <utility>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/handler.h"
#include "ffi/registry.h"

namespace nb = nanobind;

namespace jax_megamoe {
namespace {

nb::capsule Capsule(const void* pointer) { return nb::capsule(pointer); }

nb::dict Handlers(const Stages& stages) {
  nb::dict handlers;
  handlers["instantiate"] = Capsule(reinterpret_cast<void*>(stages.instantiate));
  if (stages.prepare != nullptr) {
    handlers["prepare"] = Capsule(reinterpret_cast<void*>(stages.prepare));
  }
  handlers["execute"] = Capsule(reinterpret_cast<void*>(stages.execute));
  return handlers;
}

nb::dict Type(ffi::TypeId* id, const XLA_FFI_TypeInfo* info) {
  nb::dict registration;
  registration["type_id"] = Capsule(id);
  registration["type_info"] = Capsule(info);
  return registration;
}

// The text of any Python object as UTF-8. File names bring lone surrogates, which no UTF-8 has, and
// an exception's __str__ may itself raise.
std::string Text(nb::handle object) {
  try {
    const nb::object encoded = nb::str(object).attr("encode")("utf-8", "backslashreplace");
    const auto text = nb::cast<nb::bytes>(encoded);
    return std::string(text.c_str(), text.size());
  } catch (const nb::python_error&) {
    return "no text";
  }
}

// Calls back into Python from whichever thread XLA instantiates on.
void SetCubinProvider(nb::callable provider) {
  // Kept for the rest of the process: there is no safe moment to drop a reference to it.
  auto* function = new nb::callable(std::move(provider));
  Cubins::Get().SetProvider([function](const std::string& spec) {
    nb::gil_scoped_acquire gil;
    try {
      const nb::object made = (*function)(spec);
      if (!nb::isinstance<nb::bytes>(made)) {
        throw LaunchError(ffi::ErrorCode::kInternal,
                          Message("cubin provider", "bytes", Text(made.type().attr("__name__"))));
      }
      const auto cubin = nb::cast<nb::bytes>(made);
      return std::string(cubin.c_str(), cubin.size());
    } catch (const nb::python_error& error) {
      throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                        Text(error.type().attr("__name__")) + ": " + Text(error.value()));
    }
  });
}

using Arrays = std::vector<std::pair<uint64_t, size_t>>;

CallBuffers Buffers(const Arrays& operands, const Arrays& results) {
  const auto convert = [](const Arrays& arrays) {
    std::vector<CallBuffers::Array> converted;
    for (const auto& [address, num_bytes] : arrays) {
      converted.push_back({reinterpret_cast<void*>(address), num_bytes});
    }
    return converted;
  };
  return {convert(operands), convert(results)};
}

void DefineProgram(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, Attributes::Values attributes) {
            const Attributes decodable(std::move(attributes));
            new (self) Program(DecodeLaunchPlan(decodable.dictionary()), /*captured=*/false);
          },
          nb::arg("attributes"), Unlocked())
      .def(
          "prepare",
          [](Program& self, int ordinal, const Arrays& operands, const Arrays& results) {
            self.Prepare(ordinal, Buffers(operands, results));
          },
          nb::arg("device_ordinal"), nb::arg("operands"), nb::arg("results"), Unlocked())
      .def(
          "launch",
          [](Program& self, int ordinal, uint64_t stream, const Arrays& operands,
             const Arrays& results) {
            self.Launch(ordinal, reinterpret_cast<CUstream>(stream), Buffers(operands, results));
          },
          nb::arg("device_ordinal"), nb::arg("stream"), nb::arg("operands"), nb::arg("results"),
          Unlocked());
}

}  // namespace

NB_MODULE(_ffi, m) {
  nb::register_exception_translator(
      [](const std::exception_ptr& pointer, void*) {
        try {
          std::rethrow_exception(pointer);
        } catch (const LaunchError& error) {
          const bool argument = error.code == ffi::ErrorCode::kInvalidArgument;
          PyErr_SetString(argument ? PyExc_ValueError : PyExc_RuntimeError, error.what());
        }
      },
      nullptr);
  m.def(
      "cuda_handlers", [](bool captured) { return Handlers(CudaStages(captured)); }, nb::kw_only(),
      nb::arg("captured"));
  m.def(
      "cpu_handlers", [](bool captured) { return Handlers(CpuStages(captured)); }, nb::kw_only(),
      nb::arg("captured"));
  m.def("cuda_type", [] { return Type(&CudaProgram::id, CudaTypeInfo()); });
  m.def("cpu_type", [] { return Type(&CpuProgram::id, CpuTypeInfo()); });
  DefineProgram(m);
  m.def("set_cubin_provider", &SetCubinProvider, nb::arg("provider"));
  m.def(
      "register_symmetric_buffer",
      [](const std::string& key, int ordinal, uint64_t base,
         const std::vector<uint64_t>& peer_bases, int64_t rank, uint64_t num_bytes) {
        SymmetricBuffers::Get().Register(key, ordinal, base, peer_bases, rank, num_bytes);
      },
      nb::arg("key"), nb::arg("device_ordinal"), nb::arg("base"), nb::arg("peer_bases"),
      nb::arg("rank"), nb::arg("num_bytes"));
  m.def(
      "unregister_symmetric_buffer",
      [](const std::string& key, int ordinal) { SymmetricBuffers::Get().Unregister(key, ordinal); },
      nb::arg("key"), nb::arg("device_ordinal"),
      nb::call_guard<nb::gil_scoped_release>());  // it waits for launches
}

}  // namespace jax_megamoe
