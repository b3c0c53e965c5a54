// Elements between global memory and float32 registers, in accesses of 16 bytes where they fit.
//
// All arithmetic is in float32; a value is rounded once, when it is stored.
#pragma once

#include <cstring>
#include <type_traits>

#include "dtype.h"

namespace anychip::cuda {

// The widest access of one thread; four of them fill a sector line of 64 bytes.
constexpr int kAccessBytes = 16;

// Elements of T in one access.
template <class T>
constexpr int kWidth = kAccessBytes / static_cast<int>(sizeof(T));

__host__ __device__ __forceinline__ float to_float(float value) { return value; }
__host__ __device__ __forceinline__ float to_float(BFloat16 value) {
  return __bfloat162float(value);
}
__host__ __device__ __forceinline__ float to_float(Float16 value) { return __half2float(value); }

template <class T>
__host__ __device__ __forceinline__ T from_float(float value);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__host__ __device__ __forceinline__ BFloat16 from_float<BFloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__host__ __device__ __forceinline__ Float16 from_float<Float16>(float value) {
  return __float2half_rn(value);
}

// `value` as it is after a store: rounded to T.
template <class T>
__host__ __device__ __forceinline__ float rounded(float value) {
  return to_float(from_float<T>(value));
}

// to[i] = from[i]. N is 1, or a multiple of kWidth<T>; then `from` is 16-byte aligned.
template <int N, class T>
__device__ __forceinline__ void load(const T* __restrict__ from, float (&to)[N]) {
  if constexpr (N == 1) {
    to[0] = to_float(*from);
  } else {
    constexpr int width = kWidth<T>;
    static_assert(N % width == 0, "a vector is whole accesses");
#pragma unroll
    for (int access = 0; access < N / width; ++access) {
      const uint4 raw = reinterpret_cast<const uint4*>(from)[access];
      T values[width];
      memcpy(values, &raw, kAccessBytes);
#pragma unroll
      for (int i = 0; i < width; ++i) to[access * width + i] = to_float(values[i]);
    }
  }
}

// to[i] = from[i], each rounded to T. Alignment as for load; `to` is in global memory.
template <int N, class T>
__device__ __forceinline__ void store(T* __restrict__ to, const float (&from)[N]) {
  if constexpr (N == 1) {
    *to = from_float<T>(from[0]);
  } else {
    constexpr int width = kWidth<T>;
    static_assert(N % width == 0, "a vector is whole accesses");
#pragma unroll
    for (int access = 0; access < N / width; ++access) {
      T values[width];
#pragma unroll
      for (int i = 0; i < width; ++i) values[i] = from_float<T>(from[access * width + i]);
      uint4 raw;
      memcpy(&raw, values, kAccessBytes);
      // nvcc 13 may split an assignment into stores of 4 bytes; not this one.
      __stwb(reinterpret_cast<uint4*>(to) + access, raw);
    }
  }
}

// N adjacent elements as they lie in memory: half the registers of their float32 values in 16-bit
// types. The address is a multiple of 16 bytes, or of N * sizeof(T) where that is less. Kept in
// words of 32 bits, since a compiler that sees 16-bit values gives each a register of its own.
template <int N, class T>
struct alignas(N * sizeof(T) < kAccessBytes ? N * sizeof(T) : kAccessBytes) Adjacent {
  using Word = std::conditional_t<N * sizeof(T) % sizeof(uint32_t) == 0, uint32_t, T>;
  Word words[N * sizeof(T) / sizeof(Word)];

  __device__ __forceinline__ T at(int i) const {
    T value;
    memcpy(&value, reinterpret_cast<const unsigned char*>(words) + i * sizeof(T), sizeof(T));
    return value;
  }
  __device__ __forceinline__ float operator[](int i) const { return to_float(at(i)); }
};

template <int N, class T>
__device__ __forceinline__ Adjacent<N, T> load_adjacent(const T* __restrict__ from) {
  return *reinterpret_cast<const Adjacent<N, T>*>(from);
}

template <int N, class T>
__device__ __forceinline__ void store_adjacent(T* __restrict__ to, const Adjacent<N, T>& values) {
  *reinterpret_cast<Adjacent<N, T>*>(to) = values;
}

template <int N, class T>
__device__ __forceinline__ void unpack(const Adjacent<N, T>& values, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = values[i];
}

template <int N, class T>
__device__ __forceinline__ Adjacent<N, T> pack(const float (&from)[N]) {
  T values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = from_float<T>(from[i]);
  Adjacent<N, T> packed;
  memcpy(packed.words, values, sizeof(values));
  return packed;
}

// Whether vectors may be used for an array: its address, and the length of its rows in bytes.
inline bool is_vectorizable(const void* address, int64_t row_bytes = kAccessBytes) {
  return reinterpret_cast<uintptr_t>(address) % kAccessBytes == 0 && row_bytes % kAccessBytes == 0;
}

}  // namespace anychip::cuda
