// How softmax sees a row: which threads have it, its scores, and where a mask or bias has its own.
#pragma once

#include <type_traits>

#include "columns.cuh"
#include "reduce.cuh"
#include "softmax.h"

namespace anychip::cuda {

constexpr int kWarpRows = 4;        // rows of a block whose rows belong to a warp each
constexpr int kRowThreads = 512;    // at most, of a row in registers: 128 registers a thread
constexpr int kLongThreads = 1024;  // at most, of a longer row

// fmaxf leaves NaN out, which is what is wanted here: a NaN comes back in the sum.
struct Larger {
  static __device__ __forceinline__ float identity() { return -INFINITY; }
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// The threads of one row: a warp, or the block.
template <bool kWarp>
struct RowThreads {
  int64_t row;
  int lane;
  int count;

  __device__ __forceinline__ RowThreads()
      : row(kWarp ? int64_t{blockIdx.x} * kWarpRows + threadIdx.x / 32 : int64_t{blockIdx.x}),
        lane(static_cast<int>(kWarp ? threadIdx.x % 32 : threadIdx.x)),
        count(static_cast<int>(kWarp ? 32 : blockDim.x)) {}

  // Over all threads of the row, in a fixed order.
  template <class Combine>
  __device__ __forceinline__ float reduce(float value, float* scratch, Combine combine) const {
    if constexpr (kWarp) {
      return warp_reduce(value, combine);
    } else {
      float values[1] = {value};
      block_reduce(values, scratch, combine);
      return values[0];
    }
  }
};

// Where a row begins in a broadcast tensor. Divided in 32 bits: a 64-bit division is a call.
__device__ __forceinline__ int64_t offset_of(int64_t row, const int64_t (&sizes)[kRowDims],
                                             const int64_t (&strides)[kRowDims]) {
  uint32_t rest = static_cast<uint32_t>(row);
  int64_t offset = 0;
#pragma unroll
  for (int dim = kRowDims - 1; dim > 0; --dim) {
    const uint32_t size = static_cast<uint32_t>(sizes[dim]);
    if (size == 1) continue;
    offset += int64_t{rest % size} * strides[dim];
    rest /= size;
  }
  return offset + rest * strides[0];
}

// Keys that a row sees by causality alone: 0 to keys.
__device__ __forceinline__ int64_t visible_keys(const Softmax& call, int64_t row) {
  if (!call.causal) return call.keys;
  const uint32_t query = static_cast<uint32_t>(row) % static_cast<uint32_t>(call.queries);
  const int64_t visible = int64_t{query} + 1 + call.keys - call.queries;
  return visible < 0 ? 0 : visible;
}

// One row's part of the mask and of the bias.
template <class T>
struct RowExtras {
  const uint8_t* mask;
  const void* bias;
  int64_t bias_at;

  __device__ __forceinline__ RowExtras(const Softmax& call, int64_t row)
      : mask(nullptr), bias(call.bias.values), bias_at(0) {
    if (call.mask.values != nullptr) {
      mask = static_cast<const uint8_t*>(call.mask.values) +
             offset_of(row, call.sizes, call.mask.strides);
    }
    if (bias != nullptr) bias_at = offset_of(row, call.sizes, call.bias.strides);
  }

  // scores[i] of key + i: -INFINITY where it is hidden. A hidden x is not looked at.
  template <int N>
  __device__ __forceinline__ void scores(const Softmax& call, const Adjacent<N, T>& x, int64_t key,
                                         int64_t visible, float (&scores)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) scores[i] = __fmul_rn(x[i], call.scale);
    if (bias != nullptr) add_bias(call, key, visible, scores);
    if (mask != nullptr) hide(call, key, visible, scores);
    if (key + N <= visible) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (key + i >= visible) scores[i] = -INFINITY;
    }
  }

 private:
  template <int N>
  __device__ __forceinline__ void hide(const Softmax& call, int64_t key, int64_t visible,
                                       float (&scores)[N]) const {
    const uint8_t* own = mask + key * call.mask.key_stride;
    if (call.mask.key_stride == 1 && reinterpret_cast<uintptr_t>(own) % N == 0 &&
        key + N <= visible) {
      const Adjacent<N, uint8_t> seen = load_adjacent<N>(own);
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] = seen.at(i) == 0 ? -INFINITY : scores[i];
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (key + i >= visible) continue;
        scores[i] = own[i * call.mask.key_stride] == 0 ? -INFINITY : scores[i];
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void add_bias(const Softmax& call, int64_t key, int64_t visible,
                                           float (&scores)[N]) const {
    const bool is_own = call.bias_dtype != DType::kFloat32;
    const int64_t at = bias_at + key * call.bias.key_stride;
    const int64_t size = is_own ? sizeof(T) : sizeof(float);
    // The same for a row's threads but where rows are not a multiple of the access.
    const bool aligned = N > 1 && call.bias.key_stride == 1 && key + N <= visible &&
                         (reinterpret_cast<uintptr_t>(bias) + at * size) % kAccessBytes == 0;
    if (aligned && is_own) {
      const Adjacent<N, T> own = load_adjacent<N>(static_cast<const T*>(bias) + at);
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] += own[i];
    } else if (aligned) {
      const Adjacent<N, float> own = load_adjacent<N>(static_cast<const float*>(bias) + at);
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] += own[i];
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (key + i >= visible) continue;
        const int64_t one = at + i * call.bias.key_stride;
        scores[i] += is_own ? to_float(static_cast<const T*>(bias)[one])
                            : static_cast<const float*>(bias)[one];
      }
    }
  }
};

// How many elements a row begins behind a 16-byte boundary.
template <class T>
__device__ __forceinline__ int elements_before(const T* row) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(row) % kAccessBytes / sizeof(T));
}

// N elements of a row from `key` on, 0 for those from `end` on. The row begins `before` elements
// behind a 16-byte boundary: two accesses hold the elements, unless one would leave the row.
template <int N, class T>
__device__ __forceinline__ Adjacent<N, T> load_within(const T* row, int64_t key, int64_t end,
                                                      int before) {
  if (before == 0 && key + N <= end) return load_adjacent<N>(row + key);
  if (key < before || key - before + 2 * N > end) {
    T values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = key + i < end ? row[key + i] : from_float<T>(0.0f);
    Adjacent<N, T> gathered;
    memcpy(gathered.words, values, sizeof(values));
    return gathered;
  }
  constexpr int kWords = kAccessBytes / sizeof(uint32_t);
  const Adjacent<N, T> low = load_adjacent<N>(row + key - before);
  const Adjacent<N, T> high = load_adjacent<N>(row + key - before + N);
  const unsigned bytes = before * sizeof(T);
  // By 8 bytes, 4 and 2: an index that the compiler does not know would put the words in memory.
  uint32_t words[2 * kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    words[i] = low.words[i];
    words[kWords + i] = high.words[i];
  }
#pragma unroll
  for (int i = 0; i < kWords + 2; ++i) words[i] = bytes & 8 ? words[i + 2] : words[i];
#pragma unroll
  for (int i = 0; i < kWords + 1; ++i) words[i] = bytes & 4 ? words[i + 1] : words[i];
  Adjacent<N, T> found;
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    const uint64_t both = uint64_t{words[i + 1]} << 32 | words[i];
    found.words[i] = static_cast<uint32_t>(both >> (bytes & 2 ? 16 : 0));
  }
  return found;
}

// body(width, key) for the elements of a row up to `end`: vectors of N, one by one those in front
// of the first 16-byte boundary, `head` of them, and those behind the last vector.
// kAhead vectors are loaded before the first is used.
template <int N, int kAhead, class Body>
__device__ __forceinline__ void for_each_access(const RowThreads<false>& threads, int64_t head,
                                                int64_t end, Body body) {
  const auto one = std::integral_constant<int, 1>{};
  const int64_t begin = head < end ? head : end;
  const int64_t tail = begin + (end - begin) / N * N;
  for (int64_t key = threads.lane; key < begin; key += threads.count) body(one, key);
#pragma unroll kAhead
  for (int64_t key = begin + int64_t{threads.lane} * N; key < tail; key += threads.count * N) {
    body(std::integral_constant<int, N>{}, key);
  }
  for (int64_t key = tail + threads.lane; key < end; key += threads.count) body(one, key);
}

// Copies the elements of a row up to `end` to shared memory, which lies as the row does.
template <class T>
__device__ __forceinline__ void copy_row(const RowThreads<false>& threads,
                                         const T* __restrict__ row, T* __restrict__ to,
                                         int64_t end) {
  constexpr int N = kWidth<T>;
  for_each_access<N, 4>(threads, (N - elements_before(row)) % N, end, [&](auto width, int64_t key) {
    store_adjacent(to + key, load_adjacent<decltype(width)::value>(row + key));
  });
}

// What is taken off the scores before exp: the row's largest one, unless nothing is visible.
__device__ __forceinline__ float base_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// By which weights are multiplied; 0 in a row without a visible key, NaN in one with a NaN.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

}  // namespace anychip::cuda
