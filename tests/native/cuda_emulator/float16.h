// __half and __nv_bfloat16: conversions bit by bit, and arithmetic that rounds once, as the
// device's.
//
// A number that becomes one of 16 bits is rounded to nearest, ties to even; a NaN becomes 0x7fff.
// A NaN of __half becomes the float NaN 0x7fffffff. One of __nv_bfloat16 keeps its bits, as on
// sm_80; sm_90 converts it to 0x7fffffff.
// Source: PTX ISA, "cvt"; the declarations of cuda_fp16.h and cuda_bf16.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "bit_cast.h"
#include "vector_types.h"

namespace cuda_emulator {

inline uint16_t bfloat16_bits(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline uint16_t half_bits(float value) {
  const auto bits = bit_cast<uint32_t>(value);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fff;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520 and more
  if (magnitude < 0x38800000u) {
    // Below 2^-14: adding 0.5 rounds at 2^-24, and leaves the subnormal in the last bits.
    const auto shifted = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f);
    return static_cast<uint16_t>(sign | (shifted - 0x3f000000u));
  }
  const uint32_t rounded = magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

inline float float_of_half(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  const uint32_t exponent = bits >> 10 & 31u;
  const uint32_t fraction = bits & 1023u;
  if (exponent == 31) return bit_cast<float>(fraction ? 0x7fffffffu : sign | 0x7f800000u);
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign ? -value : value;
  }
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

// a * b + c for numbers of 16 bits, rounded to odd in float: one more rounding to 16 bits then
// gives what rounding once would. The product is exact in double. Source: Boldo, Melquiond,
// "Emulation of FMA and correctly rounded sums", IEEE TC 57(4), 2008.
inline float multiply_add(double a, double b, double c) {
  const double product = a * b;
  double sum = product + c;
  if (!std::isfinite(sum)) return static_cast<float>(sum);
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);
  const auto toward = [](double direction) { return direction > 0 ? INFINITY : -INFINITY; };
  if (error != 0 && !(bit_cast<uint64_t>(sum) & 1)) {
    sum = std::nextafter(sum, static_cast<double>(toward(error)));
  }
  const auto narrow = static_cast<float>(sum);
  if (narrow == sum || (bit_cast<uint32_t>(narrow) & 1)) return narrow;
  return std::nextafterf(narrow, toward(sum - narrow));
}

}  // namespace cuda_emulator

struct __half_raw {
  uint16_t x;
};
struct __nv_bfloat16_raw {
  uint16_t x;
};

struct __half {
  uint16_t __x;
  __half() = default;
  __half(__half_raw raw) : __x(raw.x) {}
  explicit __half(float value) : __x(cuda_emulator::half_bits(value)) {}
  operator float() const { return cuda_emulator::float_of_half(__x); }
};
struct __nv_bfloat16 {
  uint16_t __x;
  __nv_bfloat16() = default;
  __nv_bfloat16(__nv_bfloat16_raw raw) : __x(raw.x) {}
  explicit __nv_bfloat16(float value) : __x(cuda_emulator::bfloat16_bits(value)) {}
  operator float() const {
    return cuda_emulator::bit_cast<float>(static_cast<uint32_t>(__x) << 16);
  }
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
using half = __half;
using half2 = __half2;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

inline float __half2float(__half value) { return value; }
inline __half __float2half(float value) { return __half(value); }
inline __half __float2half_rn(float value) { return __half(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return value; }
inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }

inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half2 __float22half2_rn(float2 pair) { return {__half(pair.x), __half(pair.y)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half value) { return {value, value}; }
inline float2 __bfloat1622float2(__nv_bfloat162 pair) { return {pair.x, pair.y}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 pair) {
  return {__nv_bfloat16(pair.x), __nv_bfloat16(pair.y)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }

inline unsigned short __half_as_ushort(__half value) { return value.__x; }
inline __half __ushort_as_half(unsigned short bits) { return __half_raw{bits}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.__x; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) { return __nv_bfloat16_raw{bits}; }

// What is the same for both types, and element by element for their pairs. Sums, differences and
// products of 16-bit numbers may be rounded to float first: 24 bits are enough for that to be
// innocuous. Of a number and a NaN, __hmax and __hmin give the number.
#define CUDA_EMULATOR_FLOAT16(T, T2)                                                             \
  inline T __hadd(T a, T b) { return T(float(a) + float(b)); }                                   \
  inline T __hsub(T a, T b) { return T(float(a) - float(b)); }                                   \
  inline T __hmul(T a, T b) { return T(float(a) * float(b)); }                                   \
  inline T __hdiv(T a, T b) { return T(float(a) / float(b)); }                                   \
  inline T __hfma(T a, T b, T c) { return T(cuda_emulator::multiply_add(a, b, c)); }             \
  inline T __hmax(T a, T b) { return T(fmaxf(a, b)); }                                           \
  inline T __hmin(T a, T b) { return T(fminf(a, b)); }                                           \
  inline T __hneg(T a) { return T(-float(a)); }                                                  \
  inline T __habs(T a) { return T(fabsf(a)); }                                                   \
  inline bool __hisnan(T a) { return float(a) != float(a); }                                     \
  inline T operator+(T a, T b) { return __hadd(a, b); }                                          \
  inline T operator-(T a, T b) { return __hsub(a, b); }                                          \
  inline T operator*(T a, T b) { return __hmul(a, b); }                                          \
  inline T operator/(T a, T b) { return __hdiv(a, b); }                                          \
  inline float __low2float(T2 a) { return a.x; }                                                 \
  inline float __high2float(T2 a) { return a.y; }                                                \
  inline T2 __hadd2(T2 a, T2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }                 \
  inline T2 __hsub2(T2 a, T2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }                 \
  inline T2 __hmul2(T2 a, T2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }                 \
  inline T2 __hmax2(T2 a, T2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                 \
  inline T2 __hmin2(T2 a, T2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                 \
  inline T2 __hfma2(T2 a, T2 b, T2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
  inline T2 operator+(T2 a, T2 b) { return __hadd2(a, b); }
CUDA_EMULATOR_FLOAT16(__half, __half2)
CUDA_EMULATOR_FLOAT16(__nv_bfloat16, __nv_bfloat162)
#undef CUDA_EMULATOR_FLOAT16
