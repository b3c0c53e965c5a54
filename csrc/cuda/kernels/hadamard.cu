// hadamard, one pass: butterflies in registers, between lanes, and through shared memory.
//
// A block of the grid takes a tile of consecutive elements, which holds whole transforms. Which bit
// of an element's index is where:
//   bits 0-2     vector    elements of one thread, side by side in memory
//   bits 3-7     lane      of a warp
//   bits 8-10    warp      of a block (only of transforms longer than a warp's tile)
//   the others   step      again elements of one thread
// A transform of 2^m elements is one butterfly over each of the bits below m. In the kernel for
// short transforms, warps have tiles of their own, and bits 8 and 9 are steps.
#include "hadamard.h"

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {
namespace {

constexpr int kVector = 8;
constexpr int kVectorBits = 3;
constexpr int kLaneBits = 5;
constexpr int kWarps = 8;
constexpr int kWarpBits = 3;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpTile = kVector * kWarp;
constexpr int kBlockTile = kWarpTile * kWarps;
constexpr int kShortSteps = 4;
constexpr int kLongestShort = kWarpTile * kShortSteps;

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float difference = a - b;
  a += b;
  b = difference;
}

// Bits 0 to 7 of the index, those below `bits`.
__device__ __forceinline__ void transform_in_warp(float (&values)[kVector], int bits) {
#pragma unroll
  for (int bit = 0; bit < kVectorBits; ++bit) {
    if (bit < bits) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!(i >> bit & 1)) butterfly(values[i], values[i | 1 << bit]);
      }
    }
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
  for (int bit = 0; bit < kLaneBits; ++bit) {
    if (kVectorBits + bit < bits) {
      const bool second = (lane >> bit & 1) != 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float other = __shfl_xor_sync(kAllLanes, values[i], 1 << bit);
        values[i] = other + (second ? -values[i] : values[i]);
      }
    }
  }
}

// The steps are the bits from `first_bit` on.
template <int kSteps>
__device__ __forceinline__ void transform_steps(float (&values)[kSteps][kVector], int first_bit,
                                                int bits) {
#pragma unroll
  for (int distance = 1; distance < kSteps; distance *= 2) {
    if (first_bit < bits) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (!(step & distance)) butterfly(values[step][i], values[step | distance][i]);
        }
      }
    }
    ++first_bit;
  }
}

// Bits 8 to 10: each thread takes one column of the tile, whose rows are the warps. A thread writes
// columns of its own lane side by side with the other lanes', so that no bank is asked twice, and
// reads back the cells that it wrote: the next call needs no barrier before it.
__device__ __forceinline__ void transform_warps(float (&values)[kVector], float* tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  float* own = tile + warp * kWarpTile + lane;
#pragma unroll
  for (int i = 0; i < kVector; ++i) own[i * kWarp] = values[i];
  __syncthreads();
  float column[kWarps];
#pragma unroll
  for (int row = 0; row < kWarps; ++row) column[row] = tile[row * kWarpTile + threadIdx.x];
#pragma unroll
  for (int bit = 0; bit < kWarpBits; ++bit) {
#pragma unroll
    for (int row = 0; row < kWarps; ++row) {
      if (!(row >> bit & 1)) butterfly(column[row], column[row | 1 << bit]);
    }
  }
#pragma unroll
  for (int row = 0; row < kWarps; ++row) tile[row * kWarpTile + threadIdx.x] = column[row];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = own[i * kWarp];
}

// Elements behind the end are 0: they are of no transform that is stored.
template <class T>
__device__ __forceinline__ void load_step(const T* x, int64_t first, int64_t numel, bool aligned,
                                          float (&values)[kVector]) {
  if (aligned && first + kVector <= numel) {
    load(x + first, values);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] = first + i < numel ? to_float(x[first + i]) : 0.0f;
}

template <class T>
__device__ __forceinline__ void store_step(T* y, int64_t first, int64_t numel, bool aligned,
                                           float factor, float (&values)[kVector]) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) values[i] *= factor;
  if (aligned && first + kVector <= numel) {
    store(y + first, values);
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (first + i < numel) y[first + i] = from_float<T>(values[i]);
  }
}

// Transforms of up to kLongestShort elements: no warp needs another.
template <class T>
__global__ void __launch_bounds__(kThreads)
    hadamard_warp_kernel(const T* x, T* y, int64_t numel, int bits, float factor, bool aligned) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t start = warp * kLongestShort + lane * kVector;
  float values[kShortSteps][kVector];
#pragma unroll
  for (int step = 0; step < kShortSteps; ++step) {
    load_step(x, start + step * kWarpTile, numel, aligned, values[step]);
  }
#pragma unroll
  for (int step = 0; step < kShortSteps; ++step) transform_in_warp(values[step], bits);
  transform_steps(values, kVectorBits + kLaneBits, bits);
#pragma unroll
  for (int step = 0; step < kShortSteps; ++step) {
    store_step(y, start + step * kWarpTile, numel, aligned, factor, values[step]);
  }
}

// Longer ones: a block's tile is kSteps * kBlockTile elements.
template <class T, int kSteps>
__global__ void __launch_bounds__(kThreads)
    hadamard_block_kernel(const T* x, T* y, int64_t numel, int bits, float factor, bool aligned) {
  ANYCHIP_SHARED(float, tile, kBlockTile);
  const int64_t start =
      int64_t{blockIdx.x} * kSteps * kBlockTile + static_cast<int>(threadIdx.x) * kVector;
  float values[kSteps][kVector];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_step(x, start + step * kBlockTile, numel, aligned, values[step]);
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    transform_in_warp(values[step], bits);
    transform_warps(values[step], tile);
  }
  transform_steps(values, kVectorBits + kLaneBits + kWarpBits, bits);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    store_step(y, start + step * kBlockTile, numel, aligned, factor, values[step]);
  }
}

template <class T>
cudaError_t hadamard_typed(const T* x, T* y, int64_t numel, int length, cudaStream_t stream) {
  int bits = 0;
  while (1 << bits < length) ++bits;
  // 1 / sqrt(2^bits), rounded once.
  constexpr double kSqrtHalf = 0.70710678118654752440;
  const auto factor =
      static_cast<float>((bits % 2 ? kSqrtHalf : 1.0) / static_cast<double>(1 << bits / 2));
  const bool aligned = is_vectorizable(x) && is_vectorizable(y);
  const auto run = [&](auto kernel, int64_t tile) {
    const dim3 grid(static_cast<unsigned>((numel + tile - 1) / tile));
    return launch(kernel, grid, dim3(kThreads), 0, stream, x, y, numel, bits, factor, aligned);
  };
  if (length <= kLongestShort) return run(hadamard_warp_kernel<T>, kWarps * kLongestShort);
  if (length <= 2 * kBlockTile) return run(hadamard_block_kernel<T, 2>, 2 * kBlockTile);
  if (length <= 4 * kBlockTile) return run(hadamard_block_kernel<T, 4>, 4 * kBlockTile);
  return run(hadamard_block_kernel<T, 16>, 16 * kBlockTile);
}

}  // namespace

cudaError_t hadamard(const void* x, void* y, int64_t numel, int length, DType dtype, Place place) {
  const bool power = length >= 1 && length <= kLongestHadamard && (length & (length - 1)) == 0;
  if (!power || numel < 0 || numel % length) return cudaErrorInvalidValue;
  if (numel == 0) return cudaSuccess;
  return visit_dtype(dtype, [&](auto element) {
    using T = decltype(element);
    return hadamard_typed(static_cast<const T*>(x), static_cast<T*>(y), numel, length,
                          place.stream);
  });
}

}  // namespace anychip::cuda
