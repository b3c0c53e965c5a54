// CUDA's words in a declaration, which mean nothing on the host, and shared memory.
//
// A raw __shared__ does not compile on purpose: as a plain variable it would be one for all blocks.
#pragma once

#include "engine.h"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)

// A reference to an array, not a pointer: the undefined-behaviour sanitizer then checks each index.
#define ANYCHIP_SHARED(T, name, count)                                \
  static const char name##_key_ = 0;                                  \
  T(&name)                                                            \
  [count] = *static_cast<T(*)[count]>(cuda_emulator::shared_variable( \
      &name##_key_, sizeof(T) * (count), alignof(T), #name, __FILE__, __LINE__))
#define ANYCHIP_DYNAMIC_SHARED(T, name) \
  T* name = static_cast<T*>(cuda_emulator::dynamic_shared_memory())

// Where a thread is: one of its block's threads, in one of the grid's blocks.
#define threadIdx (cuda_emulator::position.thread->index)
#define blockIdx (cuda_emulator::position.block_index)
#define blockDim (cuda_emulator::position.block_size)
#define gridDim (cuda_emulator::position.grid_size)
constexpr int warpSize = 32;
