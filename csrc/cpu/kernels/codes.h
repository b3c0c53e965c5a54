// Codes of blocks that share a scale: bytes in lanes, a block's scale, and small floats.
//
// Everything has the bits of the references (anychip.operators.codes, .adamw_8bit): quotients are
// divided, not multiplied by a reciprocal, and all else is exact.
#pragma once

#include "loops.h"

namespace anychip::cpu::ANYCHIP_ISA {

ANYCHIP_INLINE U32 load_bytes(const uint8_t* p, AllLanes) {
  U32 v;
  read(v, p);
  return v;
}
ANYCHIP_INLINE U32 load_bytes(const uint8_t* p, FirstLanes lanes) {
  uint8_t buffer[kLanes] = {};
  copy_first(buffer, p, lanes.count);
  return load_bytes(buffer, AllLanes{});
}
// The low byte of each lane.
ANYCHIP_INLINE void store_bytes(uint8_t* p, U32 v, AllLanes) { write(p, v); }
ANYCHIP_INLINE void store_bytes(uint8_t* p, U32 v, FirstLanes lanes) {
  uint8_t buffer[kLanes];
  write(buffer, v);
  copy_first(p, buffer, lanes.count);
}

// Bits of the largest magnitude; those of a NaN, which are above all others, if there is one.
ANYCHIP_INLINE uint32_t largest_magnitude(const float* x, int64_t n) {
  U32 a{}, b{};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a = larger(a, bits_of(load_ahead(x + i, AllLanes{})) & 0x7fffffffu);
    b = larger(b, bits_of(load(x + i + kLanes, AllLanes{})) & 0x7fffffffu);
  }
  for_each_vector(i, n, [&](int64_t at, auto lanes) {
    a = larger(a, bits_of(load(x + at, lanes)) & 0x7fffffffu);
  });
  return static_cast<uint32_t>(largest_lane(larger(a, b)));
}

ANYCHIP_INLINE float float_of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// What a block's numbers are divided by, and its scale. A factor of 0: all its codes are that of 0.
struct BlockScale {
  float scale, factor;
};
ANYCHIP_INLINE BlockScale block_scale(uint32_t top_bits, float largest) {
  const float ratio = float_of_bits(top_bits) / largest;
  const float scale = ratio < 0x1p-126f ? 0.0f : ratio;
  return {scale, scale < __builtin_inff() ? scale : 0.0f};  // a NaN is not below
}

// Codes of floats without a sign: an exponent above kFraction bits of fraction.
template <int kFraction, int kBias>
struct SmallFloat {
  static constexpr uint32_t kShift = 23 - kFraction;
  static constexpr uint32_t kRebias = 127 - kBias;  // between the exponents of float32 and these
  static constexpr uint32_t kNormalBits = (kRebias + 1) << 23;  // of the smallest normal number

  // Of a size from 0 to the largest number; a half to the even code.
  ANYCHIP_INLINE static U32 encode(F32 size) {
    const U32 bits = bits_of(size);
    const uint32_t half = (1u << (kShift - 1)) - 1u;
    const U32 normal = ((bits + half + ((bits >> kShift) & 1u)) >> kShift) - (kRebias << kFraction);
    // What is added has units of the smallest number, and the sum is rounded to these.
    constexpr uint32_t kUnits = kNormalBits + (kShift << 23);
    const U32 subnormal = bits_of(size + float_of_bits(kUnits)) - kUnits;
    return select(size < float_of_bits(kNormalBits), subnormal, normal);
  }

  ANYCHIP_INLINE static F32 decode(U32 code) {
    const U32 normal = (code << kShift) + (kRebias << 23);
    const U32 subnormal = bits_of(float_of(normal + 0x00800000u) - float_of_bits(kNormalBits));
    return float_of(select(code < (1u << kFraction), subnormal, normal));
  }
};

}  // namespace anychip::cpu::ANYCHIP_ISA
