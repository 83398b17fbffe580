// Asynchronous copies: what they do, at once or, with a delay, some rounds after their issue.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "instruction.h"
#include "state.h"
#include "tensor_map.h"

namespace emulator {

class Machine;

struct AsyncWork {
  enum class Kind {
    kTensorLoad,
    kTensorStore,
    kBulkLoad,    // global to shared
    kBulkStore,   // shared to global, perhaps reducing
    kBulkShared,  // shared to another CTA's shared, perhaps reducing
    kStoreAsync,  // registers to shared, perhaps reducing
    kCopy,        // cp.async
    kArrive,      // cp.async.mbarrier.arrive: once the thread's copies are done
  };
  Kind kind{};
  Cta* cta = nullptr;  // the issuing one
  int line = 0;
  bool waited = false;  // the issuing thread is behind a griddepcontrol.wait
  uint32_t shared = 0, barrier = 0;
  uint32_t shared_source = 0;
  uint64_t global = 0;
  uint32_t size = 0, source_size = 0;
  TensorMap map{};
  int32_t coordinates[5] = {};
  uint8_t data[16] = {};
  int reduction = -1;  // an AtomicOp
  Type type = Type::kB32;
  std::shared_ptr<CopyGroup> group;
  std::vector<std::shared_ptr<CopyGroup>> after;  // of kArrive
  // A store's bytes and their validity once its source is read.
  bool read = false;
  std::vector<uint8_t> bytes, valid;
};

// Holds the global bytes that work will touch against launches that may still run.
void NoteOverlap(Machine& machine, const AsyncWork& work);
// Does a step of the work; false if another is left (stores read and write in two steps).
bool Advance(Machine& machine, AsyncWork& work);

}  // namespace emulator
