#include "ffi/handler.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <utility>

namespace jax_megamoe {

ffi::TypeId CudaProgram::id = {};
ffi::TypeId CpuProgram::id = {};

namespace {

// The FFI is a C interface: an exception that passed it would end the process.
template <typename Function>
ffi::Error Guard(Function function) {
  try {
    function();
    return ffi::Error::Success();
  } catch (const LaunchError& error) {
    return ffi::Error(error.code, std::string("jax_megamoe: ") + error.what());
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jax_megamoe: " + Printable(error.what()));
  } catch (...) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jax_megamoe: unknown exception");
  }
}

// Decodes the plan once for each call site, so that a launch parses no attributes.
template <typename State, bool captured>
ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Dictionary attributes) {
  std::unique_ptr<State> state;
  ffi::Error error =
      Guard([&] { state = std::make_unique<State>(DecodeLaunchPlan(attributes), captured); });
  if (error.failure()) return ffi::Unexpected(std::move(error));
  return state;
}

CallBuffers Buffers(ffi::RemainingArgs operands, ffi::RemainingRets results) {
  CallBuffers buffers;
  const auto add = [](std::vector<CallBuffers::Array>& arrays, const ffi::AnyBuffer& array) {
    arrays.push_back({array.untyped_data(), array.size_bytes()});
  };
  buffers.operands.reserve(operands.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    auto array = operands.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) Reject("operand " + std::to_string(i), "an array", "something else");
    add(buffers.operands, *array);
  }
  buffers.results.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    auto array = results.get<ffi::AnyBuffer>(i);
    if (!array.has_value()) Reject("result " + std::to_string(i), "an array", "something else");
    add(buffers.results, **array);
  }
  return buffers;
}

// Kernels are loaded here and not in the execute stage: once another rank's kernel runs, loading
// may wait for that kernel, which waits for this rank.
ffi::Error Prepare(CudaProgram* program, int32_t ordinal, ffi::RemainingArgs operands,
                   ffi::RemainingRets results, ffi::Dictionary) {
  return Guard([&] { program->Prepare(ordinal, Buffers(operands, results)); });
}

ffi::Error Execute(CudaProgram* program, int32_t ordinal, CUstream stream,
                   ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary) {
  return Guard([&] { program->Launch(ordinal, stream, Buffers(operands, results)); });
}

// For tests against a recording driver. XLA:CPU has no prepare stage and no streams; the stream's
// handle is the ordinal + 1, so that a recording tells them apart.
ffi::Error ExecuteOnCpu(CpuProgram* program, int32_t ordinal, ffi::RemainingArgs operands,
                        ffi::RemainingRets results, ffi::Dictionary) {
  return Guard([&] {
    const CallBuffers buffers = Buffers(operands, results);
    program->Prepare(ordinal, buffers);
    program->Launch(ordinal, reinterpret_cast<CUstream>(intptr_t{ordinal} + 1), buffers);
  });
}

auto ExecuteBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CudaProgram>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::PlatformStream<CUstream>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

}  // namespace

Stages CudaStages(bool captured) {
  XLA_FFI_DEFINE_HANDLER(instantiate, (Instantiate<CudaProgram, false>),
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_DEFINE_HANDLER(instantiate_captured, (Instantiate<CudaProgram, true>),
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_DEFINE_HANDLER(prepare, Prepare,
                         ffi::Ffi::BindPrepare()
                             .Ctx<ffi::State<CudaProgram>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  // Two targets: the trait belongs to a handler, and only plans that may be replayed carry it.
  XLA_FFI_DEFINE_HANDLER(execute, Execute, ExecuteBinding());
  XLA_FFI_DEFINE_HANDLER(execute_captured, Execute, ExecuteBinding(),
                         {ffi::Traits::kCmdBufferCompatible});
  return captured ? Stages{instantiate_captured, prepare, execute_captured}
                  : Stages{instantiate, prepare, execute};
}

Stages CpuStages(bool captured) {
  XLA_FFI_DEFINE_HANDLER(instantiate, (Instantiate<CpuProgram, false>),
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_DEFINE_HANDLER(instantiate_captured, (Instantiate<CpuProgram, true>),
                         ffi::Ffi::BindInstantiate().Attrs());
  XLA_FFI_DEFINE_HANDLER(execute, ExecuteOnCpu,
                         ffi::Ffi::Bind()
                             .Ctx<ffi::State<CpuProgram>>()
                             .Ctx<ffi::DeviceOrdinal>()
                             .RemainingArgs()
                             .RemainingRets()
                             .Attrs());
  return {captured ? instantiate_captured : instantiate, nullptr, execute};
}

const XLA_FFI_TypeInfo* CudaTypeInfo() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CudaProgram>();
  return &info;
}

const XLA_FFI_TypeInfo* CpuTypeInfo() {
  static const XLA_FFI_TypeInfo info = ffi::MakeTypeInfo<CpuProgram>();
  return &info;
}

}  // namespace jax_megamoe
