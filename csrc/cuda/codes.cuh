// Codes of one number in each format, and scales of a block: what core's operators/codes.py says.
#pragma once

#include "philox.cuh"
#include "quantization.h"

namespace anychip::cuda {

// Below it a scale, and of an MX format a largest magnitude, is not a normal number: the block is
// all zeros.
constexpr float kSmallestScale = 1.1754943508222875e-38f;
constexpr float kLargestFloat = 3.4028234663852886e38f;
constexpr uint32_t kNf4Codes = 16;
constexpr uint32_t kNf4Zero = 7;

// Dettmers et al. 2023, arXiv:2305.14314, appendix E.
__constant__ float kNf4Values[kNf4Codes] = {
    -1.0f,          -0.696192801f, -0.525073051f, -0.394917488f, -0.284441382f, -0.18477343f,
    -0.0910500363f, 0.0f,          0.0795802996f, 0.160930201f,  0.246112302f,  0.337915242f,
    0.440709829f,   0.562617004f,  0.722956836f,  1.0f};
// Halfway between neighbours.
__constant__ float kNf4Ends[kNf4Codes - 1] = {
    -0.848096371f, -0.610632896f,  -0.45999527f,  -0.33967942f, -0.234607399f,
    -0.137911737f, -0.0455250181f, 0.0397901498f, 0.120255247f, 0.203521252f,
    0.292013764f,  0.389312536f,   0.501663446f,  0.64278692f,  0.861478448f};

// The power of two of an exponent from -126 to 127.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// Bits of the float exponent, 127 for 1.
__device__ __forceinline__ int exponent_bits_of(float value) {
  return static_cast<int>(__float_as_uint(value) >> 23 & 0xffu);
}

// ---- scales

// What a block's numbers are divided by, from its largest magnitude; 0 where all are 0.
__device__ __forceinline__ float factor_of(float top, const CodeFormat& format) {
  if (!format.is_mx) {
    const float scale = top / format.largest;
    return scale < kSmallestScale ? 0.0f : scale;
  }
  if (top < kSmallestScale) return 0.0f;
  const int exponent = exponent_bits_of(top);
  // NaN for a block with a NaN or an infinity.
  if (exponent == 255) return NAN;
  return power_of_two(min(max(exponent - format.top_exponent, 1), 253) - 127);
}

// Stores a block's scale: a float, or the exponent of an MX format, at least that of 2^-126.
__device__ __forceinline__ void store_scale(void* scales, int64_t block, float factor,
                                            const CodeFormat& format) {
  if (format.is_mx) {
    static_cast<unsigned char*>(scales)[block] =
        static_cast<unsigned char>(max(exponent_bits_of(factor), 1));
  } else {
    static_cast<float*>(scales)[block] = factor;
  }
}

__device__ __forceinline__ float load_scale(const void* scales, int64_t block, bool is_mx) {
  if (!is_mx) return static_cast<const float*>(scales)[block];
  const uint32_t exponent = static_cast<const unsigned char*>(scales)[block];
  if (exponent == 255u) return NAN;
  return __uint_as_float(exponent == 0u ? 0x00400000u : exponent << 23);
}

// ---- codes

// What the codes of a call have in common.
struct Coding {
  PhiloxStream stream;
  bool random;
  CodeFormat format;
};

// The whole number next to x / scale. The product with the reciprocal is off by less than 127 *
// 2^-22; only where that could carry it over a half is the division made, which costs several times
// more.
__device__ __forceinline__ float nearest(float x, float scale, float reciprocal) {
  const float step = x * reciprocal;
  const float whole = rintf(step);
  return fabsf(step - whole) < 0.4999f ? whole : rintf(x / scale);
}

// 24 bits of the word against the fraction: exact in float32.
__device__ __forceinline__ float drawn(float x, float scale, uint32_t word) {
  const float step = x / scale;
  const float below = floorf(step);
  return below + (static_cast<float>(word >> 8) < (step - below) * 16777216.0f ? 1.0f : 0.0f);
}

// Of a half the lower code: so many ends lie below it.
__device__ __forceinline__ uint32_t nf4_code(float step) {
  uint32_t code = 0;
#pragma unroll
  for (const float end : kNf4Ends) code += step > end ? 1u : 0u;
  return code;
}

// A small float counted from its smallest positive value: a code's bits are that count, since each
// exponent has 2^mantissa_bits values, and the ones without a leading bit come first. Halves go to
// even counts, which are even codes.
__device__ __forceinline__ uint32_t float_code(float step, const CodeFormat& format) {
  const float size = fminf(fabsf(step), format.largest);
  const int lowest = 2 - (1 << (format.exponent_bits - 1));  // exponent of the normal values
  const int exponent = max(exponent_bits_of(size) - 127, lowest);
  const auto count =
      static_cast<uint32_t>(rintf(size * power_of_two(format.mantissa_bits - exponent))) +
      (static_cast<uint32_t>(exponent - lowest) << format.mantissa_bits);
  const uint32_t sign = __float_as_uint(step) >> 31;
  return count | sign << (format.exponent_bits + format.mantissa_bits);
}

// The code of a number, in the low bits.
__device__ __forceinline__ uint32_t code_of(float x, float factor, uint32_t word,
                                            const Coding& coding) {
  const CodeFormat& format = coding.format;
  if (!(factor > 0.0f && factor <= kLargestFloat)) return format.is_table ? kNf4Zero : 0u;
  if (format.is_table) return nf4_code(x / factor);
  if (format.exponent_bits != 0) return float_code(x / factor, format);
  const float whole = coding.random ? drawn(x, factor, word) : nearest(x, factor, 1.0f / factor);
  const float code = fminf(fmaxf(whole, -format.largest), format.largest);
  return static_cast<uint32_t>(static_cast<int>(code));
}

// What a code stands for; bits above it do not matter.
__device__ __forceinline__ float value_of(uint32_t bits, const CodeFormat& format) {
  const int above = 32 - format.bits;
  if (format.is_table) return kNf4Values[bits & (kNf4Codes - 1)];
  if (format.exponent_bits == 0) {
    return static_cast<float>(static_cast<int>(bits << above) >> above);
  }
  const uint32_t sign = bits << above & 0x80000000u;
  const uint32_t count = bits & ((1u << (format.bits - 1)) - 1u);
  const int exponent = static_cast<int>(count >> format.mantissa_bits);
  const uint32_t fraction = count & ((1u << format.mantissa_bits) - 1u);
  // With 4 bits of exponent the last code is no number, with 5 the last exponent is IEEE 754's.
  const uint32_t infinity = format.exponent_bits == 5 ? 31u << format.mantissa_bits : 127u;
  if (format.exponent_bits >= 4 && count >= infinity) {
    const bool is_infinity = format.exponent_bits == 5 && fraction == 0u;
    return __uint_as_float(sign | (is_infinity ? 0x7f800000u : 0x7fc00000u));
  }
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  const uint32_t leading = exponent == 0 ? 0u : 1u << format.mantissa_bits;
  const float unit = power_of_two(max(exponent, 1) - bias - format.mantissa_bits);
  return __uint_as_float(__float_as_uint(static_cast<float>(leading + fraction) * unit) | sign);
}

}  // namespace anychip::cuda
