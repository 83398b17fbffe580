// What this process knows beyond a plan: where symmetric buffers lie and how to get a kernel's
// machine code. Filled by Python, read by launches on any thread. Each registry has its own mutex,
// which is held neither while it waits nor while it calls out, so nothing here needs an order of
// locks.

#ifndef JAX_MEGAMOE_FFI_REGISTRY_H_
#define JAX_MEGAMOE_FFI_REGISTRY_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "ffi/launch_plan.h"

namespace jax_megamoe {

// DeepGEMM's SymBuffer, a kernel parameter passed by value.
struct SymBuffer {
  int64_t base;
  int64_t peer_offsets[kMaxNumRanks];  // peer's base minus own base; zero past the ranks
  uint32_t rank;
};
static_assert(sizeof(SymBuffer) == 592);

struct SymmetricBuffer {
  SymBuffer argument;
  uint32_t num_ranks;
  uint64_t num_bytes;
};

// Symmetric buffers by (key, device ordinal).
class SymmetricBuffers {
 public:
  static SymmetricBuffers& Get();

  // Throws LaunchError for a rank outside the peers, an own base that differs from
  // peer_bases[rank], bases that are not 128-byte aligned, no bytes, or a name already taken on
  // this device.
  void Register(const std::string& key, int ordinal, uint64_t base,
                const std::vector<uint64_t>& peer_bases, int64_t rank, uint64_t num_bytes);

  // From here on `Find` finds none. Returns when nobody holds what `Find` returned before: then no
  // launch with its address is still to be enqueued. Throws LaunchError if there is none, or while
  // a CUDA graph of a live executable holds its address.
  void Unregister(const std::string& key, int ordinal);

  // To be held as long as the address is in use. Throws LaunchError if there is none.
  std::shared_ptr<const SymmetricBuffer> Find(const std::string& key, int ordinal);

  // Devices on which `key` is registered.
  std::vector<int> Ordinals(const std::string& key);

  // Counts the executables whose CUDA graphs hold the buffer's address.
  void Pin(const std::string& key, int ordinal);
  void Unpin(const std::string& key, int ordinal);

 private:
  struct Entry {
    SymmetricBuffer buffer;
    int pins = 0;
    int uses = 0;  // what `Find` returned and is still held
  };
  const std::shared_ptr<Entry>& At(const std::string& key, int ordinal);  // mutex_ held

  std::mutex mutex_;  // guards all below, entries included
  std::condition_variable unused_;
  std::map<std::pair<std::string, int>, std::shared_ptr<Entry>> entries_;
};

// Machine code of kernels by specification, from a provider that compiles or reads it.
class Cubins {
 public:
  using Provider = std::function<std::string(const std::string& spec)>;

  static Cubins& Get();
  void SetProvider(Provider provider);

  // Calls the provider at the first request of a specification, without holding the mutex: it may
  // need Python's lock. Two threads may both call it; the first answer stays.
  std::shared_ptr<const std::string> Find(const Kernel& kernel);

 private:
  std::mutex mutex_;
  Provider provider_;
  std::map<std::string, std::shared_ptr<const std::string>> cubins_;
};

}  // namespace jax_megamoe

#endif  // JAX_MEGAMOE_FFI_REGISTRY_H_
