// The emulator's conversions and 16-bit arithmetic over arrays, for Python. 16-bit numbers are
// their bits.
#include "cuda_emulator.h"

#define EXPORT extern "C" __attribute__((visibility("default"))) void

EXPORT half_to_float(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = __half2float(__ushort_as_half(from[i]));
}
EXPORT bfloat16_to_float(const uint16_t* from, float* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = __bfloat162float(__ushort_as_bfloat16(from[i]));
}
EXPORT float_to_half(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = __half_as_ushort(__float2half_rn(from[i]));
}
EXPORT float_to_bfloat16(const float* from, uint16_t* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = __bfloat16_as_ushort(__float2bfloat16_rn(from[i]));
}

// to[0][i] = a + b, to[1][i] = a * b, to[2][i] = a * b + c, each rounded once.
EXPORT half_arithmetic(const uint16_t* a, const uint16_t* b, const uint16_t* c, uint16_t* to,
                       int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const __half x = __ushort_as_half(a[i]), y = __ushort_as_half(b[i]), z = __ushort_as_half(c[i]);
    to[i] = __half_as_ushort(x + y);
    to[count + i] = __half_as_ushort(__hmul(x, y));
    to[2 * count + i] = __half_as_ushort(__hfma(x, y, z));
  }
}
EXPORT bfloat16_arithmetic(const uint16_t* a, const uint16_t* b, const uint16_t* c, uint16_t* to,
                           int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const __nv_bfloat16 x = __ushort_as_bfloat16(a[i]), y = __ushort_as_bfloat16(b[i]),
                        z = __ushort_as_bfloat16(c[i]);
    to[i] = __bfloat16_as_ushort(x + y);
    to[count + i] = __bfloat16_as_ushort(__hmul(x, y));
    to[2 * count + i] = __bfloat16_as_ushort(__hfma(x, y, z));
  }
}
