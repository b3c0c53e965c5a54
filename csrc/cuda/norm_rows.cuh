// How the rows of a norm lie over the threads of a block: what each loads, holds and stores.
//
// threadIdx.x counts the threads of one row, threadIdx.y the rows that a block has at a time. A
// thread holds kVectors vectors of N elements, blockDim.x vectors apart, so that a warp's accesses
// are next to each other. Together the threads of a row hold a tile of its columns; a row that is
// longer than a tile is read again in every pass.
#pragma once

#include "columns.cuh"
#include "reduce.cuh"

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

// The numbers of weight and bias that a row's elements have: those of their columns.
struct OwnColumns {
  static constexpr bool kIsAlone = false;  // whether rows never have a residual
  __device__ __forceinline__ OwnColumns of(int64_t) const { return {}; }
  static constexpr __host__ __device__ unsigned groups() { return 1; }
  template <int N>
  __device__ __forceinline__ void load(const void* array, DType dtype, int column,
                                       float (&to)[N]) const {
    load_parameter(array, dtype, column, to);
  }
};

// The numbers of weight and bias that a group has, of which row r is number r % count: those of its
// channels, each of which is `spatial` columns. Where that is 1, vectors of them are aligned as
// those of the rows are.
struct OwnChannels {
  static constexpr bool kIsAlone = true;
  struct OfRow {
    int64_t first;
    unsigned spatial;

    template <int N>
    __device__ __forceinline__ void load(const void* array, DType dtype, int column,
                                         float (&to)[N]) const {
      if (spatial == 1) {
        load_parameter(array, dtype, first + column, to);
        return;
      }
      const unsigned channel = static_cast<unsigned>(column) / spatial;
      unsigned inside = static_cast<unsigned>(column) - channel * spatial;
      int64_t at = first + channel;
      float value = load_as(array, dtype, at);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        to[i] = value;
        if (i + 1 < N && ++inside == spatial) {
          inside = 0;
          value = load_as(array, dtype, ++at);
        }
      }
    }
  };

  unsigned count;
  int channels;  // of one group
  unsigned spatial;

  __device__ __forceinline__ OfRow of(int64_t row) const {
    return {int64_t{static_cast<uint32_t>(row) % count} * channels, spatial};
  }
  __host__ __device__ __forceinline__ unsigned groups() const { return count; }
};

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
