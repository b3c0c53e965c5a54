// top_k, in one of three ways:
//   rows of up to kSortTile elements are sorted, several of them in a block;
//   of longer ones a block finds the k-th largest key by radix selection, and sorts those above it;
//   of rows too long for that, or with many results, the whole grid does: counts of digits and
//   candidates go through scratch. Its number of launches is that of the longest search: a search
//   that is over skips the rest, since the host cannot be told.
// Only counts are added by atomic operations, and keys are sorted after they were collected: the
// same bits in every run. See Note [keys] in selection.cuh.
#include "top_k.h"

#include "selection.cuh"

namespace anychip::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSelectThreads = 1024;
constexpr int kSteps = 4;
// Elements of a row that a block counts: many times its number of digits.
constexpr int64_t kChunk = 32768;
// Shorter rows than this are not worth the launches of a search by the whole grid.
constexpr int64_t kLongRow = 131072;

int64_t power_of_two(int64_t at_least) {
  int64_t power = 1;
  while (power < at_least) power *= 2;
  return power;
}

int bits_of(int64_t length) {
  int bits = 0;
  while (int64_t{1} << bits < length) ++bits;
  return bits;
}

// visit(value, index) for this thread's share of a row's elements from `begin` to `end`.
template <class T, class Visit>
__device__ __forceinline__ void visit_elements(const T* row, int64_t begin, int64_t end,
                                               bool aligned, const Visit& visit) {
  if (!aligned) {
    for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) visit(row[i], i);
    return;
  }
  constexpr int width = kWidth<T>;
  for (int64_t i = begin + int64_t{width} * threadIdx.x; i < end;
       i += int64_t{width} * blockDim.x) {
    const uint4 raw = *reinterpret_cast<const uint4*>(row + i);
    T values[width];
    memcpy(values, &raw, kAccessBytes);
#pragma unroll
    for (int j = 0; j < width; ++j) visit(values[j], i + j);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sort_rows_kernel(const T* x, T* values, int64_t* indices, int64_t rows, int length, int k,
                     int segment) {
  ANYCHIP_SHARED(Key, keys, kSortTile);
  const int64_t first_row = int64_t{blockIdx.x} * (kSortTile / segment);
  for (int i = static_cast<int>(threadIdx.x); i < kSortTile; i += kThreads) {
    const int64_t row = first_row + i / segment;
    const int column = i % segment;
    const bool present = row < rows && column < length;
    keys[i] = present ? key_of(x[row * length + column], column, length) : 0;
  }
  sort_segments(keys, kSortTile, segment, 0);
  for (int i = static_cast<int>(threadIdx.x); i < kSortTile; i += kThreads) {
    const int64_t row = first_row + i / segment;
    const int column = i % segment;
    if (row < rows && column < k) {
      const int64_t index = index_of(keys[i], length);
      values[row * k + column] = x[row * length + index];
      indices[row * k + column] = index;
    }
  }
}

// A block per row; k is at most kSortTile.
template <class T>
__global__ void __launch_bounds__(kSelectThreads)
    select_row_kernel(const T* x, T* values, int64_t* indices, int64_t length, int k,
                      int index_bits, bool aligned) {
  ANYCHIP_SHARED(unsigned, counts, kDigits);
  ANYCHIP_SHARED(Key, keys, kSortTile);
  ANYCHIP_SHARED(unsigned, scratch, kMaxWarps);
  ANYCHIP_SHARED(Search, found, 1);
  ANYCHIP_SHARED(unsigned, taken, 1);
  const T* row = x + int64_t{blockIdx.x} * length;
  Search search{0, static_cast<unsigned>(k), kKeyBits};
  while (search.high > 0) {
    for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kSelectThreads) counts[i] = 0;
    __syncthreads();
    const Digit digit = digit_below<T>(search.high);
    visit_elements(row, 0, length, aligned, [&](T value, int64_t i) {
      const Key key = key_of(value, i, length);
      if (is_candidate(key, search)) {
        atomicAdd(&counts[key >> digit.low & ((1u << (digit.high - digit.low)) - 1)], 1u);
      }
    });
    __syncthreads();
    search = narrowed<T>(search, counts, index_bits, scratch, found);
  }
  const int segment = k <= kWarp ? kWarp : 1 << (32 - __clz(k - 1));
  for (int i = static_cast<int>(threadIdx.x); i < segment; i += kSelectThreads) keys[i] = 0;
  if (threadIdx.x == 0) taken[0] = 0;
  __syncthreads();
  visit_elements(row, 0, length, aligned, [&](T value, int64_t i) {
    const Key key = key_of(value, i, length);
    if (key >= search.prefix) keys[atomicAdd(&taken[0], 1u)] = key;
  });
  sort_segments(keys, segment, segment, 0);
  for (int i = static_cast<int>(threadIdx.x); i < k; i += kSelectThreads) {
    const int64_t index = index_of(keys[i], length);
    values[int64_t{blockIdx.x} * k + i] = row[index];
    indices[int64_t{blockIdx.x} * k + i] = index;
  }
}

// The scratch of a search by the whole grid.
struct Scratch {
  Key* keys;         // (rows, segment), candidates
  Search* searches;  // (rows,)
  unsigned* counts;  // (rows, kDigits)
  unsigned* taken;   // (rows,), number of candidates
};

int64_t scratch_bytes(int64_t rows, int64_t segment) {
  const int64_t per_row = segment * int64_t{sizeof(Key)} + int64_t{sizeof(Search)} +
                          (kDigits + 1) * int64_t{sizeof(unsigned)};
  return rows * per_row;
}

Scratch scratch_at(void* address, int64_t rows, int64_t segment) {
  Scratch scratch{};
  scratch.keys = static_cast<Key*>(address);
  scratch.searches = reinterpret_cast<Search*>(scratch.keys + rows * segment);
  scratch.counts = reinterpret_cast<unsigned*>(scratch.searches + rows);
  scratch.taken = scratch.counts + rows * kDigits;
  return scratch;
}

__global__ void __launch_bounds__(kThreads)
    begin_kernel(Search* searches, int64_t rows, unsigned k) {
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row < rows) searches[row] = {0, k, kKeyBits};
}

// A block counts one chunk of a row: blocks of a row stand side by side.
template <class T>
__global__ void __launch_bounds__(kThreads)
    count_kernel(const T* x, Scratch scratch, int64_t length, int64_t chunks, bool aligned) {
  ANYCHIP_SHARED(unsigned, counts, kDigits);
  const int64_t row = blockIdx.x / chunks;
  const int64_t begin = blockIdx.x % chunks * kChunk;
  const Search search = scratch.searches[row];
  if (search.high == 0) return;
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) counts[i] = 0;
  __syncthreads();
  const Digit digit = digit_below<T>(search.high);
  visit_elements(
      x + row * length, begin, min(begin + kChunk, length), aligned, [&](T value, int64_t i) {
        const Key key = key_of(value, i, length);
        if (is_candidate(key, search)) {
          atomicAdd(&counts[key >> digit.low & ((1u << (digit.high - digit.low)) - 1)], 1u);
        }
      });
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kThreads) {
    if (counts[i] != 0) atomicAdd(scratch.counts + row * kDigits + i, counts[i]);
  }
}

// A block per row: narrows the search, and clears the counts for the next digit.
template <class T>
__global__ void __launch_bounds__(kSelectThreads) narrow_kernel(Scratch scratch, int index_bits) {
  ANYCHIP_SHARED(unsigned, sums, kMaxWarps);
  ANYCHIP_SHARED(Search, found, 1);
  const int64_t row = blockIdx.x;
  unsigned* counts = scratch.counts + row * kDigits;
  const Search search = scratch.searches[row];
  if (search.high == 0) return;
  const Search next = narrowed<T>(search, counts, index_bits, sums, found);
  for (int i = static_cast<int>(threadIdx.x); i < kDigits; i += kSelectThreads) counts[i] = 0;
  if (threadIdx.x == 0) scratch.searches[row] = next;
}

// Candidates of a block's elements, at places that it takes in one operation.
template <class T>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const T* x, Scratch scratch, int64_t length, int64_t segment, int64_t chunks) {
  ANYCHIP_SHARED(unsigned, sums, kMaxWarps);
  ANYCHIP_SHARED(unsigned, place, 1);
  const int64_t row = blockIdx.x / chunks;
  const int64_t begin = blockIdx.x % chunks * (kThreads * kSteps) + threadIdx.x;
  const Key lowest = scratch.searches[row].prefix;
  Key keys[kSteps];
  bool chosen[kSteps];
  unsigned own = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int64_t i = begin + step * kThreads;
    keys[step] = i < length ? key_of(x[row * length + i], i, length) : 0;
    chosen[step] = i < length && keys[step] >= lowest;
    own += chosen[step] ? 1u : 0u;
  }
  const unsigned behind = sum_behind(own, sums);
  // The first thread has all others behind it.
  if (threadIdx.x == 0) place[0] = atomicAdd(scratch.taken + row, behind + own);
  __syncthreads();
  Key* to = scratch.keys + row * segment + place[0] + behind;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (chosen[step]) *to++ = keys[step];
  }
}

// Sorts tiles of segments (size 0), or ends a merge of runs of `size` with what fits a tile.
__global__ void __launch_bounds__(kThreads)
    sort_tile_kernel(Key* all, int64_t segment, int64_t size) {
  ANYCHIP_SHARED(Key, keys, kSortTile);
  const int64_t offset = int64_t{blockIdx.x} * kSortTile;
  for (int i = static_cast<int>(threadIdx.x); i < kSortTile; i += kThreads)
    keys[i] = all[offset + i];
  if (size == 0) {
    sort_segments(keys, kSortTile, segment, offset);
  } else {
    merge_runs(keys, kSortTile, size, kSortTile / 2, segment, offset);
    __syncthreads();
  }
  for (int i = static_cast<int>(threadIdx.x); i < kSortTile; i += kThreads)
    all[offset + i] = keys[i];
}

__global__ void __launch_bounds__(kThreads)
    merge_step_kernel(Key* keys, int64_t pairs, int64_t segment, int64_t size, int64_t distance) {
  const int64_t pair = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (pair >= pairs) return;
  const int64_t i = first_of_pair(pair, distance);
  order_pair(keys[i], keys[i + distance], (i & (segment - 1) & size) == 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const T* x, const Key* keys, T* values, int64_t* indices, int64_t rows,
                 int64_t length, int64_t k, int64_t segment) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= rows * k) return;
  const int64_t row = i / k;
  const int64_t index = index_of(keys[row * segment + i % k], length);
  values[i] = x[row * length + index];
  indices[i] = index;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const T* grad, const int64_t* indices, T* dx, int64_t count, int64_t length,
                   int64_t k) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) dx[i / k * length + indices[i]] = grad[i];
}

dim3 grid_of(int64_t items, int64_t per_block) {
  return dim3(static_cast<unsigned>((items + per_block - 1) / per_block));
}

// Launches one after the other, until one fails.
class Launches {
 public:
  explicit Launches(cudaStream_t stream) : stream_(stream) {}

  template <class Kernel, class... Arguments>
  void add(Kernel kernel, dim3 grid, int threads, Arguments... arguments) {
    if (status_ != cudaSuccess) return;
    status_ = launch(kernel, grid, dim3(static_cast<unsigned>(threads)), 0, stream_, arguments...);
  }
  void clear(void* address, int64_t bytes) {
    if (status_ != cudaSuccess) return;
    status_ = cudaMemsetAsync(address, 0, static_cast<size_t>(bytes), stream_);
  }
  cudaError_t status() const { return status_; }

 private:
  cudaStream_t stream_;
  cudaError_t status_ = cudaSuccess;
};

void sort_all(Launches& launches, Key* keys, int64_t rows, int64_t segment) {
  const int64_t count = rows * segment;
  launches.add(sort_tile_kernel, grid_of(count, kSortTile), kThreads, keys, segment, 0);
  for (int64_t size = 2 * kSortTile; size <= segment; size *= 2) {
    for (int64_t distance = size / 2; distance >= kSortTile; distance /= 2) {
      launches.add(merge_step_kernel, grid_of(count / 2, kThreads), kThreads, keys, count / 2,
                   segment, size, distance);
    }
    launches.add(sort_tile_kernel, grid_of(count, kSortTile), kThreads, keys, segment, size);
  }
}

template <class T>
cudaError_t select_by_grid(const T* x, T* values, int64_t* indices, void* address, int64_t rows,
                           int64_t length, int64_t k, bool aligned, cudaStream_t stream) {
  const int64_t segment = power_of_two(k < kSortTile ? kSortTile : k);
  const Scratch scratch = scratch_at(address, rows, segment);
  const int index_bits = bits_of(length);
  const int64_t chunks = (length + kChunk - 1) / kChunk;
  const int64_t parts = (length + kThreads * kSteps - 1) / (kThreads * kSteps);
  Launches launches(stream);
  launches.clear(address, scratch_bytes(rows, segment));
  launches.add(begin_kernel, grid_of(rows, kThreads), kThreads, scratch.searches, rows, k);
  for (int high = kKeyBits; high > 0; high = next_high<T>(digit_below<T>(high), index_bits)) {
    launches.add(count_kernel<T>, grid_of(rows * chunks, 1), kThreads, x, scratch, length, chunks,
                 aligned);
    launches.add(narrow_kernel<T>, grid_of(rows, 1), kSelectThreads, scratch, index_bits);
  }
  launches.add(gather_kernel<T>, grid_of(rows * parts, 1), kThreads, x, scratch, length, segment,
               parts);
  sort_all(launches, scratch.keys, rows, segment);
  launches.add(write_kernel<T>, grid_of(rows * k, kThreads), kThreads, x, scratch.keys, values,
               indices, rows, length, k, segment);
  return launches.status();
}

bool is_shape(int64_t rows, int64_t length, int64_t k) {
  return rows >= 0 && k >= 0 && k <= length && length < int64_t{1} << kIndexBits;
}

}  // namespace

int64_t top_k_scratch(int64_t rows, int64_t length, int64_t k, int multiprocessors) {
  if (rows == 0 || k == 0 || length <= kSortTile) return 0;
  const bool by_block = k <= kSortTile && (length < kLongRow || rows >= multiprocessors);
  return by_block ? 0 : scratch_bytes(rows, power_of_two(k < kSortTile ? kSortTile : k));
}

cudaError_t top_k(const void* x, void* values, int64_t* indices, void* scratch, int64_t rows,
                  int64_t length, int64_t k, int multiprocessors, DType dtype, Place place) {
  if (!is_shape(rows, length, k) || multiprocessors < 1) return cudaErrorInvalidValue;
  if (rows == 0 || k == 0) return cudaSuccess;
  const bool by_grid = top_k_scratch(rows, length, k, multiprocessors) != 0;
  if (by_grid && (scratch == nullptr || !is_vectorizable(scratch))) return cudaErrorInvalidValue;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(values);
    const bool aligned = is_vectorizable(x, length * int64_t{sizeof(T)});
    Launches launches(place.stream);
    if (by_grid) {
      return select_by_grid(from, to, indices, scratch, rows, length, k, aligned, place.stream);
    }
    if (length <= kSortTile) {
      const int64_t segment = power_of_two(length);
      launches.add(sort_rows_kernel<T>, grid_of(rows, kSortTile / segment), kThreads, from, to,
                   indices, rows, length, k, segment);
    } else {
      launches.add(select_row_kernel<T>, grid_of(rows, 1), kSelectThreads, from, to, indices,
                   length, k, bits_of(length), aligned);
    }
    return launches.status();
  });
}

cudaError_t top_k_backward(const void* grad, const int64_t* indices, void* dx, int64_t rows,
                           int64_t length, int64_t k, DType dtype, Place place) {
  if (!is_shape(rows, length, k)) return cudaErrorInvalidValue;
  if (rows == 0 || length == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    Launches launches(place.stream);
    launches.clear(dx, rows * length * int64_t{sizeof(T)});
    if (k > 0) {
      launches.add(scatter_kernel<T>, grid_of(rows * k, kThreads), kThreads,
                   static_cast<const T*>(grad), indices, static_cast<T*>(dx), rows * k, length, k);
    }
    return launches.status();
  });
}

}  // namespace anychip::cuda
