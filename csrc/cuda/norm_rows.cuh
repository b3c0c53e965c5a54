// How the rows of a norm lie over the threads of a block: what each loads, holds and stores.
//
// threadIdx.x counts the threads of one row, threadIdx.y the rows that a block has at a time. A
// thread holds kVectors vectors of N elements, blockDim.x vectors apart, so that a warp's accesses
// are next to each other. Together the threads of a row hold a tile of its columns; a row that is
// longer than a tile is read again in every pass.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {

// N elements of an array of T. To load everything as it lies in memory, and unpack later, keeps all
// loads in flight across branches.
template <int N, class T>
__device__ __forceinline__ Adjacent<N, T> load_at(const void* array, int64_t place) {
  return load_adjacent<N>(static_cast<const T*>(array) + place);
}

// N elements of a vector of parameters, which may have another type than the rows: the branch is
// the same for all threads, and the caches serve all rows but the first.
template <int N>
__device__ __forceinline__ void load_parameter(const void* array, DType dtype, int64_t at,
                                               float (&to)[N]) {
  if (dtype == DType::kBFloat16) {
    unpack(load_at<N, BFloat16>(array, at), to);
  } else if (dtype == DType::kFloat16) {
    unpack(load_at<N, Float16>(array, at), to);
  } else {
    unpack(load_at<N, float>(array, at), to);
  }
}

// Rows have up to 2^30 columns: the number of a column is an int, and the registers that this
// saves hold columns. What counts elements of a whole array is an int64_t.
constexpr int kMostColumns = 1 << 30;

// Columns from the first of a tile to the first of the next.
template <int N, int kVectors>
__host__ __device__ __forceinline__ int tile_columns(int threads) {
  return threads * kVectors * N;
}

template <int N, int kVectors>
__host__ __device__ __forceinline__ int tiles_of_row(int hidden, int threads) {
  const int columns = tile_columns<N, kVectors>(threads);
  return (hidden + columns - 1) / columns;
}

// body(v, column) for each vector of this thread in a tile; a vector is whole or absent.
template <int N, int kVectors, class Body>
__device__ __forceinline__ void for_each_vector(int tile, int hidden, Body body) {
  const int threads = static_cast<int>(blockDim.x);
  const int first = tile * tile_columns<N, kVectors>(threads) + static_cast<int>(threadIdx.x) * N;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = first + v * threads * N;
    if (column < hidden) body(v, column);
  }
}

// How many threads hold a row in one tile, or `most` when it takes several; a multiple of a warp.
template <int N, int kVectors>
int threads_of_row(int hidden, int most) {
  const int warps = tiles_of_row<N, kVectors>(hidden, kWarp);
  return warps < 1 ? kWarp : warps * kWarp > most ? most : warps * kWarp;
}

}  // namespace anychip::cuda
