// How a matrix is cut into tiles of columns and blocks of rows: the numbers behind columns.cuh;
// and the sums down the columns of one.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

constexpr int kTileThreads = 256;
constexpr int kTileLanes = 32;  // vectors side by side: 512 adjacent bytes of a row
constexpr int kRowsAhead = 2;   // rows of a thread that are loaded before the first is used
constexpr int kTileBlocks = 3;  // per multiprocessor, by the launch bounds: 80 registers a thread

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How a matrix is cut: `lanes` vectors times kTileThreads / lanes rows at a time.
struct Tiling {
  int lanes;
  int64_t tiles;  // across a row
  int64_t rows_per_block;
};

// A power of two that is at least `vectors`, up to kTileLanes.
inline int lanes_for(int64_t vectors) {
  int lanes = 1;
  while (lanes < kTileLanes && lanes < vectors) lanes *= 2;
  return lanes;
}

// For `parts` blocks down the rows, of which the last ones may find no row.
inline Tiling tiling_of(int64_t rows, int64_t hidden, int width, int64_t parts) {
  Tiling made;
  made.lanes = lanes_for(hidden / width);
  made.tiles = ceil_div(hidden / width, made.lanes);
  const int64_t at_once = int64_t{kTileThreads / made.lanes} * kRowsAhead;
  made.rows_per_block = ceil_div(ceil_div(rows, parts), at_once) * at_once;
  return made;
}

// Parts for column sums over all blocks that are on the device at a time: one wave, and partial
// results that are few against the matrix. At least 1.
inline int64_t column_parts(int64_t rows, int64_t hidden, DType dtype, int multiprocessors) {
  const int width = dtype == DType::kFloat32 ? 4 : 8;
  const int64_t vectors = hidden < width ? 1 : ceil_div(hidden, width);
  const int lanes = lanes_for(vectors);
  const int64_t most = ceil_div(rows, int64_t{kTileThreads / lanes} * kRowsAhead);
  const int64_t wave = int64_t{multiprocessors} * kTileBlocks / ceil_div(vectors, lanes);
  const int64_t parts = wave < most ? wave : most;
  return parts < 1 ? 1 : parts;
}

// Parts for a function without sums: a thread takes four times kRowsAhead rows for one load of its
// columns' values.
inline int64_t short_parts(int64_t rows, int64_t hidden, int width) {
  const int64_t at_once = int64_t{kTileThreads / lanes_for(hidden / width)} * kRowsAhead;
  return ceil_div(rows, 4 * at_once);
}

// sums[column] = the float32 sum over all rows of x[row][column], contiguous. `parts` is
// column_parts(); partial has parts * hidden floats.
cudaError_t column_sums(const void* x, void* sums, float* partial, int64_t rows, int64_t hidden,
                        int64_t parts, DType dtype, DType sums_dtype, Place place);

}  // namespace anychip::cuda
