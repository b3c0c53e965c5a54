// What is around the product of a block of bfloat16 matrices: its factors are copied as the
// processor's instructions read them, and its sums are written, rounded once.
#include "loops.h"
#include "table.h"
#include "transpose.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr int kPairs = 8;  // are turned at a time: 16 terms

ANYCHIP_INLINE uint32_t pair(BFloat16 first, BFloat16 second) {
  return static_cast<uint32_t>(first.bits) | static_cast<uint32_t>(second.bits) << 16;
}

ANYCHIP_INLINE void write(void* to, const uint32_t* pairs, int64_t count) {
  __builtin_memcpy(to, pairs, static_cast<size_t>(count) * sizeof(uint32_t));
}

// Columns of a matrix as rows.
[[gnu::flatten]] void turn_rows(const PackedPairs& part, BFloat16* rows) {
  for (int64_t first = 0; first < part.count; first += kTurnedColumns) {
    const int64_t rest = part.count - first, count = rest < kTurnedColumns ? rest : kTurnedColumns;
    turn_columns(part.from + first, part.stride, part.depth, count, rows + first * part.room,
                 part.room);
  }
}

// A panel of a matrix whose rows are along the depth: whole pairs, if they all begin at one.
[[gnu::flatten]] void turn_panel(const PackedPairs& part, BFloat16* panel) {
  int64_t k = 0;
  for (; part.stride % 2 == 0 && k + 2 * kPairs <= part.depth; k += 2 * kPairs) {
    for (int64_t i = 0; i < kPairColumns; i += kPairs) {
      const int64_t rest = part.count - i, count = rest < 0 ? 0 : rest < kPairs ? rest : kPairs;
      transpose_eight(reinterpret_cast<const float*>(part.from + i * part.stride + k),
                      part.stride / 2, count,
                      reinterpret_cast<float*>(panel + k * kPairColumns + 2 * i), kPairColumns);
    }
  }
  for (; k < part.room; k += 2) {
    for (int64_t i = 0; i < kPairColumns; ++i) {
      const BFloat16* at = part.from + i * part.stride + k;
      uint32_t found = 0;
      if (i < part.count && k < part.depth) {
        found = pair(at[0], k + 1 < part.depth ? at[1] : BFloat16{0});
      }
      write(panel + k * kPairColumns + 2 * i, &found, 1);
    }
  }
}

}  // namespace

void pack_rows16(const PackedPairs& part, BFloat16* rows) {
  if (!part.is_along) turn_rows(part, rows);
  const auto size = static_cast<size_t>(part.depth) * sizeof(BFloat16);
  const auto rest = static_cast<size_t>(part.room - part.depth) * sizeof(BFloat16);
  for (int64_t i = 0; i < part.count; ++i) {
    if (part.is_along) __builtin_memcpy(rows + i * part.room, part.from + i * part.stride, size);
    __builtin_memset(rows + i * part.room + part.depth, 0, rest);
  }
}

void pack_panel16(const PackedPairs& part, BFloat16* panel) {
  if (part.is_along) return turn_panel(part, panel);
  for (int64_t k = 0; k < part.room; k += 2) {
    uint32_t pairs[kPairColumns] = {};
    const int64_t rest = part.depth - k;
    if (rest > 0) read_row(part.from + k * part.stride, part.stride, rest, part.count, pairs);
    write(panel + k * kPairColumns, pairs, kPairColumns);
  }
}

void write_sums(const PairsResult& result) {
  for (int64_t row = 0; row < result.rows; ++row) {
    const float* sums = result.sums + row * kPairColumns;
    float* to = result.to + row * result.stride;
    for_each_vector(0, result.columns, [&](int64_t i, auto lanes) {
      F32 sum = load(sums + i, lanes);
      if (result.bias) sum = load(result.bias + i, lanes) + sum;
      if (result.adds) sum = load(to + i, lanes) + sum;
      store(to + i, sum, lanes);
    });
  }
}

}  // namespace anychip::cpu::ANYCHIP_ISA
