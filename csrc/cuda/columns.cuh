// A function of a matrix's rows with a value per column, and with sums down the columns.
//
// map_columns() gives each warp 32 adjacent vectors of a row and walks down the rows, so that what
// belongs to a column (a bias, a running sum) stays in registers. Sums leave a block as partial
// results, one row of a scratch per block of rows; sum_parts() adds them in a fixed order.
// map_flat() is the same function without columns. What a function looks like:
//
//   template <int N> struct Inputs;              what is loaded for N adjacent elements
//   Context begin() const;                       read once per thread
//   void load<N>(int64_t first, Inputs<N>&) const;
//   void apply<N>(const Context&, int64_t first, const Inputs<N>&, const float (&column)[N],
//                 float (&sums)[N]) const;       computes, stores, adds to sums
//
// `first` is the index of the first of N elements in the whole matrix; `column` is 0 without one.
#pragma once

#include <type_traits>

#include "columns.h"
#include "vector.cuh"

namespace anychip::cuda {

constexpr int kPartsThreads = 512;

// What begin() gives where there is nothing to read once.
struct NoContext {};

// What functions of the elements of one array begin with.
template <class T>
struct OfOneArray {
  const T* x;

  template <int N>
  struct Inputs {
    Adjacent<N, T> x;
  };
  __device__ __forceinline__ NoContext begin() const { return {}; }
  template <int N>
  __device__ __forceinline__ void load(int64_t first, Inputs<N>& inputs) const {
    inputs.x = load_adjacent<N>(x + first);
  }
};

// A value per column in any dtype; nullptr stands for zeros.
struct ColumnValues {
  const void* values;
  DType dtype;
};

__device__ __forceinline__ float load_as(const void* from, DType dtype, int64_t index) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[index];
  if (dtype == DType::kBFloat16) return to_float(static_cast<const BFloat16*>(from)[index]);
  return to_float(static_cast<const Float16*>(from)[index]);
}

__device__ __forceinline__ void store_as(void* to, DType dtype, int64_t index, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(to)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<BFloat16*>(to)[index] = from_float<BFloat16>(value);
  } else {
    static_cast<Float16*>(to)[index] = from_float<Float16>(value);
  }
}

// Adds the sums of the block's rows of each column, in the order of a tree, into row `part` of
// partial. All threads call it; `column` is beyond hidden for those without one.
template <int N>
__device__ __forceinline__ void store_part(const float (&sums)[N], int lanes, int64_t column,
                                           int64_t hidden, float* __restrict__ partial) {
  ANYCHIP_SHARED(float, tree, N* kTileThreads);
#pragma unroll
  for (int i = 0; i < N; ++i) tree[i * kTileThreads + threadIdx.x] = sums[i];
  __syncthreads();
  for (int half = kTileThreads / 2; half >= lanes; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        tree[i * kTileThreads + threadIdx.x] += tree[i * kTileThreads + threadIdx.x + half];
      }
    }
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < lanes && column < hidden) {
#pragma unroll
    for (int i = 0; i < N; ++i) partial[column + i] = tree[i * kTileThreads + threadIdx.x];
  }
}

template <int N, bool kSums, class Function>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks)
    columns_kernel(Function function, ColumnValues values, int64_t rows, int64_t hidden, int lanes,
                   unsigned tiles, int64_t rows_per_block, float* partial) {
  const int lane = static_cast<int>(threadIdx.x) % lanes;
  const int row_lanes = kTileThreads / lanes;
  const int64_t part = blockIdx.x / tiles;
  const int64_t column = (int64_t{blockIdx.x % tiles} * lanes + lane) * N;
  const bool has_column = column < hidden;
  const auto context = function.begin();
  float own[N] = {};
  float sums[N] = {};
  if (values.values != nullptr && has_column) {
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = load_as(values.values, values.dtype, column + i);
  }
  const int64_t begin = part * rows_per_block;
  const int64_t end = has_column ? min(begin + rows_per_block, rows) : begin;
  for (int64_t row = begin + threadIdx.x / lanes; row < end; row += row_lanes * kRowsAhead) {
    typename Function::template Inputs<N> inputs[kRowsAhead];
#pragma unroll
    for (int step = 0; step < kRowsAhead; ++step) {
      const int64_t at = row + step * row_lanes;
      if (at < end) function.template load<N>(at * hidden + column, inputs[step]);
    }
#pragma unroll
    for (int step = 0; step < kRowsAhead; ++step) {
      const int64_t at = row + step * row_lanes;
      if (at < end) {
        function.template apply<N>(context, at * hidden + column, inputs[step], own, sums);
      }
    }
  }
  if constexpr (kSums) {
    if (partial != nullptr) store_part(sums, lanes, column, hidden, partial + part * hidden);
  }
}

template <int N, class Function>
__global__ void __launch_bounds__(kTileThreads) flat_kernel(Function function, int64_t numel) {
  const int64_t vectors = numel / N;
  const int64_t start = int64_t{blockIdx.x} * kTileThreads * kRowsAhead + threadIdx.x;
  const auto context = function.begin();
  const float none[N] = {};
  float sums[N] = {};
  typename Function::template Inputs<N> inputs[kRowsAhead];
#pragma unroll
  for (int step = 0; step < kRowsAhead; ++step) {
    const int64_t vector = start + step * kTileThreads;
    if (vector < vectors) function.template load<N>(vector * N, inputs[step]);
  }
#pragma unroll
  for (int step = 0; step < kRowsAhead; ++step) {
    const int64_t vector = start + step * kTileThreads;
    if (vector < vectors) {
      function.template apply<N>(context, vector * N, inputs[step], none, sums);
    }
  }
  // The tail is shorter than a vector: the first block has enough threads for it.
  const int64_t last = vectors * N + threadIdx.x;
  if (N > 1 && blockIdx.x == 0 && last < numel) {
    const float nothing[1] = {};
    float sum[1] = {};
    typename Function::template Inputs<1> input;
    function.template load<1>(last, input);
    function.template apply<1>(context, last, input, nothing, sum);
  }
}

// out[column] = the sum over parts of partial[part][column], each column in the same order.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    sum_parts_kernel(const float* __restrict__ partial, void* out, DType dtype, int64_t parts,
                     int64_t columns, int part_lanes) {
  ANYCHIP_SHARED(float, tree, kThreads);
  const int per_block = kThreads / part_lanes;
  const int64_t column = int64_t{blockIdx.x} * per_block + threadIdx.x % per_block;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 4
    for (int64_t part = threadIdx.x / per_block; part < parts; part += part_lanes) {
      sum += partial[part * columns + column];
    }
  }
  tree[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half >= per_block; half /= 2) {
    if (static_cast<int>(threadIdx.x) < half) tree[threadIdx.x] += tree[threadIdx.x + half];
    __syncthreads();
  }
  if (static_cast<int>(threadIdx.x) < per_block && column < columns) {
    store_as(out, dtype, column, tree[threadIdx.x]);
  }
}

inline cudaError_t sum_parts(const float* partial, void* out, DType dtype, int64_t parts,
                             int64_t columns, const Place& place) {
  if (columns == 0) return cudaSuccess;
  // Four parts for each lane to load ahead.
  int part_lanes = 1;
  while (part_lanes < 32 && part_lanes * 4 < parts) part_lanes *= 2;
  const dim3 grid(static_cast<unsigned>(ceil_div(columns, kPartsThreads / part_lanes)));
  return launch(sum_parts_kernel<kPartsThreads>, grid, dim3(kPartsThreads), 0, place.stream,
                partial, out, dtype, parts, columns, part_lanes);
}

// Returns visit(width) with N of the widest access when `aligned`, and 1 otherwise.
template <class T, class Visit>
cudaError_t visit_width(bool aligned, Visit&& visit) {
  if (aligned) return visit(std::integral_constant<int, kWidth<T>>{});
  return visit(std::integral_constant<int, 1>{});
}

// Calls function for rows * hidden elements. `width` is N: kWidth of the widest access, or 1.
// With kSums all of the `parts` rows of partial are written; nullptr when the sums are not wanted.
template <int N, bool kSums, class Function>
cudaError_t map_columns(const Function& function, const ColumnValues& values, int64_t rows,
                        int64_t hidden, int64_t parts, float* partial, const Place& place) {
  const Tiling cut = tiling_of(rows, hidden, N, parts);
  const dim3 grid(static_cast<unsigned>(cut.tiles * parts));
  return launch(columns_kernel<N, kSums, Function>, grid, dim3(kTileThreads), 0, place.stream,
                function, values, rows, hidden, cut.lanes, static_cast<unsigned>(cut.tiles),
                cut.rows_per_block, partial);
}

template <int N, class Function>
cudaError_t map_flat(const Function& function, int64_t numel, const Place& place) {
  const dim3 grid(static_cast<unsigned>(ceil_div(numel, int64_t{N} * kTileThreads * kRowsAhead)));
  return launch(flat_kernel<N, Function>, grid, dim3(kTileThreads), 0, place.stream, function,
                numel);
}

}  // namespace anychip::cuda
