// float4 and its relatives, with the alignment that CUDA gives them, and dim3.
// Source: CUDA C++ Programming Guide, "Built-in Vector Types".
#pragma once

#include <cstdint>

#define CUDA_EMULATOR_VECTOR(T, name, align1, align2, align4)        \
  struct alignas(align1) name##1 { T x; };                           \
  struct alignas(align2) name##2 { T x, y; };                        \
  struct name##3 { T x, y, z; };                                     \
  struct alignas(align4) name##4 { T x, y, z, w; };                  \
  inline name##1 make_##name##1(T x) { return {x}; }                 \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

CUDA_EMULATOR_VECTOR(signed char, char, 1, 2, 4)
CUDA_EMULATOR_VECTOR(unsigned char, uchar, 1, 2, 4)
CUDA_EMULATOR_VECTOR(short, short, 2, 4, 8)
CUDA_EMULATOR_VECTOR(unsigned short, ushort, 2, 4, 8)
CUDA_EMULATOR_VECTOR(int, int, 4, 8, 16)
CUDA_EMULATOR_VECTOR(unsigned, uint, 4, 8, 16)
CUDA_EMULATOR_VECTOR(float, float, 4, 8, 16)
CUDA_EMULATOR_VECTOR(long long, longlong, 8, 16, 16)
CUDA_EMULATOR_VECTOR(unsigned long long, ulonglong, 8, 16, 16)
CUDA_EMULATOR_VECTOR(double, double, 8, 16, 16)
#undef CUDA_EMULATOR_VECTOR

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
