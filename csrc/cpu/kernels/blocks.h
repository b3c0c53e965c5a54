// The sum of one block of the grid of l2_norm_partials, in its fixed order.
#pragma once

#include "loops.h"

namespace anychip::cpu::ANYCHIP_ISA {

// values[0, n), then zeros up to `block`, a power of two: first half plus second half until one is
// left. Destroys values[0, block).
ANYCHIP_INLINE float sum_in_pairs(float* values, int64_t n, int64_t block) {
  for (int64_t i = n; i < block; ++i) values[i] = 0.0f;
  int64_t width = block / 2;
  for (; width >= kLanes; width /= 2) {
    for (int64_t i = 0; i < width; i += kLanes) {
      store(values + i, load(values + i, AllLanes{}) + load(values + width + i, AllLanes{}),
            AllLanes{});
    }
  }
  for (; width > 0; width /= 2) {
    for (int64_t i = 0; i < width; ++i) values[i] += values[width + i];
  }
  return values[0];
}

}  // namespace anychip::cpu::ANYCHIP_ISA
