// Exact sums of squares: Note [Exact sums] in operators.h.
//
// A tile's squares are added without an error to a few sums of float64 per lane, as in Demmel and
// Nguyen 2013 (IEEE ARITH 21): a sum that begins at 1.5 * 2^(52 + p) rounds what is added to it to
// a multiple of 2^p, and what it leaves goes to the next sum, 44 bits lower. Two sums hold what
// tiles have whose largest and smallest numbers are within 2^19 of each other, three up to 2^41; of
// others, and where there are infinities or NaN, the squares are added one by one as integers.
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
  __builtin_memcpy(buffer, p, lanes.count * sizeof(float));
  return load_doubles(buffer, AllLanes{});
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

ANYCHIP_INLINE RegisterU larger(RegisterU a, RegisterU b) {  // as signed numbers
#if defined(__AVX512F__)
  return reinterpret_cast<RegisterU>(
      _mm512_max_epi32(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<RegisterU>(
      _mm256_max_epi32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  return select(reinterpret_cast<RegisterI>(a) > reinterpret_cast<RegisterI>(b), a, b);
#endif
}
template <class H>
ANYCHIP_INLINE Pair<H> larger(Pair<H> a, Pair<H> b) {
  return {larger(a.low, b.low), larger(a.high, b.high)};
}
ANYCHIP_INLINE int32_t largest_lane(RegisterU v) {
  int32_t largest = static_cast<int32_t>(v[0]);
  for (int k = 1; k < kRegisterLanes; ++k) {
    largest = static_cast<int32_t>(v[k]) > largest ? static_cast<int32_t>(v[k]) : largest;
  }
  return largest;
}
template <class H>
ANYCHIP_INLINE int32_t largest_lane(Pair<H> v) {
  return largest_lane(larger(v.low, v.high));
}

// Bits of the largest and of the smallest magnitude that is not 0; both 0 where there is none.
struct Magnitudes {
  int32_t largest, smallest;
};

ANYCHIP_INLINE Magnitudes magnitudes(const float* x, int64_t n) {
  constexpr uint32_t kTop = 0x80000000u;
  U32 largest{}, smallest = fill<U32>(kTop);  // the latter from the top, where 0 wraps round
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    const U32 bits = bits_of(load(x + i, lanes)) & 0x7fffffffu;
    largest = larger(largest, bits);
    smallest = larger(smallest, kTop - bits);
  });
  const auto below_top = static_cast<uint32_t>(largest_lane(smallest));
  return {largest_lane(largest), static_cast<int32_t>(kTop - below_top) & 0x7fffffff};
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
constexpr int kLogPerLane = 8;  // squares of a tile that one lane adds up: kSquaresTile / kLanes
constexpr int kStepDown = 52 - kLogPerLane;

// The sums of a tile, of which the first has units of 2^top.
template <int kSums>
ANYCHIP_INLINE void add_tile(const float* x, int64_t n, int top, int64_t* digits) {
  double start[kSums];
  int place[kSums];
  F64 sums[kSums];
  for (int k = 0; k < kSums; ++k) {
    const int unit = top - kStepDown * k > -298 ? top - kStepDown * k : -298;
    place[k] = unit + 298;
    const uint64_t bits = static_cast<uint64_t>(1023 + 52 + unit) << 52 | uint64_t{1} << 51;
    __builtin_memcpy(&start[k], &bits, sizeof bits);
    sums[k] = fill<F64>(start[k]);
  }
  // The next tile comes while this one is computed with: it is then read twice from the cache.
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    __builtin_prefetch(x + kSquaresTile + i);
    const F64 value = load_doubles(x + i, lanes);
    F64 rest = value * value;
    for (int k = 0; k < kSums; ++k) {
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

// Adds the squares of at most kSquaresTile elements.
ANYCHIP_INLINE void add_squares_of(const float* x, int64_t n, int64_t* digits) {
  const Magnitudes found = magnitudes(x, n);
  if (found.largest == 0) return;
  const int top = 2 * exponent_of(found.largest) + 2 + kLogPerLane - 51;
  const int lowest = 2 * exponent_of(found.smallest) - 46;
  if (found.largest >= 0x7f800000 || top - 2 * kStepDown > lowest) {
    for (int64_t i = 0; i < n; ++i) add_one_square(x[i], digits);
  } else if (top - kStepDown <= lowest) {
    add_tile<2>(x, n, top, digits);
  } else {
    add_tile<3>(x, n, top, digits);
  }
}

}  // namespace anychip::cpu::ANYCHIP_ISA
