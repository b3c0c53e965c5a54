// How softmax sees a row: which threads have it, its scores, and where a mask or bias has its own.
#pragma once

#include "columns.cuh"
#include "reduce.cuh"
#include "softmax.h"

namespace anychip::cuda {

constexpr int kWarpRows = 4;        // rows of a block whose rows belong to a warp each
constexpr int kRowThreads = 512;    // at most, of a row in registers: 128 registers a thread
constexpr int kLongThreads = 1024;  // of a row that is read twice

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
    for (int i = 0; i < N; ++i) scores[i] = x[i] * call.scale;
    if (bias != nullptr) add_bias(call, key, scores);
    if (mask != nullptr) hide(call, key, scores);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (key + i >= visible) scores[i] = -INFINITY;
    }
  }

 private:
  template <int N>
  __device__ __forceinline__ void hide(const Softmax& call, int64_t key, float (&scores)[N]) const {
    const uint8_t* own = mask + key * call.mask.key_stride;
    if (call.mask.key_stride == 1 && reinterpret_cast<uintptr_t>(own) % N == 0) {
      const Adjacent<N, uint8_t> seen = load_adjacent<N>(own);
#pragma unroll
      for (int i = 0; i < N; ++i) scores[i] = seen.at(i) == 0 ? -INFINITY : scores[i];
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        scores[i] = own[i * call.mask.key_stride] == 0 ? -INFINITY : scores[i];
      }
    }
  }

  template <int N>
  __device__ __forceinline__ void add_bias(const Softmax& call, int64_t key,
                                           float (&scores)[N]) const {
    const bool is_own = call.bias_dtype != DType::kFloat32;
    const int64_t at = bias_at + key * call.bias.key_stride;
    const int64_t size = is_own ? sizeof(T) : sizeof(float);
    // The same for a row's threads but where rows are not a multiple of the access.
    const bool aligned = N > 1 && call.bias.key_stride == 1 &&
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
        const int64_t one = at + i * call.bias.key_stride;
        scores[i] += is_own ? to_float(static_cast<const T*>(bias)[one])
                            : static_cast<const float*>(bias)[one];
      }
    }
  }
};

// What is taken off the scores before exp: the row's largest one, unless nothing is visible.
__device__ __forceinline__ float base_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// By which weights are multiplied; 0 in a row without a visible key, NaN in one with a NaN.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

}  // namespace anychip::cuda
