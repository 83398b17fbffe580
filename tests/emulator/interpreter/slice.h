// A warp's turn: which lanes run together, and one instruction after the other.
#pragma once

#include "step.h"

namespace emulator {

class Slice {
 public:
  Slice(Machine& machine, Warp& warp) : machine_(machine), warp_(warp) {}
  // Runs at most `budget` instructions; less where the warp waits.
  void Run(int budget);

 private:
  // Takes the lanes at one place: the lowest one's, or any lane's.
  bool Select(bool any);
  void Leave();  // writes the front's place back to its lanes
  Outcome Execute(const Instruction& inst);

  Machine& machine_;
  Warp& warp_;
  Front front_;
};

}  // namespace emulator
