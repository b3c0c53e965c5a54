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

// What one access of so many bytes moves.
template <int kBytes>
struct Access {
  using Word = uint4;
};
template <>
struct Access<8> {
  using Word = uint2;
};
template <>
struct Access<4> {
  using Word = uint32_t;
};
template <>
struct Access<2> {
  using Word = uint16_t;
};

// N elements as they lie in memory: half the registers of their float32 values in 16-bit types. To
// load everything packed, and unpack later, keeps all loads in flight across branches. Words, since
// an array of 16-bit elements would take a register for each.
template <int N, class T>
struct Packed {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Word = typename Access<kBytes>::Word;
  static constexpr int kWords = kBytes / static_cast<int>(sizeof(Word));
  Word words[kWords];
};

// `array + at` is aligned to the access.
template <int N, class T>
__device__ __forceinline__ Packed<N, T> load_packed(const void* array, int64_t at) {
  using Word = typename Packed<N, T>::Word;
  const Word* from = reinterpret_cast<const Word*>(static_cast<const T*>(array) + at);
  Packed<N, T> packed;
#pragma unroll
  for (int i = 0; i < Packed<N, T>::kWords; ++i) packed.words[i] = from[i];
  return packed;
}

template <int N, class T>
__device__ __forceinline__ void unpack(const Packed<N, T>& packed, float (&to)[N]) {
  T values[N];
  memcpy(values, packed.words, sizeof(values));
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(values[i]);
}

template <int N, class T>
__device__ __forceinline__ Packed<N, T> pack(const float (&from)[N]) {
  T values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = from_float<T>(from[i]);
  Packed<N, T> packed;
  memcpy(packed.words, values, sizeof(values));
  return packed;
}

template <int N, class T>
__device__ __forceinline__ void store_packed(void* array, int64_t at, const Packed<N, T>& packed) {
  using Word = typename Packed<N, T>::Word;
  Word* to = reinterpret_cast<Word*>(static_cast<T*>(array) + at);
#pragma unroll
  for (int i = 0; i < Packed<N, T>::kWords; ++i) to[i] = packed.words[i];
}

// N elements of a vector of parameters, which may have another type than the rows: the branch is
// the same for all threads, and the caches serve all rows but the first.
template <int N>
__device__ __forceinline__ void load_parameter(const void* array, DType dtype, int64_t at,
                                               float (&to)[N]) {
  if (dtype == DType::kBFloat16) {
    unpack(load_packed<N, BFloat16>(array, at), to);
  } else if (dtype == DType::kFloat16) {
    unpack(load_packed<N, Float16>(array, at), to);
  } else {
    unpack(load_packed<N, float>(array, at), to);
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
