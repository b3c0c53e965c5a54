// Loads and stores with cache hints, bits, and single-precision arithmetic.
//
// The fast functions (__expf, __fdividef, rsqrtf ...) are exact to about one ULP here, and worse on
// the device: no test may ask for the host's bits of them.
// Source: CUDA Math API, "Single Precision Intrinsics", "Integer Intrinsics", "Type Casting".
#pragma once

#include <math.h>

#include <cstdint>
#include <type_traits>

#include "bit_cast.h"
#include "engine.h"

// Hints to the caches, which there are none of. What they are for lies in global memory.
#define CUDA_EMULATOR_LOAD(name)                               \
  template <class T>                                           \
  T name(const T* address, CUDA_EMULATOR_SITE) {               \
    cuda_emulator::check_global(address, #name, {file, line}); \
    return *address;                                           \
  }
CUDA_EMULATOR_LOAD(__ldg)
CUDA_EMULATOR_LOAD(__ldca)
CUDA_EMULATOR_LOAD(__ldcg)
CUDA_EMULATOR_LOAD(__ldcs)
CUDA_EMULATOR_LOAD(__ldlu)
CUDA_EMULATOR_LOAD(__ldcv)
#undef CUDA_EMULATOR_LOAD
#define CUDA_EMULATOR_STORE(name)                                          \
  template <class T>                                                       \
  void name(T* address, std::common_type_t<T> value, CUDA_EMULATOR_SITE) { \
    cuda_emulator::check_global(address, #name, {file, line});             \
    *address = value;                                                      \
  }
CUDA_EMULATOR_STORE(__stwb)
CUDA_EMULATOR_STORE(__stcg)
CUDA_EMULATOR_STORE(__stcs)
CUDA_EMULATOR_STORE(__stwt)
#undef CUDA_EMULATOR_STORE

template <class T>
T min(T a, std::common_type_t<T> b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, std::common_type_t<T> b) {
  return a < b ? b : a;
}

inline int __float_as_int(float value) { return cuda_emulator::bit_cast<int>(value); }
inline unsigned __float_as_uint(float value) { return cuda_emulator::bit_cast<unsigned>(value); }
inline float __int_as_float(int bits) { return cuda_emulator::bit_cast<float>(bits); }
inline float __uint_as_float(unsigned bits) { return cuda_emulator::bit_cast<float>(bits); }

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __clz(int bits) { return bits ? __builtin_clz(static_cast<unsigned>(bits)) : 32; }
inline int __clzll(long long bits) {
  return bits ? __builtin_clzll(static_cast<unsigned long long>(bits)) : 64;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned __brev(unsigned bits) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (bits >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
inline int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
// Byte i of the result is byte (selector >> 4 i & 7) of y:x, or its sign in all bits with bit 3.
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> 4 * i & 15u;
    unsigned byte = static_cast<unsigned>(bytes >> 8 * (choice & 7u)) & 255u;
    if (choice & 8u) byte = byte & 128u ? 255u : 0u;
    result |= byte << 8 * i;
  }
  return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both << (shift & 31u) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  const uint64_t both = static_cast<uint64_t>(high) << 32 | low;
  return static_cast<unsigned>(both >> (shift & 31u));
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  }
  return sum;
}

// Out of range they saturate, and a NaN becomes 0.
inline int __float2int_rn(float value) {
  if (isnan(value)) return 0;
  if (value >= 0x1p31f) return INT32_MAX;
  return value <= -0x1p31f ? INT32_MIN : static_cast<int>(nearbyintf(value));
}
inline int __float2int_rz(float value) { return isnan(value) ? 0 : __float2int_rn(truncf(value)); }
inline int __float2int_rd(float value) { return isnan(value) ? 0 : __float2int_rn(floorf(value)); }
inline int __float2int_ru(float value) { return isnan(value) ? 0 : __float2int_rn(ceilf(value)); }
inline unsigned __float2uint_rn(float value) {
  if (!(value > 0.0f)) return 0;
  return value >= 0x1p32f ? UINT32_MAX : static_cast<unsigned>(nearbyintf(value));
}
inline float __int2float_rn(int value) { return static_cast<float>(value); }
inline float __uint2float_rn(unsigned value) { return static_cast<float>(value); }

namespace cuda_emulator {

// Through memory, so that no compiler joins this result and the next sum to one operation: the
// device does not for these functions.
inline float separate(float value) {
  asm("" : "+m"(value));
  return value;
}

}  // namespace cuda_emulator

inline float __fadd_rn(float a, float b) { return cuda_emulator::separate(a + b); }
inline float __fsub_rn(float a, float b) { return cuda_emulator::separate(a - b); }
inline float __fmul_rn(float a, float b) { return cuda_emulator::separate(a * b); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float a) { return a > 0.0f ? (a < 1.0f ? a : 1.0f) : 0.0f; }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float normcdff(float a) { return 0.5f * erfcf(-a * 0x1.6a09e6p-1f); }

// Macros: glibc declares __expf and its like itself.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, sine, cosine) sincosf(x, sine, cosine)
