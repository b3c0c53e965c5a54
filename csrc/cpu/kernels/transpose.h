// Matrices whose columns become rows: factors of products, and channels that become innermost.
#pragma once

#include "../kernel_table.h"
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

// A row of numbers of four bytes, or one or two rows of two bytes in pairs.
ANYCHIP_INLINE void read_row(const float* from, int64_t, int64_t, int64_t count, uint32_t* to) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}
template <class T>
ANYCHIP_INLINE void read_row(const T* from, int64_t stride, int64_t rows, int64_t count,
                             uint32_t* to) {
  static_assert(sizeof(T) == 2);
  if (rows > 1) {
    for (int64_t i = 0; i < count; ++i) {
      to[i] = from[i].bits | static_cast<uint32_t>(from[stride + i].bits) << 16;
    }
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i].bits;
  }
}

// to[j * width + i] = from[i * stride + j], of up to kTurnedColumns columns j.
template <class T>
ANYCHIP_INLINE void turn_columns(const T* from, int64_t stride, int64_t rows, int64_t columns,
                                 T* to, int64_t width) {
  constexpr int64_t kOfOne = 4 / sizeof(T), kRows = 8 * kOfOne;
  uint32_t read[8][kTurnedColumns] = {};
  for (int64_t row = 0; row < rows; row += kRows) {
    const int64_t rest = rows - row, count = rest < kRows ? rest : kRows;
    for (int64_t i = 0; i < count; i += kOfOne) {
      read_row(from + (row + i) * stride, stride, count - i, columns, read[i / kOfOne]);
    }
    for (int64_t column = 0; column < columns; column += 8) {
      float eight[8 * 8];
      transpose_eight(reinterpret_cast<const float*>(read[0]) + column, kTurnedColumns, 8, eight,
                      8);
      for (int64_t j = 0; j < 8 && column + j < columns; ++j) {
        T* at = to + (column + j) * width + row;
        if (count == kRows) {
          __builtin_memcpy(at, eight + 8 * j, kRows * sizeof(T));
        } else {
          __builtin_memcpy(at, eight + 8 * j, static_cast<size_t>(count) * sizeof(T));
        }
      }
    }
  }
}

}  // namespace anychip::cpu::ANYCHIP_ISA
