// The results of a warp operation, once all its lanes have arrived.
#pragma once

#include <cstdint>

#include "engine.h"

namespace cuda_emulator {

// A value that no lane gave: not a number in every float type.
constexpr uint64_t kPoison = ~uint64_t{0};

// Source lane, distance or lane mask of a shuffle, and the width of its segments.
struct Shuffle {
  int argument, width;
};

struct WarpRegisters {
  uint64_t value[32];  // what a lane brings, and then its result
  Shuffle shuffle[32];
};

// Writes the results of `lanes`. A shuffle from a lane that is not among them gives kPoison: its
// result is undefined on the device.
void complete(WarpOperation operation, uint32_t lanes, WarpRegisters& registers);

}  // namespace cuda_emulator
