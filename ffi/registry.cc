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
  if (base == 0 || base % kBufferAlignment != 0) {
    Reject("base", "an address aligned to 128 bytes", std::to_string(base));
  }
  auto buffer = std::make_shared<SymmetricBuffer>();
  buffer->argument.base = static_cast<int64_t>(base);
  for (int64_t i = 0; i < num_ranks; ++i) {
    buffer->argument.peer_offsets[i] = static_cast<int64_t>(peer_bases[i] - base);
  }
  buffer->argument.rank = static_cast<uint32_t>(rank);
  buffer->num_ranks = static_cast<uint32_t>(num_ranks);
  buffer->num_bytes = num_bytes;
  std::lock_guard lock(mutex_);
  if (!entries_.try_emplace({key, ordinal}, Entry{std::move(buffer)}).second) {
    Reject(BufferName(key, ordinal), "a name not in use", "one already registered",
           "unregister it first");
  }
}

SymmetricBuffers::Entry& SymmetricBuffers::At(const std::string& key, int ordinal) {
  const auto found = entries_.find({key, ordinal});
  if (found == entries_.end()) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message(BufferName(key, ordinal), "one allocated in this process", "none",
                              "allocate it before the first launch, on every rank"));
  }
  return found->second;
}

void SymmetricBuffers::Unregister(const std::string& key, int ordinal) {
  std::lock_guard lock(mutex_);
  const int pins = At(key, ordinal).pins;
  if (pins > 0) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message(BufferName(key, ordinal), "no executable that holds its address",
                              std::to_string(pins) + " with CUDA graphs",
                              "drop the jitted functions first, or call jax.clear_caches()"));
  }
  entries_.erase({key, ordinal});
}

std::shared_ptr<const SymmetricBuffer> SymmetricBuffers::Find(const std::string& key, int ordinal) {
  std::lock_guard lock(mutex_);
  return At(key, ordinal).buffer;
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
  ++At(key, ordinal).pins;
}

void SymmetricBuffers::Unpin(const std::string& key, int ordinal) {
  std::lock_guard lock(mutex_);
  if (const auto found = entries_.find({key, ordinal}); found != entries_.end()) {
    --found->second.pins;
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
    if (const auto found = cubins_.find(kernel.key); found != cubins_.end()) return found->second;
    provider = provider_;
  }
  if (provider == nullptr) {
    throw LaunchError(ffi::ErrorCode::kFailedPrecondition,
                      Message("kernel " + kernel.symbol, "a provider of its machine code", "none",
                              "import jax_megamoe before running this executable"));
  }
  auto cubin = std::make_shared<const std::string>(provider(kernel.spec));
  std::lock_guard lock(mutex_);
  return cubins_.try_emplace(kernel.key, std::move(cubin)).first->second;
}

}  // namespace jax_megamoe
