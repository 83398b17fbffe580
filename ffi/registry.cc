#include "ffi/registry.h"

#include "ffi/error.h"

namespace jax_megamoe {
namespace {

constexpr uint64_t kBufferAlignment = 128;

std::string BufferName(const std::string& key, int ordinal) {
  return "symmetric buffer \"" + key + "\" on device " + std::to_string(ordinal);
}

}  // namespace

SymmetricBuffers& SymmetricBuffers::Get() {
  static auto* registry = new SymmetricBuffers;
  return *registry;
}

void SymmetricBuffers::Register(const std::string& key, int ordinal, uint64_t base,
                                const std::vector<uint64_t>& peer_bases, int64_t rank,
                                uint64_t num_bytes) {
  const int64_t num_ranks = static_cast<int64_t>(peer_bases.size());
  if (key.empty()) Reject("key", "a name", "an empty string");
  if (num_ranks < 1 || num_ranks > kMaxNumRanks) {
    Reject("peer_bases", "1 to " + std::to_string(kMaxNumRanks) + " addresses",
           std::to_string(num_ranks));
  }
  if (rank < 0 || rank >= num_ranks) {
    Reject("rank", "one of " + std::to_string(num_ranks) + " ranks", std::to_string(rank));
  }
  if (peer_bases[rank] != base) {
    Reject("peer_bases[" + std::to_string(rank) + "]", "the own base " + std::to_string(base),
           std::to_string(peer_bases[rank]));
  }
  for (int64_t i = 0; i < num_ranks; ++i) {
    if (peer_bases[i] == 0 || peer_bases[i] % kBufferAlignment != 0) {
      Reject("peer_bases[" + std::to_string(i) + "]", "an address aligned to 128 bytes",
             std::to_string(peer_bases[i]));
    }
  }
  if (num_bytes == 0) Reject("num_bytes", "at least 1", "0");
  auto entry = std::make_shared<Entry>();
  entry->buffer.argument.base = static_cast<int64_t>(base);
  for (int64_t i = 0; i < num_ranks; ++i) {
    entry->buffer.argument.peer_offsets[i] = static_cast<int64_t>(peer_bases[i] - base);
  }
  entry->buffer.argument.rank = static_cast<uint32_t>(rank);
  entry->buffer.num_ranks = static_cast<uint32_t>(num_ranks);
  entry->buffer.num_bytes = num_bytes;
  std::lock_guard lock(mutex_);
  if (!entries_.try_emplace({key, ordinal}, std::move(entry)).second) {
    Reject(BufferName(key, ordinal), "a name not in use", "one already registered",
           "unregister it first");
  }
}

const std::shared_ptr<SymmetricBuffers::Entry>& SymmetricBuffers::At(const std::string& key,
                                                                     int ordinal) {
  const auto found = entries_.find({key, ordinal});
  if (found == entries_.end()) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message(BufferName(key, ordinal), "one allocated in this process", "none",
                              "allocate it before the first launch, on every rank"));
  }
  return found->second;
}

void SymmetricBuffers::Unregister(const std::string& key, int ordinal) {
  std::unique_lock lock(mutex_);
  const std::shared_ptr<Entry> entry = At(key, ordinal);
  if (entry->pins > 0) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message(BufferName(key, ordinal), "no executable that holds its address",
                              std::to_string(entry->pins) + " with CUDA graphs",
                              "drop the jitted functions first, or call jax.clear_caches()"));
  }
  // Erased before waiting: launches that come meanwhile are refused and cannot prolong it.
  entries_.erase({key, ordinal});
  unused_.wait(lock, [&] { return entry->uses == 0; });
}

std::shared_ptr<const SymmetricBuffer> SymmetricBuffers::Find(const std::string& key, int ordinal) {
  std::shared_ptr<Entry> entry;
  {
    std::lock_guard lock(mutex_);
    entry = At(key, ordinal);
    ++entry->uses;
  }
  const auto release = [this, entry](const SymmetricBuffer*) {
    {
      std::lock_guard lock(mutex_);
      --entry->uses;
    }
    unused_.notify_all();
  };
  return std::shared_ptr<const SymmetricBuffer>(&entry->buffer, release);
}

std::vector<int> SymmetricBuffers::Ordinals(const std::string& key) {
  std::lock_guard lock(mutex_);
  std::vector<int> ordinals;
  for (const auto& [name, entry] : entries_) {
    if (name.first == key) ordinals.push_back(name.second);
  }
  return ordinals;
}

void SymmetricBuffers::Pin(const std::string& key, int ordinal) {
  std::lock_guard lock(mutex_);
  ++At(key, ordinal)->pins;
}

void SymmetricBuffers::Unpin(const std::string& key, int ordinal) {
  std::lock_guard lock(mutex_);
  if (const auto found = entries_.find({key, ordinal}); found != entries_.end()) {
    --found->second->pins;
  }
}

Cubins& Cubins::Get() {
  static auto* registry = new Cubins;
  return *registry;
}

void Cubins::SetProvider(Provider provider) {
  std::lock_guard lock(mutex_);
  provider_ = std::move(provider);
}

std::shared_ptr<const std::string> Cubins::Find(const Kernel& kernel) {
  Provider provider;
  {
    std::lock_guard lock(mutex_);
    if (const auto found = cubins_.find(kernel.spec); found != cubins_.end()) return found->second;
    provider = provider_;
  }
  if (provider == nullptr) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message("kernel " + kernel.symbol, "a provider of its machine code", "none",
                              "import jax_megamoe before running this executable"));
  }
  auto cubin = std::make_shared<const std::string>(provider(kernel.spec));
  std::lock_guard lock(mutex_);
  return cubins_.try_emplace(kernel.spec, std::move(cubin)).first->second;
}

}  // namespace jax_megamoe
