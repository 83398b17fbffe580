// The machine for Python's ctypes (../machine.py).
#include <cstring>
#include <map>
#include <string>

#include "error.h"
#include "machine.h"

using emulator::Machine;

namespace emulator {

// Sets by name; false if there is no such setting.
bool Set(Machine& machine, const std::string& name, double value) {
  Settings& s = machine.settings;
  const auto whole = static_cast<uint64_t>(value);
  if (name == "seed") {
    machine.Seed(whole);
  } else if (name == "delay") {
    s.delay = value;
  } else if (name == "stall_rounds") {
    s.stall_rounds = whole;
  } else if (name == "max_instructions") {
    s.max_instructions = whole;
  } else if (name == "slice_min") {
    s.slice_min = static_cast<int>(value);
  } else if (name == "slice_max") {
    s.slice_max = static_cast<int>(value);
  } else if (name == "strict") {
    s.strict = value != 0;
  } else if (name == "diverge") {
    s.diverge = value != 0;
  } else if (name == "exact_sums") {
    s.exact_sums = value != 0;
  } else if (name == "whole_warpgroups") {
    s.whole_warpgroups = value != 0;
  } else if (name == "grid_id") {
    s.grid_id = whole;
  } else if (name == "smid_offset") {
    s.smid_offset = whole;
  } else if (name == "max_resident") {
    s.max_resident = whole;
  } else {
    return false;
  }
  return true;
}

// A count by name; -1 if there is none.
double Get(const Machine& machine, const std::string& name) {
  const Counts& c = machine.counts;
  const std::map<std::string, uint64_t> counts = {{"executed", c.executed},
                                                  {"rounds", c.rounds},
                                                  {"matrix", c.matrix},
                                                  {"launches", c.launches},
                                                  {"uninitialised_shared", c.uninitialised_shared},
                                                  {"uninitialised_tensor", c.uninitialised_tensor},
                                                  {"uninitialised_global", c.uninitialised_global}};
  const auto found = counts.find(name);
  return found == counts.end() ? -1 : static_cast<double>(found->second);
}

}  // namespace emulator

extern "C" {

Machine* emulator_new() { return new Machine; }
void emulator_delete(Machine* machine) { delete machine; }
int emulator_set(Machine* machine, const char* name, double value) {
  return emulator::Set(*machine, name, value);
}
double emulator_get(const Machine* machine, const char* name) {
  return emulator::Get(*machine, name);
}
const char* emulator_error(const Machine* machine) { return machine->error.c_str(); }
const char* emulator_log(const Machine* machine) { return machine->log.c_str(); }

void emulator_region(Machine* machine, uint64_t base, uint64_t size, const char* name, int writable,
                     int track) {
  machine->memory.Add(base, size, name, writable, track);
}
void emulator_mark_valid(Machine* machine, uint64_t base, uint64_t size) {
  machine->memory.MarkValid(base, size);
}
int64_t emulator_first_invalid(Machine* machine, uint64_t base, uint64_t size) {
  return machine->memory.FirstInvalid(base, size);
}

// The arrays stay the caller's. Returns the kernel's number.
int emulator_kernel(Machine* machine, const emulator::Instruction* code, const int32_t* pool,
                    const uint64_t* constants, int num_constants, int num_registers,
                    int local_bytes, int dynamic_at, uint64_t globals_base) {
  auto kernel = std::make_unique<emulator::Kernel>(
      emulator::Kernel{code, pool, num_registers, local_bytes, dynamic_at, globals_base, {}});
  for (int i = 0; i < num_constants; ++i) {
    kernel->constants.insert(kernel->constants.end(), 32, constants[i]);
  }
  machine->kernels.push_back(std::move(kernel));
  return static_cast<int>(machine->kernels.size()) - 1;
}

// Adds a grid to the next run. `parameters` is the address of the parameter block.
void emulator_grid(Machine* machine, int kernel, uint64_t parameters, const uint32_t* grid,
                   const uint32_t* block, const uint32_t* cluster, uint32_t dynamic_shared,
                   int rank) {
  auto added = std::make_unique<emulator::Grid>();
  added->kernel = machine->kernels.at(kernel).get();
  added->parameters = parameters;
  std::memcpy(added->grid, grid, sizeof added->grid);
  std::memcpy(added->block, block, sizeof added->block);
  std::memcpy(added->cluster, cluster, sizeof added->cluster);
  added->dynamic_shared = dynamic_shared;
  added->rank = rank;
  added->total = uint64_t{grid[0]} * grid[1] * grid[2] / added->ClusterSize();
  machine->grids.push_back(std::move(added));
}
void emulator_clear(Machine* machine) { machine->ClearGrids(); }

// Holds the next run against those before it, as launches of one stream; `early`: it may start
// before they have ended. 0, or 1 with emulator_error.
int emulator_overlap(Machine* machine, const char* name, int early) {
  try {
    machine->overlap.Begin(name, early);
    machine->memory.KeepTouched(!early);
    return 0;
  } catch (const std::exception& error) {
    machine->error = error.what();
    return 1;
  }
}

// Runs the grids added, together; 0, or 1 with emulator_error.
int emulator_run(Machine* machine) {
  machine->error.clear();
  ++machine->counts.launches;
  try {
    machine->Run();
    machine->overlap.End(machine->grids);
    return 0;
  } catch (const std::exception& error) {
    machine->error = error.what() + machine->Where();
    return 1;
  }
}
int emulator_encode(const emulator::TensorMapArguments* arguments, void* map, char* message,
                    size_t size) {
  try {
    const emulator::TensorMap encoded = emulator::Encode(*arguments);
    std::memset(map, 0, 128);
    std::memcpy(map, &encoded, sizeof encoded);
    return 0;
  } catch (const std::exception& error) {
    std::strncpy(message, error.what(), size - 1);
    return 1;
  }
}
}
