// Exact sums of squares: Note [Exact sums] in operators.h.
//
// A tile's squares are added without an error to a few sums of float64 per lane, as in Demmel and
// Nguyen 2013 (IEEE ARITH 21): a sum that begins at 1.5 * 2^(52 + p) rounds what is added to it to
// a multiple of 2^p, and what it leaves goes to the next sum, 44 bits lower. Two sums hold what
// tiles have whose largest and smallest numbers are within 2^19 of each other, three up to 2^41; of
// others, and where there are infinities or NaN, the squares are added one by one as integers. Of
// numbers that have fewer bits than float32 one sum holds more: those of bfloat16 within 2^14.
#pragma once

#include "../operators.h"
#include "loops.h"

namespace anychip::cpu::ANYCHIP_ISA {

typedef uint64_t RegisterU64 __attribute__((vector_size(4 * kRegisterLanes)));

// Half a register of float32 fills one of float64; the compiler's own conversion takes detours.
ANYCHIP_INLINE void read_doubles(RegisterD& v, const float* p) {
#if defined(__AVX512F__)
  v = _mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(__AVX2__)
  v = _mm256_cvtps_pd(_mm_loadu_ps(p));
#else
  for (int k = 0; k < kRegisterLanes / 2; ++k) v[k] = static_cast<double>(p[k]);
#endif
}
template <class H>
ANYCHIP_INLINE void read_doubles(Pair<H>& v, const float* p) {
  read_doubles(v.low, p);
  read_doubles(v.high, p + sizeof(H) / 8);
}
using F64 = Repeat<Pair<RegisterD>, kLanes / kRegisterLanes>::Type;
ANYCHIP_INLINE F64 load_doubles(const float* p, AllLanes) {
  F64 v;
  read_doubles(v, p);
  return v;
}
ANYCHIP_INLINE F64 load_doubles(const float* p, FirstLanes lanes) {
  float buffer[kLanes] = {};
  copy_first(buffer, p, lanes.count);
  return load_doubles(buffer, AllLanes{});
}

// a * b + c where the product is exact: one rounding, fused or not.
ANYCHIP_INLINE RegisterD add_product(RegisterD a, RegisterD b, RegisterD c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}
template <class H>
ANYCHIP_INLINE Pair<H> add_product(Pair<H> a, Pair<H> b, Pair<H> c) {
  return {add_product(a.low, b.low, c.low), add_product(a.high, b.high, c.high)};
}

// Lanes' bits, added up as whole numbers.
ANYCHIP_INLINE uint64_t sum_of_bits(RegisterU64 v) {
  uint64_t sum = 0;
  for (int k = 0; k < kRegisterLanes / 2; ++k) sum += v[k];
  return sum;
}
ANYCHIP_INLINE RegisterU64 joined(RegisterD v) { return reinterpret_cast<RegisterU64>(v); }
template <class H>
ANYCHIP_INLINE RegisterU64 joined(Pair<H> v) {
  return joined(v.low) + joined(v.high);
}

// Bits of the largest and of the smallest magnitude that is not 0; both 0 where there is none.
struct Magnitudes {
  int32_t largest, smallest;
};

// Of n numbers, which seen(i, number, lanes) is given too.
template <class T, class Seen>
ANYCHIP_INLINE Magnitudes magnitudes(const T* x, int64_t n, const Seen& seen) {
  constexpr uint32_t kTop = 0x80000000u;
  U32 largest{}, smallest = fill<U32>(kTop);  // the latter from the top, where 0 wraps round
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    const F32 value = load(x + i, lanes);
    const U32 bits = bits_of(value) & 0x7fffffffu;
    largest = larger(largest, bits);
    smallest = larger(smallest, kTop - bits);
    seen(i, value, lanes);
  });
  const auto below_top = static_cast<uint32_t>(largest_lane(smallest));
  return {largest_lane(largest), static_cast<int32_t>(kTop - below_top) & 0x7fffffff};
}

ANYCHIP_INLINE Magnitudes magnitudes(const float* x, int64_t n) {
  return magnitudes(x, n, [](int64_t, F32, auto) {});
}

ANYCHIP_INLINE int exponent_of(int32_t bits) {
  const int stored = bits >> 23;
  return (stored > 0 ? stored : 1) - 127;
}

// value * 2^(place - 298); place is not negative.
ANYCHIP_INLINE void add_at(int64_t* digits, int place, int64_t value) {
  __extension__ typedef __int128 Wide;
  const Wide wide = static_cast<Wide>(value) * (int64_t{1} << (place % 32));
  int64_t* to = digits + place / 32;
  to[0] += static_cast<int64_t>(wide & 0xffffffff);
  to[1] += static_cast<int64_t>((wide >> 32) & 0xffffffff);
  to[2] += static_cast<int64_t>(wide >> 64);
}

ANYCHIP_INLINE void add_one_square(float value, int64_t* digits) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  const int stored = static_cast<int>(bits >> 23 & 0xffu);
  const int64_t fraction = bits & 0x7fffffu;
  if (stored == 255) {
    digits[fraction == 0 ? kInfinities : kNaNs] += 1;
    return;
  }
  const int64_t whole = stored == 0 ? fraction : fraction | 0x800000;
  add_at(digits, stored == 0 ? 0 : 2 * (stored - 1), whole * whole);
}

constexpr int64_t kSquaresTile = 4096;

// The sums of a tile, of which the first has units of 2^top, and each next one 2^step finer ones.
template <int kSums>
ANYCHIP_INLINE void add_tile(const float* x, int64_t n, int top, int step, int64_t* digits) {
  double start[kSums];
  int place[kSums];
  F64 sums[kSums];
  for (int k = 0; k < kSums; ++k) {
    const int unit = top - step * k > -298 ? top - step * k : -298;
    place[k] = unit + 298;
    const uint64_t bits = static_cast<uint64_t>(1023 + 52 + unit) << 52 | uint64_t{1} << 51;
    __builtin_memcpy(&start[k], &bits, sizeof bits);
    sums[k] = fill<F64>(start[k]);
  }
  // The next tile comes while this one is computed with: it is then read twice from the cache.
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    __builtin_prefetch(x + kSquaresTile + i);
    const F64 value = load_doubles(x + i, lanes);
    const F64 first = add_product(value, value, sums[0]);
    F64 rest{};
    if (kSums > 1) rest = add_product(value, value, sums[0] - first);
    sums[0] = first;
    for (int k = 1; k < kSums; ++k) {
      const F64 sum = sums[k] + rest;
      if (k + 1 < kSums) rest = rest - (sum - sums[k]);
      sums[k] = sum;
    }
  });
  // In one binade, numbers differ by as many units as their bits do.
  for (int k = 0; k < kSums; ++k) {
    uint64_t first;
    __builtin_memcpy(&first, &start[k], sizeof first);
    const uint64_t units = sum_of_bits(joined(sums[k])) - first * kLanes;
    add_at(digits, place[k], static_cast<int64_t>(units));
  }
}

// Adds the squares of at most kSquaresTile elements, in which `found` was found.
ANYCHIP_INLINE void add_squares_of(const float* x, int64_t n, Magnitudes found, int fraction_bits,
                                   int64_t* digits) {
  if (found.largest == 0) return;
  const int log_per_lane = n <= kSquaresTile / 4 ? 6 : 8;  // squares that one lane adds up
  const int step = 52 - log_per_lane;
  const int top = 2 * exponent_of(found.largest) + 2 + log_per_lane - 51;
  const int lowest = 2 * (exponent_of(found.smallest) - fraction_bits);
  if (found.largest >= 0x7f800000 || top - 2 * step > lowest) {
    for (int64_t i = 0; i < n; ++i) add_one_square(x[i], digits);
  } else if (top <= lowest) {
    add_tile<1>(x, n, top, step, digits);
  } else if (top - step <= lowest) {
    add_tile<2>(x, n, top, step, digits);
  } else {
    add_tile<3>(x, n, top, step, digits);
  }
}
ANYCHIP_INLINE void add_squares_of(const float* x, int64_t n, int64_t* digits) {
  add_squares_of(x, n, magnitudes(x, n), 23, digits);
}

}  // namespace anychip::cpu::ANYCHIP_ISA
