// Eight rows of eight numbers, turned: for factors of products.
#pragma once

#include "vector.h"

namespace anychip::cpu::ANYCHIP_ISA {

// Eight numbers of each of eight rows, those from `rows` on as zeros, with rows for columns; rows
// of `width` are written one after the other, and the last ones of what is narrower than eight over
// again.
ANYCHIP_INLINE void transpose_eight(const float* from, int64_t stride, int64_t rows, float* to,
                                    int64_t width) {
#if defined(__AVX2__)
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[i] = i < rows ? _mm256_loadu_ps(from + i * stride) : _mm256_setzero_ps();
  }
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * width, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) _mm256_storeu_ps(to + (i + 4) * width, b[i]);
#else
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 8; ++i) {  // pairs of 16-bit numbers may lie between floats' places
      float number = 0.0f;
      if (i < rows) __builtin_memcpy(&number, from + i * stride + k, sizeof number);
      __builtin_memcpy(to + k * width + i, &number, sizeof number);
    }
  }
#endif
}

}  // namespace anychip::cpu::ANYCHIP_ISA
