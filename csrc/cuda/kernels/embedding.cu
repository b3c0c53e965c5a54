// embedding: copies of rows forward; backward the rows of equal indices are summed without atomics.
//
// Work is cut into units of a warp: a row of the table or of the batch, and a part of its columns.
// Backward costs a read of every gradient row, one write of the table's gradient, and reads of
// indices; rows that very many indices share are cut in tiles, see Note [Long segments].
#include "embedding.h"

#include <algorithm>
#include <limits>

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAccesses = 2;    // accesses of a lane in a row that are in flight at a time
constexpr int kBlocksEach = 8;  // blocks of kThreads that a multiprocessor can hold

__device__ __forceinline__ int64_t index_at(const Indices& indices, int64_t i) {
  return indices.is_wide ? static_cast<const int64_t*>(indices.data)[i]
                         : int64_t{static_cast<const int32_t*>(indices.data)[i]};
}

// The columns of a row in parts of a warp each: lane, lane + 32, ... of `kAccesses` accesses of N.
template <int N>
struct Columns {
  static constexpr int64_t kPart = int64_t{kWarp} * kAccesses * N;
  int64_t width;

  __host__ __device__ __forceinline__ int64_t parts() const { return (width + kPart - 1) / kPart; }
  // First column of an access of this lane; it counts when it is below width.
  __device__ __forceinline__ int64_t first(int64_t part, int access) const {
    return part * kPart + (access * kWarp + static_cast<int>(threadIdx.x % kWarp)) * int64_t{N};
  }
};

// Forward. Rows are copied as words of 16 bytes, or as elements where rows are not so aligned. All
// bits set are NaN in every type.
__device__ __forceinline__ void set_nan(uint4& word) {
  word = make_uint4(0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu);
}
__device__ __forceinline__ void set_nan(uint32_t& word) { word = 0xffffffffu; }
__device__ __forceinline__ void set_nan(uint16_t& word) { word = 0xffffu; }

template <class Word>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(Indices indices, const Word* weight, Word* y, int64_t count, int64_t num_rows,
                  Columns<1> columns) {
  const int64_t parts = columns.parts();
  const int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const int64_t row = unit / parts;
  const int64_t part = unit % parts;
  if (row >= count) return;
  const int64_t index = index_at(indices, row);
  const bool is_row = index >= 0 && index < num_rows;
  const Word* from = weight + (is_row ? index * columns.width : 0);
  Word words[kAccesses];
#pragma unroll
  for (int access = 0; access < kAccesses; ++access) {
    const int64_t column = columns.first(part, access);
    set_nan(words[access]);
    if (is_row && column < columns.width) words[access] = from[column];
  }
#pragma unroll
  for (int access = 0; access < kAccesses; ++access) {
    const int64_t column = columns.first(part, access);
    if (column < columns.width) y[row * columns.width + column] = words[access];
  }
}

// Backward. The segment of a row v of the table: those places i of the sorted indices that hold v,
// from starts[v] to starts[v + 1] - 1.
//
// Note [Long segments]: a warp sums a segment of up to kTile places by itself. Of longer ones
// (padding, frequent words) every tile of kTile places sums its part, in float32, into
// partials[tile]; a second kernel adds the parts up in the order of tiles. Such a segment enters a
// tile at its first place ("head") or begins behind it and leaves at its last ("tail"): two slots.
constexpr int64_t kTile = 64;
constexpr int kUnrolled = 2;  // rows of a segment that are in flight at a time

struct Segments {
  Indices sorted;
  const int64_t* order;
  const int64_t* starts;
  int64_t count, num_rows;

  __host__ __device__ __forceinline__ int64_t tiles() const { return (count + kTile - 1) / kTile; }
  __device__ __forceinline__ int64_t tile_end(int64_t tile) const {
    return min((tile + 1) * kTile, count);
  }
  __device__ __forceinline__ bool is_long(int64_t v) const {
    return v >= 0 && v < num_rows && starts[v + 1] - starts[v] > kTile;
  }
  // How many places of a tile belong to the long segment in one of its slots, from `begin` on.
  __device__ __forceinline__ int64_t part_of_long(int64_t tile, bool is_head,
                                                  int64_t& begin) const {
    const int64_t first = tile * kTile;
    const int64_t end = tile_end(tile);
    const int64_t v = index_at(sorted, is_head ? first : end - 1);
    // What begins at the first place or before it is the head, also where it fills the tile.
    if (!is_long(v) || is_head != (starts[v] <= first)) return 0;
    begin = is_head ? first : starts[v];
    return min(starts[v + 1], end) - begin;
  }
};

// starts[v]: how many sorted indices are below v.
__global__ void __launch_bounds__(kThreads)
    starts_kernel(Indices sorted, int64_t count, int64_t num_rows, int64_t* starts) {
  const int64_t v = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (v > num_rows) return;
  int64_t low = 0;
  int64_t high = count;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (index_at(sorted, middle) < v) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  starts[v] = low;
}

// The sum of row(0), row(1), ... row(length - 1) in this order, kUnrolled of them loaded at a time.
template <int N, class T, class Row>
__device__ __forceinline__ void sum_rows(int64_t length, const Row& row, const Columns<N>& columns,
                                         int64_t part, float (&sums)[kAccesses][N]) {
  for (int64_t begin = 0; begin < length; begin += kUnrolled) {
    float values[kUnrolled][kAccesses][N];
#pragma unroll
    for (int step = 0; step < kUnrolled; ++step) {
      const T* from = begin + step < length ? row(begin + step) : nullptr;
#pragma unroll
      for (int access = 0; access < kAccesses; ++access) {
        const int64_t column = columns.first(part, access);
        if (from != nullptr && column < columns.width) load(from + column, values[step][access]);
      }
    }
#pragma unroll
    for (int step = 0; step < kUnrolled; ++step) {
      if (begin + step >= length) break;
#pragma unroll
      for (int access = 0; access < kAccesses; ++access) {
#pragma unroll
        for (int i = 0; i < N; ++i) sums[access][i] += values[step][access][i];
      }
    }
  }
}

template <int N, class T>
__device__ __forceinline__ void store_row(T* to, const Columns<N>& columns, int64_t part,
                                          const float (&sums)[kAccesses][N]) {
#pragma unroll
  for (int access = 0; access < kAccesses; ++access) {
    const int64_t column = columns.first(part, access);
    if (column < columns.width) store(to + column, sums[access]);
  }
}

// The gradient rows of the places from begin on.
template <class T>
struct GradientRows {
  const T* grad;
  const int64_t* order;
  int64_t width;
  int64_t begin;

  __device__ __forceinline__ const T* operator()(int64_t place) const {
    return grad + order[begin + place] * width;
  }
};

// Units: two slots of every tile, which may take longest, then all rows of the table.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    segments_kernel(const T* grad, Segments segments, T* dweight, float* partials,
                    Columns<N> columns) {
  const int64_t parts = columns.parts();
  const int64_t slots = 2 * segments.tiles();
  const int64_t units = (slots + segments.num_rows) * parts;
  const int64_t stride = int64_t{gridDim.x} * (kThreads / kWarp);
  int64_t unit = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  for (; unit < units; unit += stride) {
    const int64_t item = unit / parts;
    const int64_t part = unit % parts;
    float sums[kAccesses][N] = {};
    GradientRows<T> rows{grad, segments.order, columns.width, 0};
    const int64_t v = item - slots;
    if (v >= 0) {
      rows.begin = segments.starts[v];
      const int64_t length = segments.starts[v + 1] - rows.begin;
      if (length > kTile) continue;
      sum_rows<N, T>(length, rows, columns, part, sums);
      store_row(dweight + v * columns.width, columns, part, sums);
      continue;
    }
    const int64_t length = segments.part_of_long(item / 2, item % 2 == 0, rows.begin);
    if (length == 0) continue;
    sum_rows<N, T>(length, rows, columns, part, sums);
    store_row(partials + item * columns.width, columns, part, sums);
  }
}

// Slots of the parts of one long segment: the first may be a tail, the others are heads.
struct PartialRows {
  const float* partials;
  int64_t width;
  int64_t first_slot;
  int64_t tile;
  int64_t begin;

  __device__ __forceinline__ const float* operator()(int64_t number) const {
    const int64_t part = begin + number;
    return partials + (part == 0 ? first_slot : 2 * (tile + part)) * width;
  }
};

// One block for the long segment that begins in a tile, if one does: every warp sums a stretch of
// its parts, and the first one the sums of all, in the order of warps.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    long_segments_kernel(Segments segments, const float* partials, T* dweight, Columns<N> columns) {
  constexpr int warps = kThreads / kWarp;
  constexpr int kept = kAccesses * N;  // sums of a lane
  ANYCHIP_SHARED(float, shared, warps * kept * kWarp);
  const int64_t parts = columns.parts();
  const int64_t tile = blockIdx.x / parts;
  const int64_t part = blockIdx.x % parts;
  // A segment that is longer than a tile fills the end of the one in which it begins.
  const int64_t v = index_at(segments.sorted, segments.tile_end(tile) - 1);
  if (!segments.is_long(v) || segments.starts[v] < tile * kTile) return;

  const bool is_head = segments.starts[v] == tile * kTile;
  const int64_t length = (segments.starts[v + 1] - 1) / kTile - tile + 1;
  const int64_t stretch = (length + warps - 1) / warps;
  const int warp = threadIdx.x / kWarp;
  const int64_t begin = warp * stretch;
  const PartialRows rows{partials, columns.width, 2 * tile + (is_head ? 0 : 1), tile, begin};
  float sums[kAccesses][N] = {};
  sum_rows<N, float>(min(stretch, length - begin), rows, columns, part, sums);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int k = 0; k < kept; ++k) shared[(warp * kept + k) * kWarp + lane] = sums[k / N][k % N];
  __syncthreads();
  if (warp != 0) return;
#pragma unroll
  for (int k = 0; k < kept; ++k) {
    float sum = 0.0f;
    for (int other = 0; other < warps; ++other) sum += shared[(other * kept + k) * kWarp + lane];
    sums[k / N][k % N] = sum;
  }
  store_row(dweight + v * columns.width, columns, part, sums);
}

// A grid of one dimension for `units` units; 0 blocks when there are too many.
unsigned blocks_for(int64_t units, int64_t units_per_block) {
  const int64_t blocks = (units + units_per_block - 1) / units_per_block;
  return blocks <= std::numeric_limits<int>::max() ? static_cast<unsigned>(blocks) : 0u;
}

template <class Word>
cudaError_t gather(const Indices& indices, const void* weight, void* y, int64_t count,
                   int64_t num_rows, int64_t row_bytes, const Place& place) {
  const Columns<1> columns{row_bytes / static_cast<int64_t>(sizeof(Word))};
  const unsigned blocks = blocks_for(count * columns.parts(), kThreads / kWarp);
  if (blocks == 0) return cudaErrorInvalidValue;
  return launch(gather_kernel<Word>, dim3(blocks), dim3(kThreads), 0, place.stream, indices,
                static_cast<const Word*>(weight), static_cast<Word*>(y), count, num_rows, columns);
}

template <int N, class T>
cudaError_t sum_segments(const T* grad, const Segments& segments, T* dweight, float* partials,
                         int64_t width, int multiprocessors, const Place& place) {
  const Columns<N> columns{width};
  const int64_t units = (segments.num_rows + 2 * segments.tiles()) * columns.parts();
  const int64_t wanted = (units + kThreads / kWarp - 1) / (kThreads / kWarp);
  const int64_t blocks = std::min<int64_t>(wanted, int64_t{kBlocksEach} * multiprocessors);
  const cudaError_t status =
      launch(segments_kernel<N, T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
             place.stream, grad, segments, dweight, partials, columns);
  if (status != cudaSuccess || segments.count <= kTile) return status;
  const unsigned combining = blocks_for(segments.tiles() * columns.parts(), 1);
  if (combining == 0) return cudaErrorInvalidValue;
  return launch(long_segments_kernel<N, T>, dim3(combining), dim3(kThreads), 0, place.stream,
                segments, partials, dweight, columns);
}

}  // namespace

cudaError_t embedding_forward(const Indices& indices, const void* weight, void* y, int64_t count,
                              int64_t num_rows, int64_t width, DType dtype, Place place) {
  if (count < 0 || num_rows < 0 || width < 0) return cudaErrorInvalidValue;
  if (count == 0 || width == 0) return cudaSuccess;
  const int64_t element = dtype == DType::kFloat32 ? 4 : 2;
  const int64_t bytes = width * element;
  if (is_vectorizable(weight, bytes) && is_vectorizable(y)) {
    return gather<uint4>(indices, weight, y, count, num_rows, bytes, place);
  }
  return element == 4 ? gather<uint32_t>(indices, weight, y, count, num_rows, bytes, place)
                      : gather<uint16_t>(indices, weight, y, count, num_rows, bytes, place);
}

int64_t embedding_starts(int64_t num_rows) { return num_rows + 1; }

int64_t embedding_partials(int64_t count, int64_t width) {
  return count <= kTile ? 0 : 2 * ((count + kTile - 1) / kTile) * width;
}

cudaError_t embedding_backward(const void* grad, const Indices& sorted, const int64_t* order,
                               void* dweight, int64_t* starts, float* partials, int64_t count,
                               int64_t num_rows, int64_t width, DType dtype, int multiprocessors,
                               Place place) {
  if (count < 0 || num_rows < 0 || width < 0 || multiprocessors <= 0) return cudaErrorInvalidValue;
  if (num_rows == 0 || width == 0) return cudaSuccess;
  const unsigned blocks = blocks_for(num_rows + 1, kThreads);
  if (blocks == 0) return cudaErrorInvalidValue;
  const cudaError_t status = launch(starts_kernel, dim3(blocks), dim3(kThreads), 0, place.stream,
                                    sorted, count, num_rows, starts);
  if (status != cudaSuccess) return status;
  const Segments segments{sorted, order, starts, count, num_rows};
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T* from = static_cast<const T*>(grad);
    T* to = static_cast<T*>(dweight);
    const int64_t bytes = width * static_cast<int64_t>(sizeof(T));
    // Partial sums are float32: their rows are whole accesses whenever the gradient's are.
    if (is_vectorizable(from, bytes) && is_vectorizable(to) && is_vectorizable(partials)) {
      return sum_segments<kWidth<T>>(from, segments, to, partials, width, multiprocessors, place);
    }
    return sum_segments<1>(from, segments, to, partials, width, multiprocessors, place);
  });
}

}  // namespace anychip::cuda
