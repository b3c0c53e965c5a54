// Rows by their numbers: sums of chosen rows, weighted or not, and what is the other way round, a
// row given to each place where it was chosen.
//
// Float32 throughout, each result rounded once: a term of a sum has one rounding, if weighted, and
// the terms are added in order; the gradient of a weight is a sum as in Note [Row sums] of loops.h.
#include <cstddef>

#include "rows.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr int64_t kTile = 1024;

ANYCHIP_INLINE float weight_of(const void* weights, DType dtype, int64_t i) {
  if (!weights) return 1.0f;
  float value;
  to_float(dtype, row_of(weights, dtype, i), &value, 1);
  return value;
}

// A row as it is: a short one by moves of fixed sizes, since a copy of any size is a call.
ANYCHIP_INLINE void copy_row(void* to, const void* from, int64_t size) {
  constexpr int64_t kLong = 1024;
  if (size >= kLong) {
    __builtin_memcpy(to, from, static_cast<size_t>(size));
    return;
  }
  auto* t = static_cast<char*>(to);
  const auto* f = static_cast<const char*>(from);
  int64_t at = 0;
  for (; at + 64 <= size; at += 64) __builtin_memcpy(t + at, f + at, 64);
  if (size & 32) __builtin_memcpy(t + at, f + at, 32), at += 32;
  if (size & 16) __builtin_memcpy(t + at, f + at, 16), at += 16;
  copy_first(t + at, f + at, size & 15);
}

// Rows of one term each, as they are. The processor asks for what follows in a row by itself, once
// it has seen where that begins.
ANYCHIP_INLINE void gather(const RowSums& args, Range rows) {
  constexpr int64_t kLine = 64, kLines = 8, kAhead = 4;
  const int64_t size = bytes_of(args.dtype, args.width);
  const int64_t asked = size < kLines * kLine ? size : kLines * kLine;
  const auto* x = static_cast<const char*>(args.x);
  auto* y = static_cast<char*>(args.y) + rows.begin * size;
  for (int64_t row = rows.begin; row < rows.end; ++row, y += size) {
    const int64_t later = row + kAhead < rows.end ? row + kAhead : row;
    const char* next = x + args.index[later] * size;
    for (int64_t at = 0; at < asked; at += kLine) __builtin_prefetch(next + at);
    copy_row(y, x + args.index[row] * size, size);
  }
}

// What a sum has come to stays in the first cache, so that every row is read from end to end; the
// next one comes meanwhile.
template <class T>
[[gnu::flatten]] void sum(const RowSums& args, Range rows) {
  alignas(64) float tile[kTile];
  const int64_t width = args.width;
  const auto end_of = [&](int64_t row) {
    return args.ends ? (row < 0 ? 0 : args.ends[row]) : (row + 1) * args.terms;
  };
  const int64_t all = end_of(rows.end - 1);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t begin = end_of(row - 1), end = end_of(row);
    T* y = static_cast<T*>(args.y) + row * width;
    const auto row_at = [&](int64_t term) {
      return static_cast<const T*>(args.x) + args.index[term] * width;
    };
    if (begin == end) {
      for_each_vector(0, width, [&](int64_t i, auto lanes) { store(y + i, F32{}, lanes); });
    } else if (begin + 1 == end && !args.weights) {
      // The processor asks for what follows in a row by itself, once it has seen where that begins.
      const auto* next = reinterpret_cast<const char*>(row_at(end < all ? end : begin));
      const int64_t size = bytes_of(args.dtype, width), first = size < 512 ? size : 512;
      for (int64_t at = 0; at < first; at += 64) __builtin_prefetch(next + at);
      copy_row(y, row_at(begin), size);
    } else {
      for (int64_t column = 0; column < width; column += kTile) {
        const int64_t n = column + kTile < width ? kTile : width - column;
        for (int64_t term = begin; term < end; ++term) {
          const T* x = row_at(term) + column;
          const T* next = row_at(term + 1 < all ? term + 1 : term) + column;
          const float weight = weight_of(args.weights, args.weight_dtype, term);
          for_each_vector(0, n, [&](int64_t i, auto lanes) {
            __builtin_prefetch(next + i);
            F32 value = load(x + i, lanes) * weight;
            if (term > begin) value = load(tile + i, lanes) + value;
            if (term + 1 < end) return store(tile + i, value, lanes);
            store(y + column + i, value, lanes);
          });
        }
      }
    }
  }
}

template <class T>
[[gnu::flatten]] void spread(const RowSpread& args, Range rows) {
  const int64_t width = args.width;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* y = static_cast<const T*>(args.y) + row * width;
    for (int64_t term = row * args.terms; term < (row + 1) * args.terms; ++term) {
      const int64_t at = args.index[term] * width;
      T* dx = args.dx ? static_cast<T*>(args.dx) + at : nullptr;
      if (dx && !args.weights) copy_row(dx, y, bytes_of(args.dtype, width));
      if (dx && args.weights) {
        const float weight = weight_of(args.weights, args.weight_dtype, term);
        for_each_vector(0, width, [&](int64_t i, auto lanes) {
          store(dx + i, load(y + i, lanes) * weight, lanes);
        });
      }
      if (args.dweights) {
        const T* x = static_cast<const T*>(args.x) + at;
        const float along = sum_over(width, [&](int64_t i, auto lanes) {
          return load(y + i, lanes) * load_ahead(x + i, lanes);
        });
        from_float(args.weight_dtype, &along, row_of(args.dweights, args.weight_dtype, term), 1);
      }
    }
  }
}

}  // namespace

void sum_rows(const RowSums& args, Range rows) {
  if (!args.ends && args.terms == 1 && !args.weights) return gather(args, rows);
  visit_dtype(args.dtype, [&](auto t) { sum<decltype(t)>(args, rows); });
}

void spread_rows(const RowSpread& args, Range rows) {
  visit_dtype(args.dtype, [&](auto t) { spread<decltype(t)>(args, rows); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
