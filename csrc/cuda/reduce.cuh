// Reductions over the threads of a warp and of a block, in a fixed order: same inputs, same bits.
#pragma once

#include "runtime.cuh"

namespace anychip::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kMaxWarps = 32;  // 1,024 threads, the most that a block can have

struct Sum {
  static __device__ __forceinline__ float identity() { return 0.0f; }
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};

// The larger number, and NaN when one of the two is: fmaxf would lose it.
struct Max {
  static __device__ __forceinline__ float identity() { return -INFINITY; }
  __device__ __forceinline__ float operator()(float a, float b) const {
    return (a > b || a != a) ? a : b;
  }
};

// Every lane gets the result of all 32, in the order of a butterfly.
template <class Combine>
__device__ __forceinline__ float warp_reduce(float value, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  return value;
}

__device__ __forceinline__ float warp_sum(float value) { return warp_reduce(value, Sum{}); }
__device__ __forceinline__ float warp_max(float value) { return warp_reduce(value, Max{}); }

// Every thread gets the results of N values over its block. All threads of the block call it, and
// blockDim.x is a multiple of 32. `scratch` is shared, N * kMaxWarps long, and free again on
// return.
template <int N, class Combine>
__device__ __forceinline__ void block_reduce(float (&values)[N], float* scratch, Combine combine) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = warp_reduce(values[i], combine);
  if (warps == 1) return;
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < N; ++i) scratch[i * kMaxWarps + warp] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float other = lane < warps ? scratch[i * kMaxWarps + lane] : Combine::identity();
    values[i] = warp_reduce(other, combine);
  }
  // The next use of scratch must not overtake a warp that still reads it.
  __syncthreads();
}

template <int N>
__device__ __forceinline__ void block_sum(float (&values)[N], float* scratch) {
  block_reduce(values, scratch, Sum{});
}

}  // namespace anychip::cuda
