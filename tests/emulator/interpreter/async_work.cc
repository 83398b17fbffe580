#include "async_work.h"

#include <algorithm>
#include <cstring>

#include "error.h"
#include "machine.h"
#include "mbarrier.h"
#include "step.h"

namespace emulator {
namespace {

// Combines `size` bytes of `source` into `target`, element by element.
void Reduce(const AsyncWork& work, uint8_t* target, const uint8_t* source, uint64_t size) {
  const int element = Bits(work.type) / 8;
  if (size % element) Fail("reduction of %llu bytes", static_cast<unsigned long long>(size));
  for (uint64_t i = 0; i < size; i += element) {
    uint64_t old = 0, value = 0;
    std::memcpy(&old, target + i, element);
    std::memcpy(&value, source + i, element);
    old = Combine(static_cast<AtomicOp>(work.reduction), work.type, old, value, 0);
    std::memcpy(target + i, &old, element);
  }
}

Type ElementType(TensorType type) {
  static constexpr Type kTypes[] = {Type::kU8,  Type::kU16,  Type::kU32, Type::kS32,
                                    Type::kU64, Type::kS64,  Type::kF16, Type::kF32,
                                    Type::kF64, Type::kBf16, Type::kF32};
  if (type > TensorType::kFloat32Ftz) Fail("tensor reduction of this element type");
  return kTypes[static_cast<int>(type)];
}

// 16 bytes of a box in shared memory, and what they are in global memory.
struct Chunk {
  uint32_t shared;       // offset of the box's CTA
  uint64_t global;       // where the bytes within bounds are
  uint32_t skip, bytes;  // bytes before them, and how many they are
};

// Calls `visit` for each chunk of a box. Swizzles exchange chunks by the shared address: its bits 4
// to 6 are XORed with bits 7 to 9, as many as the swizzle's span has (PTX ISA 5.5.6, Swizzling
// modes).
template <typename F>
void ForEachChunk(const AsyncWork& work, F&& visit) {
  const TensorMap& map = work.map;
  const int bits = map.ElementBits();
  const uint32_t inner = map.InnerBytes(), rows = map.Rows();
  static constexpr uint32_t kSwizzle[] = {0, 1, 3, 7};
  if (work.shared % 128) Fail("TMA: shared address 0x%x is not aligned to 128 bytes", work.shared);
  const uint32_t base = work.shared & 0xffffff;
  SharedBytes(*work.cta, work.shared, uint64_t{inner} * rows, false);
  const uint32_t chunk_elements = map.Padded() ? 16 : 128 / bits;
  for (uint32_t row = 0; row < rows; ++row) {
    uint64_t address = map.base;
    uint32_t rest = row;
    bool within = true;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t at = int64_t{work.coordinates[i]} + rest % map.box[i];
      rest /= map.box[i];
      within &= at >= 0 && at < static_cast<int64_t>(map.dims[i]);
      address += static_cast<uint64_t>(at) * map.strides[i - 1];
    }
    for (uint32_t start = 0; start < inner; start += 16) {
      const uint32_t linear = base + row * inner + start;
      Chunk chunk{linear ^ (linear >> 7 & kSwizzle[map.swizzle]) << 4, 0, 0, 0};
      const int64_t first = int64_t{work.coordinates[0]} + start / 16 * chunk_elements;
      const int64_t low = std::max<int64_t>(0, -first);
      const int64_t high = std::min<int64_t>(chunk_elements, int64_t(map.dims[0]) - first);
      if (within && low < high) {
        if (low * bits % 8 || high * bits % 8 || first * bits % 8) Fail("TMA: half a byte");
        chunk.global = address + (first + low) * bits / 8;
        chunk.skip = static_cast<uint32_t>(low * bits / 8);
        chunk.bytes = static_cast<uint32_t>((high - low) * bits / 8);
      }
      visit(chunk);
    }
  }
}

// What a load writes outside the tensor: zeros, or a NaN: an H200 repeats 0x7ff7 for BF16 and for
// float32.
void Fill(const TensorMap& map, uint8_t* bytes) {
  std::memset(bytes, 0, 16);
  if (!map.nan_fill) return;
  constexpr uint16_t kNan = 0x7ff7;
  for (int i = 0; i < 16; i += 2) std::memcpy(bytes + i, &kNan, sizeof kNan);
}

void LoadTensor(Machine& machine, const AsyncWork& work) {
  Cta& cta = CtaOf(*work.cta->cluster, work.shared);
  const uint32_t width = work.map.Padded() ? 8 : 16;
  ForEachChunk(work, [&](const Chunk& chunk) {
    uint8_t bytes[16], valid[16];
    Fill(work.map, bytes);
    std::memset(valid, 1, sizeof valid);
    if (chunk.bytes) {
      machine.memory.ReadValid(chunk.global, chunk.bytes, valid + chunk.skip);
      std::memcpy(bytes + chunk.skip, reinterpret_cast<void*>(chunk.global), chunk.bytes);
    }
    std::memcpy(&cta.shared[chunk.shared], bytes, width);
    std::memcpy(&cta.shared_valid[chunk.shared], valid, width);
    if (work.map.Padded()) std::memset(&cta.shared_valid[chunk.shared + 8], 0, 8);
  });
  machine.UpdateMbarrier(*work.cta, work.barrier, false, -int64_t{work.map.TransactionBytes()}, 0,
                         work.waited);
}

// A store reads its source in one step and writes in another: between them `wait_group.read` holds.
void ReadTensor(AsyncWork& work) {
  if (work.map.Padded()) Fail("TMA: store of 16U4_ALIGN16B");
  const Cta& cta = CtaOf(*work.cta->cluster, work.shared);
  ForEachChunk(work, [&](const Chunk& chunk) {
    const auto at = static_cast<std::ptrdiff_t>(chunk.shared + chunk.skip);
    work.bytes.insert(work.bytes.end(), cta.shared.begin() + at,
                      cta.shared.begin() + at + chunk.bytes);
    work.valid.insert(work.valid.end(), cta.shared_valid.begin() + at,
                      cta.shared_valid.begin() + at + chunk.bytes);
  });
}

void Put(Machine& machine, AsyncWork& work, uint64_t to, uint64_t size, size_t from) {
  Region& region = machine.memory.Find(to, size, true);
  if (work.reduction >= 0) {
    Reduce(work, machine.ResolveGlobal(to, size, false), &work.bytes[from], size);
  } else {
    std::memcpy(reinterpret_cast<void*>(to), &work.bytes[from], size);
    if (region.valid) machine.memory.WriteValid(to, size, &work.valid[from]);
  }
}

void WriteTensor(Machine& machine, AsyncWork& work) {
  if (work.reduction >= 0) work.type = ElementType(work.map.type);
  size_t from = 0;
  ForEachChunk(work, [&](const Chunk& chunk) {
    if (!chunk.bytes) return;
    Put(machine, work, chunk.global, chunk.bytes, from);
    from += chunk.bytes;
  });
}

void ReadShared(AsyncWork& work, uint32_t address) {
  const uint8_t* bytes = SharedBytes(*work.cta, address, work.size, true);
  const uint8_t* valid = SharedValid(*work.cta, address);
  work.bytes.assign(bytes, bytes + work.size);
  work.valid.assign(valid, valid + work.size);
}

bool Store(Machine& machine, AsyncWork& work) {
  const bool tensor = work.kind == AsyncWork::Kind::kTensorStore;
  if (!work.read) {
    if (tensor) {
      ReadTensor(work);
    } else {
      ReadShared(work, work.shared);
    }
    work.read = true;
    --work.group->unread;
    return false;
  }
  if (tensor) {
    WriteTensor(machine, work);
  } else {
    Put(machine, work, work.global, work.size, 0);
  }
  --work.group->unwritten;
  return true;
}

// Writes shared memory, perhaps of another CTA, and completes the bytes at an mbarrier.
void Deliver(Machine& machine, const AsyncWork& work, const uint8_t* bytes, const uint8_t* valid) {
  uint8_t* to = SharedBytes(*work.cta, work.shared, work.size, false);
  if (work.reduction >= 0) {
    Reduce(work, machine.ResolveShared(*work.cta, work.shared, work.size, false, false), bytes,
           work.size);
  } else {
    std::memcpy(to, bytes, work.size);
    uint8_t* flags = SharedValid(*work.cta, work.shared);
    if (valid) {
      std::memcpy(flags, valid, work.size);
    } else {
      std::memset(flags, 1, work.size);
    }
  }
  machine.UpdateMbarrier(*work.cta, work.barrier, false, -int64_t{work.size}, 0, work.waited);
}

void Copy(Machine& machine, AsyncWork& work) {
  uint8_t bytes[16] = {}, valid[16];
  std::memset(valid, 1, sizeof valid);
  if (work.source_size) {
    machine.memory.ReadValid(work.global, work.source_size, valid);
    std::memcpy(bytes, reinterpret_cast<void*>(work.global), work.source_size);
  }
  std::memcpy(SharedBytes(*work.cta, work.shared, work.size, true), bytes, work.size);
  std::memcpy(SharedValid(*work.cta, work.shared), valid, work.size);
  --work.group->unread;
  --work.group->unwritten;
}

}  // namespace

void NoteOverlap(Machine& machine, const AsyncWork& work) {
  const auto note = [&](uint64_t address, uint64_t size, bool write) {
    Region& region = machine.memory.Find(address, size, write);
    if (region.touched) machine.overlap.Note(region, address, size, write, {work.waited});
  };
  switch (work.kind) {
    case AsyncWork::Kind::kTensorLoad:
    case AsyncWork::Kind::kTensorStore:
      if (!machine.memory.Find(work.map.base, 1, false).touched) return;
      ForEachChunk(work, [&](const Chunk& chunk) {
        const bool write = work.kind == AsyncWork::Kind::kTensorStore;
        if (chunk.bytes) note(chunk.global, chunk.bytes, write);
      });
      break;
    case AsyncWork::Kind::kBulkLoad:
      note(work.global, work.size, false);
      break;
    case AsyncWork::Kind::kBulkStore:
      note(work.global, work.size, true);
      break;
    case AsyncWork::Kind::kCopy:
      if (work.source_size) note(work.global, work.source_size, false);
      break;
    default:
      break;
  }
}

bool Advance(Machine& machine, AsyncWork& work) {
  if (work.kind == AsyncWork::Kind::kArrive) {
    const bool done = std::all_of(work.after.begin(), work.after.end(),
                                  [](const auto& group) { return group->unwritten == 0; });
    if (done) machine.UpdateMbarrier(*work.cta, work.barrier, true, 0, 1, work.waited);
    return done;
  }
  ++machine.progress;
  switch (work.kind) {
    case AsyncWork::Kind::kTensorLoad:
      LoadTensor(machine, work);
      return true;
    case AsyncWork::Kind::kTensorStore:
    case AsyncWork::Kind::kBulkStore:
      return Store(machine, work);
    case AsyncWork::Kind::kBulkLoad: {
      std::vector<uint8_t> valid(work.size);
      machine.memory.ReadValid(work.global, work.size, valid.data());
      Deliver(machine, work, reinterpret_cast<const uint8_t*>(work.global), valid.data());
      return true;
    }
    case AsyncWork::Kind::kBulkShared:
      ReadShared(work, work.shared_source);
      Deliver(machine, work, work.bytes.data(), work.valid.data());
      return true;
    case AsyncWork::Kind::kStoreAsync:
      Deliver(machine, work, work.data, nullptr);
      return true;
    case AsyncWork::Kind::kCopy:
      Copy(machine, work);
      return true;
    case AsyncWork::Kind::kArrive:
      break;
  }
  return true;
}

}  // namespace emulator
