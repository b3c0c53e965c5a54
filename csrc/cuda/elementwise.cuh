// One function applied to every element of some arrays of one type: map().
//
// A block takes kUnrolled vectors per thread, whose loads are all issued before the first result is
// stored: that keeps enough bytes in flight to fill the memory's pipe. Elements behind the last
// whole vector, and arrays that are not 16-byte aligned, go one by one.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {

constexpr int kMapThreads = 256;
constexpr int kUnrolled = 2;

// The arrays of a map: read ones and written ones, all of the same length. A written one that is
// nullptr is not wanted.
template <class T, int kInputs, int kOutputs>
struct Arrays {
  const T* inputs[kInputs];
  T* outputs[kOutputs];
};

template <int N, class T, int kInputs, int kOutputs>
__device__ __forceinline__ void load_inputs(const Arrays<T, kInputs, kOutputs>& arrays,
                                            int64_t first, float (&values)[kInputs][N]) {
#pragma unroll
  for (int i = 0; i < kInputs; ++i) load(arrays.inputs[i] + first, values[i]);
}

template <int N, class T, int kInputs, int kOutputs, class Function>
__device__ __forceinline__ void store_outputs(const Arrays<T, kInputs, kOutputs>& arrays,
                                              int64_t first, const float (&values)[kInputs][N],
                                              const Function& function) {
  float results[kOutputs][N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float in[kInputs];
    float out[kOutputs];
#pragma unroll
    for (int a = 0; a < kInputs; ++a) in[a] = values[a][i];
    function(in, out);
#pragma unroll
    for (int a = 0; a < kOutputs; ++a) results[a][i] = out[a];
  }
#pragma unroll
  for (int a = 0; a < kOutputs; ++a) {
    if (arrays.outputs[a] != nullptr) store(arrays.outputs[a] + first, results[a]);
  }
}

template <int N, class T, int kInputs, int kOutputs, class Function>
__global__ void __launch_bounds__(kMapThreads)
    map_kernel(Arrays<T, kInputs, kOutputs> arrays, int64_t numel, Function function) {
  const int64_t vectors = numel / N;
  const int64_t start = int64_t{blockIdx.x} * kMapThreads * kUnrolled + threadIdx.x;
  float values[kUnrolled][kInputs][N];
#pragma unroll
  for (int step = 0; step < kUnrolled; ++step) {
    const int64_t vector = start + step * kMapThreads;
    if (vector < vectors) load_inputs(arrays, vector * N, values[step]);
  }
#pragma unroll
  for (int step = 0; step < kUnrolled; ++step) {
    const int64_t vector = start + step * kMapThreads;
    if (vector < vectors) store_outputs(arrays, vector * N, values[step], function);
  }
  // The tail is shorter than a vector: the first block has enough threads for it.
  const int64_t last = vectors * N + threadIdx.x;
  if (N > 1 && blockIdx.x == 0 && last < numel) {
    float rest[kInputs][1];
    load_inputs(arrays, last, rest);
    store_outputs(arrays, last, rest, function);
  }
}

// function(in, out): const float (&)[kInputs], float (&)[kOutputs], for every element.
template <class T, int kInputs, int kOutputs, class Function>
cudaError_t map(const Arrays<T, kInputs, kOutputs>& arrays, int64_t numel, const Function& function,
                const Place& place) {
  if (numel == 0) return cudaSuccess;
  bool aligned = true;
  for (const T* input : arrays.inputs) aligned = aligned && is_vectorizable(input);
  for (const T* output : arrays.outputs) aligned = aligned && is_vectorizable(output);
  const int64_t width = aligned ? kWidth<T> : 1;
  // At least one block: a tail alone needs it.
  const int64_t per_block = width * kMapThreads * kUnrolled;
  const dim3 grid(static_cast<unsigned>((numel + per_block - 1) / per_block));
  if (aligned) {
    return launch(map_kernel<kWidth<T>, T, kInputs, kOutputs, Function>, grid, dim3(kMapThreads), 0,
                  place.stream, arrays, numel, function);
  }
  return launch(map_kernel<1, T, kInputs, kOutputs, Function>, grid, dim3(kMapThreads), 0,
                place.stream, arrays, numel, function);
}

}  // namespace anychip::cuda
