// Rows of digits that threads add to: Note [Exact sums] in operators.h.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include "operators.h"

namespace anychip::cpu {

struct Digits {
  int64_t row[kDigits] = {};

  // Each digit from 0 to 2^32 - 1 again; the sum itself is not negative.
  void carry() {
    for (int k = 0; k + 1 < kInfinities; ++k) {
      row[k + 1] += row[k] >> 32;
      row[k] &= 0xffffffff;
    }
  }

  // To a row that other threads add to; in any order, as these are integers.
  void add_to(int64_t* shared) {
    carry();
    for (int k = 0; k < kDigits; ++k) {
      if (row[k] != 0) __atomic_fetch_add(shared + k, row[k], __ATOMIC_RELAXED);
    }
  }

  // The square root, as anychip.operators.squares.root has it.
  float root() const {
    if (row[kNaNs] > 0) return NAN;
    if (row[kInfinities] > 0) return INFINITY;
    double sum = 0.0;
    for (int k = kInfinities - 1; k >= 0; --k) {
      sum += std::ldexp(static_cast<double>(row[k]), 32 * k - 298);
    }
    return static_cast<float>(std::sqrt(sum));
  }
};

// A row per tensor: no padding is between them.
static_assert(sizeof(Digits) == kDigits * sizeof(int64_t), "rows follow each other");

inline void write_rows(std::vector<Digits>& rows, int64_t* out) {
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i].carry();
    std::memcpy(out + i * kDigits, rows[i].row, sizeof rows[i].row);
  }
}

}  // namespace anychip::cpu
