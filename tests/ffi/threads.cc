// What may run at once, for ThreadSanitizer: eight devices prepare and launch, while other threads
// register and unregister a buffer and make and drop programs that use it. Launches go to the
// library that JAX_MEGAMOE_LIBCUDA names, the recording driver. `.ci/run` builds and runs this.
//
// Usage: threads ROUNDS. Exits with 1 if a launch on a buffer that stays fails, or anything but a
// LaunchError is thrown, or a dropped program leaves a buffer pinned.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "ffi/attributes.h"
#include "ffi/launch.h"
#include "ffi/registry.h"

namespace jax_megamoe {
namespace {

constexpr int kDevices = 8;
constexpr uint64_t kBase = uint64_t{1} << 40;
constexpr uint64_t kBufferBytes = 4096;
constexpr char kSteady[] = "steady";
constexpr char kFlickering[] = "flickering";

std::atomic<long> launches{0};
std::atomic<long> refusals{0};
std::atomic<long> faults{0};

using Integers = std::vector<int64_t>;

// A fill of the buffer and a launch with a pointer, the buffer, a tensor map of it and a struct.
LaunchPlan Plan(const std::string& buffer, const std::string& kernel, int64_t shared_memory) {
  const std::string a = "steps.1.arguments.";
  const Attributes attributes({
      {"plan_version", kPlanVersion},
      {"num_ranks", int64_t{kDevices}},
      {"num_operands", int64_t{1}},
      {"num_results", int64_t{1}},
      {"buffer_key", buffer},
      {"buffer_bytes", static_cast<int64_t>(kBufferBytes)},
      {"kernels", int64_t{1}},
      {"kernels.0.symbol", kernel},
      {"kernels.0.spec", kernel},
      {"steps", int64_t{2}},
      {"steps.0.kind", std::string("fill")},
      {"steps.0.base", std::string("symmetric_buffer")},
      {"steps.0.offset", int64_t{128}},
      {"steps.0.num_bytes", int64_t{64}},
      {"steps.1.kind", std::string("launch")},
      {"steps.1.kernel", int64_t{0}},
      {"steps.1.grid", Integers{132, 1, 1}},
      {"steps.1.block", Integers{384, 1, 1}},
      {"steps.1.cluster", Integers{2, 1, 1}},
      {"steps.1.smem", shared_memory},
      {"steps.1.programmatic_serialization", true},
      {"steps.1.arguments", int64_t{4}},
      {a + "0.name", std::string("x")},
      {a + "0.kind", std::string("pointer")},
      {a + "0.base", std::string("operand")},
      {a + "0.index", int64_t{0}},
      {a + "0.offset", int64_t{0}},
      {a + "1.name", std::string("buffer")},
      {a + "1.kind", std::string("symmetric_buffer")},
      {a + "2.name", std::string("map")},
      {a + "2.kind", std::string("tensor_map")},
      {a + "2.base", std::string("symmetric_buffer")},
      {a + "2.offset", int64_t{1024}},
      {a + "2.rank", int64_t{2}},
      {a + "2.dtype", int64_t{0}},
      {a + "2.dims", Integers{128, 8}},
      {a + "2.strides", Integers{128}},
      {a + "2.box", Integers{128, 4}},
      {a + "2.interleave", int64_t{0}},
      {a + "2.swizzle", int64_t{3}},
      {a + "2.l2_promotion", int64_t{0}},
      {a + "2.oob_fill", int64_t{0}},
      {a + "3.name", std::string("factors")},
      {a + "3.kind", std::string("struct")},
      {a + "3.fields", int64_t{2}},
      {a + "3.fields.0.name", std::string("count")},
      {a + "3.fields.0.kind", std::string("uint32")},
      {a + "3.fields.0.value", int64_t{7}},
      {a + "3.fields.1.name", std::string("rows")},
      {a + "3.fields.1.kind", std::string("pointer")},
      {a + "3.fields.1.base", std::string("symmetric_buffer")},
      {a + "3.fields.1.offset", int64_t{2048}},
  });
  return DecodeLaunchPlan(attributes.dictionary());
}

void Register(const std::string& key, int device) {
  std::vector<uint64_t> bases;
  for (int i = 0; i < kDevices; ++i) bases.push_back(kBase + i * kBufferBytes);
  SymmetricBuffers::Get().Register(key, device, bases[device], bases, device, kBufferBytes);
}

// Runs `function`; it may be refused, if `may_be_refused`, and do nothing else wrong.
void Try(bool may_be_refused, const std::function<void()>& function) {
  try {
    function();
  } catch (const LaunchError& error) {
    ++(may_be_refused ? refusals : faults);
    if (!may_be_refused) std::printf("%s\n", error.what());
  } catch (const std::exception& error) {
    ++faults;
    std::printf("not a LaunchError: %s\n", error.what());
  }
}

void Run(Program& program, int device) {
  const CallBuffers buffers{{{reinterpret_cast<void*>(kBase * 2), 1024}},
                            {{reinterpret_cast<void*>(kBase * 3), 1024}}};
  program.Prepare(device, buffers);
  program.Launch(device, reinterpret_cast<CUstream>(intptr_t{device} + 1), buffers);
  ++launches;
}

void Round(int round) {
  const std::string kernel = "kernel_" + std::to_string(round % 37);
  auto steady = std::make_unique<Program>(Plan(kSteady, kernel, 1000 + round), true);
  auto flickering = std::make_unique<Program>(Plan(kFlickering, kernel, 900), round % 2 == 1);
  std::vector<std::thread> threads;
  for (int device = 0; device < kDevices; ++device) {
    threads.emplace_back([&, device] {
      Try(false, [&] { Run(*steady, device); });
      for (int i = 0; i < 5; ++i) Try(true, [&] { Run(*flickering, device); });
    });
  }
  const auto for_every_device = [](const std::function<void(int)>& function) {
    for (int i = 0; i < 10 * kDevices; ++i) Try(true, [&] { function(i % kDevices); });
  };
  threads.emplace_back(
      [&] { for_every_device([](int device) { Register(kFlickering, device); }); });
  threads.emplace_back([&] {
    for_every_device([](int device) { SymmetricBuffers::Get().Unregister(kFlickering, device); });
  });
  threads.emplace_back([&] {
    for_every_device([](int device) {
      Program captured(Plan(kFlickering, "captured", 100), true);
      Run(captured, device);
    });
  });
  for (std::thread& thread : threads) thread.join();
  steady.reset();
  flickering.reset();
  for (int device = 0; device < kDevices; ++device) {
    try {
      SymmetricBuffers::Get().Unregister(kFlickering, device);
    } catch (const LaunchError& error) {
      // None is left, unless a program that is gone left it pinned.
      const bool pinned = std::string(error.what()).find("CUDA graphs") != std::string::npos;
      if (pinned) Try(false, [&] { throw error; });
    }
  }
}

int Main(int rounds) {
  Cubins::Get().SetProvider([](const std::string& spec) { return spec + " 8 592 128 16"; });
  for (int device = 0; device < kDevices; ++device) Register(kSteady, device);
  for (int round = 0; round < rounds; ++round) Round(round);
  for (int device = 0; device < kDevices; ++device) {
    SymmetricBuffers::Get().Unregister(kSteady, device);
  }
  std::printf("threads: %d rounds, %ld launches, %ld refused, %ld faults\n", rounds,
              launches.load(), refusals.load(), faults.load());
  return faults == 0 && launches > 0 && refusals > 0 ? 0 : 1;
}

}  // namespace
}  // namespace jax_megamoe

int main(int count, char** arguments) {
  return jax_megamoe::Main(count > 1 ? std::atoi(arguments[1]) : 100);
}
