// AVX-512's instructions as the kernels use them, for a processor that has none: lane by lane, as
// Intel's Intrinsics Guide writes them. Included before all else where ANYCHIP_AVX512_EMULATOR
// names this file, so that the kernels of that level run, with the bits that they must have,
// wherever those of AVX2 do. An instruction that is not here is an error of the compiler.
#pragma once

#include <immintrin.h>

#include <cstdint>

#define __AVX512F__ 1

// The kernels' own namespace: its functions come before the compiler's of the same names.
namespace anychip::cpu::ANYCHIP_ISA {

typedef int32_t I32Lanes __attribute__((vector_size(64)));
typedef uint32_t U32Lanes __attribute__((vector_size(64)));
typedef uint64_t U64Lanes __attribute__((vector_size(64)));
typedef uint16_t U16Lanes __attribute__((vector_size(32)));
typedef uint8_t U8Lanes __attribute__((vector_size(16)));

#undef _mm512_cvtps_ph  // macros of a compiler that does not optimize
#define EMULATED [[gnu::always_inline]] static inline
// A function whose result has the lanes `lane`, each made from the parameters and its number k.
#define EMULATED_LANES(Result, Lanes, name, parameters, lane)                        \
  EMULATED Result name parameters {                                                  \
    Lanes found;                                                                     \
    for (unsigned k = 0; k < sizeof found / sizeof found[0]; ++k) found[k] = (lane); \
    return (Result)found;                                                            \
  }

EMULATED_LANES(__m512, __m512, _mm512_fmadd_ps, (__m512 a, __m512 b, __m512 c),
               __builtin_fmaf(a[k], b[k], c[k]))
EMULATED_LANES(__m512d, __m512d, _mm512_fmadd_pd, (__m512d a, __m512d b, __m512d c),
               __builtin_fma(a[k], b[k], c[k]))
EMULATED_LANES(__m512, __m512, _mm512_sqrt_ps, (__m512 a), __builtin_sqrtf(a[k]))
// The second operand where one is NaN, or both are 0.
EMULATED_LANES(__m512, __m512, _mm512_max_ps, (__m512 a, __m512 b), a[k] > b[k] ? a[k] : b[k])
EMULATED_LANES(__m512, __m512, _mm512_min_ps, (__m512 a, __m512 b), a[k] < b[k] ? a[k] : b[k])

// a * 2^floor(b), rounded once: float64 has room for the product.
EMULATED float times_power_of(float a, double b) {
  const double n = __builtin_floor(b), limited = n > 600.0 ? 600.0 : n > -600.0 ? n : -600.0;
  const int64_t bits = (static_cast<int64_t>(limited) + 1023) << 52;
  double power;
  __builtin_memcpy(&power, &bits, sizeof power);
  return static_cast<float>(n != n ? b : static_cast<double>(a) * power);
}
EMULATED_LANES(__m512, __m512, _mm512_scalef_ps, (__m512 a, __m512 b), times_power_of(a[k], b[k]))

EMULATED_LANES(__m512, __m512, _mm512_cvtph_ps, (__m256i a), _cvtsh_ss(((U16Lanes)a)[k]))
EMULATED_LANES(__m256i, U16Lanes, _mm512_cvtps_ph, (__m512 a, int), _cvtss_sh(a[k], 0))
EMULATED_LANES(__m512d, __m512d, _mm512_cvtps_pd, (__m256 a), static_cast<double>(a[k]))
EMULATED_LANES(__m512i, U32Lanes, _mm512_cvtepu16_epi32, (__m256i a), ((U16Lanes)a)[k])
EMULATED_LANES(__m512i, U32Lanes, _mm512_cvtepu8_epi32, (__m128i a), ((U8Lanes)a)[k])
EMULATED_LANES(__m256i, U16Lanes, _mm512_cvtepi32_epi16, (__m512i a), ((U32Lanes)a)[k] & 0xffffu)
EMULATED_LANES(__m128i, U8Lanes, _mm512_cvtepi32_epi8, (__m512i a), ((U32Lanes)a)[k] & 0xffu)

EMULATED_LANES(__m512i, I32Lanes, _mm512_set1_epi32, (int a), a)
EMULATED_LANES(__m512i, I32Lanes, _mm512_max_epi32, (__m512i a, __m512i b),
               ((I32Lanes)a)[k] > ((I32Lanes)b)[k] ? ((I32Lanes)a)[k] : ((I32Lanes)b)[k])
EMULATED_LANES(__m512i, U64Lanes, _mm512_mul_epu32, (__m512i a, __m512i b),
               (((U64Lanes)a)[k] & 0xffffffffu) * (((U64Lanes)b)[k] & 0xffffffffu))
EMULATED_LANES(__m512, __m512, _mm512_permutexvar_ps, (__m512i index, __m512 a),
               a[((U32Lanes)index)[k] & 15u])
EMULATED_LANES(__m512, __m512, _mm512_loadu_ps, (const float* p), p[k])
// By a mask, of what lies in memory only the lanes with a bit are touched.
EMULATED_LANES(__m512, __m512, _mm512_maskz_loadu_ps, (uint16_t mask, const float* p),
               mask >> k & 1u ? p[k] : 0.0f)
EMULATED_LANES(__m256i, U16Lanes, _mm256_maskz_loadu_epi16, (uint16_t mask, const void* p),
               mask >> k & 1u ? static_cast<const uint16_t*>(p)[k] : 0u)
EMULATED void _mm512_mask_storeu_ps(float* p, uint16_t mask, __m512 a) {
  for (unsigned k = 0; k < 16; ++k) {
    if (mask >> k & 1u) p[k] = a[k];
  }
}
EMULATED void _mm256_mask_storeu_epi16(void* p, uint16_t mask, __m256i a) {
  for (unsigned k = 0; k < 16; ++k) {
    if (mask >> k & 1u) static_cast<uint16_t*>(p)[k] = ((U16Lanes)a)[k];
  }
}
EMULATED void _mm512_stream_si512(void* p, __m512i a) { __builtin_memcpy(p, &a, sizeof a); }
EMULATED int _mm512_reduce_max_epi32(__m512i a) {
  int largest = INT32_MIN;
  for (int k = 0; k < 16; ++k) largest = ((I32Lanes)a)[k] > largest ? ((I32Lanes)a)[k] : largest;
  return largest;
}
EMULATED uint16_t _mm512_movepi32_mask(__m512i a) {
  unsigned mask = 0;
  for (int k = 0; k < 16; ++k) mask |= ((U32Lanes)a)[k] >> 31 << k;
  return static_cast<uint16_t>(mask);
}

#undef EMULATED_LANES
#undef EMULATED

}  // namespace anychip::cpu::ANYCHIP_ISA
