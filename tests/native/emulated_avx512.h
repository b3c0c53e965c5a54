// AVX-512's instructions as the kernels use them, for a processor that has none: each as Intel's
// Intrinsics Guide writes it, on vectors that the compiler makes of AVX2's. Included before all
// else where ANYCHIP_AVX512_EMULATOR names this file, so that the kernels of that level run, with
// the bits that they must have, wherever those of AVX2 do. An instruction that is not here is an
// error of the compiler.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define __AVX512F__ 1

namespace anychip_emulated_avx512 {

#define EMULATED [[gnu::always_inline]] static inline

typedef float F16x __attribute__((vector_size(64)));
typedef int32_t I16x __attribute__((vector_size(64)));
typedef uint32_t U16x __attribute__((vector_size(64)));
typedef uint64_t W8x __attribute__((vector_size(64)));
typedef uint16_t H16x __attribute__((vector_size(32)));
typedef uint8_t B16x __attribute__((vector_size(16)));
typedef float F8x __attribute__((vector_size(32)));
typedef double D8x __attribute__((vector_size(64)));
typedef double D4x __attribute__((vector_size(32)));
typedef long long W4x __attribute__((vector_size(32)));
typedef long long W2x __attribute__((vector_size(16)));

template <class Whole, class Half>
struct Halves {
  Half low, high;
  EMULATED Halves of(Whole v) {
    Halves halves;
    __builtin_memcpy(&halves, &v, sizeof v);
    return halves;
  }
  [[gnu::always_inline]] Whole joined() const {
    Whole v;
    __builtin_memcpy(&v, this, sizeof v);
    return v;
  }
};
using Floats = Halves<F16x, F8x>;
using Doubles = Halves<D8x, D4x>;
using Integers = Halves<W4x, W2x>;

EMULATED __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
  const Floats x = Floats::of(a), y = Floats::of(b), z = Floats::of(c);
  return Floats{_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)}
      .joined();
}
EMULATED __m512d fmadd_pd(__m512d a, __m512d b, __m512d c) {
  const Doubles x = Doubles::of(a), y = Doubles::of(b), z = Doubles::of(c);
  return Doubles{_mm256_fmadd_pd(x.low, y.low, z.low), _mm256_fmadd_pd(x.high, y.high, z.high)}
      .joined();
}
EMULATED __m512 sqrt_ps(__m512 a) {
  const Floats x = Floats::of(a);
  return Floats{_mm256_sqrt_ps(x.low), _mm256_sqrt_ps(x.high)}.joined();
}
// The second operand where one is NaN, or both are 0.
EMULATED __m512 max_ps(__m512 a, __m512 b) {
  const Floats x = Floats::of(a), y = Floats::of(b);
  return Floats{_mm256_max_ps(x.low, y.low), _mm256_max_ps(x.high, y.high)}.joined();
}
EMULATED __m512 min_ps(__m512 a, __m512 b) {
  const Floats x = Floats::of(a), y = Floats::of(b);
  return Floats{_mm256_min_ps(x.low, y.low), _mm256_min_ps(x.high, y.high)}.joined();
}
// a * 2^floor(b), rounded once: float64 has room for the product.
EMULATED __m512 scalef_ps(__m512 a, __m512 b) {
  for (int k = 0; k < 16; ++k) {
    const double n = __builtin_floor(static_cast<double>(b[k]));
    const double limited = n > 600.0 ? 600.0 : n > -600.0 ? n : -600.0;
    const int64_t bits = (static_cast<int64_t>(limited) + 1023) << 52;
    double power;
    __builtin_memcpy(&power, &bits, sizeof power);
    a[k] = n != n ? b[k] : static_cast<float>(static_cast<double>(a[k]) * power);
  }
  return a;
}

EMULATED __m512 cvtph_ps(__m256i a) {
  const Integers x = Integers::of(a);
  return Floats{_mm256_cvtph_ps(x.low), _mm256_cvtph_ps(x.high)}.joined();
}
EMULATED __m256i round_to_half(__m512 a) {
  const Floats x = Floats::of(a);
  return Integers{_mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT),
                  _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT)}
      .joined();
}
EMULATED __m512d cvtps_pd(__m256 a) {
  return reinterpret_cast<__m512d>(__builtin_convertvector(reinterpret_cast<F8x>(a), D8x));
}
EMULATED __m512i cvtepu16_epi32(__m256i a) {
  return reinterpret_cast<__m512i>(__builtin_convertvector(reinterpret_cast<H16x>(a), U16x));
}
EMULATED __m512i cvtepu8_epi32(__m128i a) {
  return reinterpret_cast<__m512i>(__builtin_convertvector(reinterpret_cast<B16x>(a), U16x));
}
EMULATED __m256i cvtepi32_epi16(__m512i a) {
  return reinterpret_cast<__m256i>(__builtin_convertvector(reinterpret_cast<U16x>(a), H16x));
}
EMULATED __m128i cvtepi32_epi8(__m512i a) {
  return reinterpret_cast<__m128i>(__builtin_convertvector(reinterpret_cast<U16x>(a), B16x));
}

EMULATED __m512i set1_epi32(int a) { return reinterpret_cast<__m512i>(I16x{} + a); }
EMULATED __m512i max_epi32(__m512i a, __m512i b) {
  const I16x x = reinterpret_cast<I16x>(a), y = reinterpret_cast<I16x>(b);
  return reinterpret_cast<__m512i>(x > y ? x : y);
}
EMULATED int reduce_max_epi32(__m512i a) {
  const I16x x = reinterpret_cast<I16x>(a);
  int largest = x[0];
  for (int k = 1; k < 16; ++k) largest = x[k] > largest ? x[k] : largest;
  return largest;
}
EMULATED __m512i mul_epu32(__m512i a, __m512i b) {
  const W8x x = reinterpret_cast<W8x>(a), y = reinterpret_cast<W8x>(b);
  return reinterpret_cast<__m512i>((x & 0xffffffffu) * (y & 0xffffffffu));
}
EMULATED uint16_t movepi32_mask(__m512i a) {
  const U16x x = reinterpret_cast<U16x>(a);
  unsigned mask = 0;
  for (int k = 0; k < 16; ++k) mask |= x[k] >> 31 << k;
  return static_cast<uint16_t>(mask);
}
EMULATED __m512 permutexvar_ps(__m512i index, __m512 a) {
  const U16x places = reinterpret_cast<U16x>(index);
  F16x found;
  for (int k = 0; k < 16; ++k) found[k] = a[places[k] & 15];
  return found;
}
EMULATED __m512 loadu_ps(const void* p) {
  __m512 v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
EMULATED void stream_si512(void* p, __m512i a) { __builtin_memcpy(p, &a, sizeof a); }

#undef EMULATED

}  // namespace anychip_emulated_avx512

#undef _mm512_cvtps_ph
#undef _mm512_reduce_max_epi32
#define _mm512_cvtepi32_epi16 anychip_emulated_avx512::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 anychip_emulated_avx512::cvtepi32_epi8
#define _mm512_cvtepu16_epi32 anychip_emulated_avx512::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 anychip_emulated_avx512::cvtepu8_epi32
#define _mm512_cvtph_ps anychip_emulated_avx512::cvtph_ps
#define _mm512_cvtps_pd anychip_emulated_avx512::cvtps_pd
#define _mm512_cvtps_ph(a, nearest) anychip_emulated_avx512::round_to_half(a)
#define _mm512_fmadd_pd anychip_emulated_avx512::fmadd_pd
#define _mm512_fmadd_ps anychip_emulated_avx512::fmadd_ps
#define _mm512_loadu_ps anychip_emulated_avx512::loadu_ps
#define _mm512_max_epi32 anychip_emulated_avx512::max_epi32
#define _mm512_max_ps anychip_emulated_avx512::max_ps
#define _mm512_min_ps anychip_emulated_avx512::min_ps
#define _mm512_movepi32_mask anychip_emulated_avx512::movepi32_mask
#define _mm512_mul_epu32 anychip_emulated_avx512::mul_epu32
#define _mm512_permutexvar_ps anychip_emulated_avx512::permutexvar_ps
#define _mm512_reduce_max_epi32 anychip_emulated_avx512::reduce_max_epi32
#define _mm512_scalef_ps anychip_emulated_avx512::scalef_ps
#define _mm512_set1_epi32 anychip_emulated_avx512::set1_epi32
#define _mm512_sqrt_ps anychip_emulated_avx512::sqrt_ps
#define _mm512_stream_si512 anychip_emulated_avx512::stream_si512
