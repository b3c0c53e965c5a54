// The two loops that the kernels are made of: over all vectors of a range, and a sum over one.
#pragma once

#include "../kernel_table.h"
#include "vector.h"

namespace anychip::cpu::ANYCHIP_ISA {

// body(i, lanes) for i = begin, begin + 16, ...; the last call may have fewer lanes.
template <class Body>
ANYCHIP_INLINE void for_each_vector(int64_t begin, int64_t end, Body&& body) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) body(i, AllLanes{});
  if (i < end) body(i, FirstLanes{end - i});
}

// put(i, make(i, lanes), lanes) for all elements of tensors of T, each by itself. Of two vectors
// put comes after both are made, when more is under way than one chain of instructions.
template <class T, class Make, class Put>
ANYCHIP_INLINE void for_each_made(Range elements, const Make& make, const Put& put) {
  int64_t i = elements.begin;
  if constexpr (kHasTwoVectors<T>) {
    constexpr int64_t kTwo = 2 * kLanes;
    for (; i + 2 * kTwo <= elements.end; i += 2 * kTwo) {
      const auto first = joined(make(i, EvenLanes{}), make(i, OddLanes{}));
      const auto second = joined(make(i + kTwo, EvenLanes{}), make(i + kTwo, OddLanes{}));
      put(i, first, TwoVectors{});
      put(i + kTwo, second, TwoVectors{});
    }
  }
  for_each_vector(i, elements.end, [&](int64_t j, auto lanes) { put(j, make(j, lanes), lanes); });
}

// body(first element, how many) for the rows of a range that begins where one does; the last may be
// shorter.
template <class Body>
ANYCHIP_INLINE void for_each_span(int64_t width, Range elements, const Body& body) {
  for (int64_t at = elements.begin; at < elements.end; at += width) {
    body(at, at + width < elements.end ? width : elements.end - at);
  }
}

// A load that also asks for what comes 2 KiB later. In loops with much arithmetic the processor
// looks too few elements ahead by itself, above all across pages, which its prefetchers do not
// cross: with this, GELU over 256 MiB takes 48 ms instead of 112, AdamW 3 % less. An address past
// the end is harmless. Loops with little arithmetic gain nothing and use `load`. Where many streams
// come together, less is better: of AdamW's four, 512 bytes, 5 % on a Zen 4.
template <int64_t kAhead = 2048, class T, class Lanes>
ANYCHIP_INLINE F32 load_ahead(const T* p, Lanes lanes) {
  __builtin_prefetch(reinterpret_cast<const char*>(p) + kAhead);
  return load(p, lanes);
}

// Lanes k and k + width are added, for half of the width each time. In registers: in memory each
// time waits for the one before to be stored.
template <int width>
struct Above {
  static constexpr int source(int k) { return (k + width) % kRegisterLanes; }
};
template <int width = kRegisterLanes / 2>
ANYCHIP_INLINE float sum_lanes(RegisterF v) {
  if constexpr (width == 0) {
    return v[0];
  } else {
    return sum_lanes<width / 2>(v + shuffle<Above<width>>(v, v));
  }
}
template <class H>
ANYCHIP_INLINE float sum_lanes(Pair<H> v) {
  return sum_lanes(v.low + v.high);
}

ANYCHIP_INLINE RegisterF larger(RegisterF a, RegisterF b) { return maximum(a, b); }
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
// Of numbers that are not NaN.
template <int width = kRegisterLanes / 2>
ANYCHIP_INLINE float largest_lane(RegisterF v) {
  if constexpr (width == 0) {
    return v[0];
  } else {
    return largest_lane<width / 2>(larger(v, shuffle<Above<width>>(v, v)));
  }
}
ANYCHIP_INLINE int32_t largest_lane(RegisterU v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32(reinterpret_cast<__m512i>(v));
#else
  int32_t largest = static_cast<int32_t>(v[0]);
  for (int k = 1; k < kRegisterLanes; ++k) {
    largest = static_cast<int32_t>(v[k]) > largest ? static_cast<int32_t>(v[k]) : largest;
  }
  return largest;
#endif
}
template <class H>
ANYCHIP_INLINE auto largest_lane(Pair<H> v) {
  return largest_lane(larger(v.low, v.high));
}

// Two sums taken in one pass.
struct TwoF32 {
  F32 first, second;
};
struct TwoFloats {
  float first, second;
};
ANYCHIP_INLINE TwoF32 operator+(TwoF32 a, TwoF32 b) {
  return {a.first + b.first, a.second + b.second};
}
ANYCHIP_INLINE TwoFloats sum_lanes(TwoF32 v) { return {sum_lanes(v.first), sum_lanes(v.second)}; }

// The sum of term(i, lanes) over [0, n), where lanes past the end must be 0.
//
// Note [Row sums]: 64 partial sums (4 vectors of 16 lanes) are combined as a tree, so a term passes
// at most n / 64 + 9 roundings: |error| <= (n / 64 + 9) * 2^-24 * sum |term|.
template <class Term>
ANYCHIP_INLINE auto sum_over(int64_t n, Term&& term) {
  using V = decltype(term(int64_t{0}, AllLanes{}));
  V a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = a + term(i, AllLanes{});
    b = b + term(i + kLanes, AllLanes{});
    c = c + term(i + 2 * kLanes, AllLanes{});
    d = d + term(i + 3 * kLanes, AllLanes{});
  }
  for (; i + kLanes <= n; i += kLanes) a = a + term(i, AllLanes{});
  if (i < n) b = b + term(i, FirstLanes{n - i});
  return sum_lanes((a + b) + (c + d));
}

}  // namespace anychip::cpu::ANYCHIP_ISA
