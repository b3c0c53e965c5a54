// Checks of what is dropped.
#pragma once

#include "checks.h"
#include "operators.h"

namespace anychip::cpu {

// columns: of rows that have numbers.
inline void check_drop(const char* where, const Drop& drop, int64_t numel, int64_t columns) {
  check(drop.p >= 0.0 && drop.p <= 1.0, where,
        "expected 0 <= p <= 1, got " + std::to_string(drop.p));
  check_address(where, "rng", drop.rng);
  check_sizes(where, {{"columns", columns}});
  check_sizes(where, {{"width", drop.width}});
  if (drop.rows == nullptr) return;
  const bool whole = columns > 0 && numel % columns == 0;
  check(whole || (columns == 0 && numel == 0), where,
        "expected whole rows, got " + std::to_string(numel) + " elements in rows of " +
            std::to_string(columns));
  check(drop.column >= 0 && drop.width - drop.column >= columns, where,
        "expected rows within a width, got column " + std::to_string(drop.column) + " to " +
            std::to_string(drop.column + columns) + " of " + std::to_string(drop.width));
}

}  // namespace anychip::cpu
