// gelu, the logistic function, and their slopes, for float32 values.
//
// Note: What an element may cost
//   In 16-bit types an H200 streams an element in and out in the time of 28 instructions, and the
//   library's erfcf takes more than that alone. So both are made of one exp and one reciprocal.
//   Errors are relative to the result: sigmoid 4 ulp; the normal distribution a few ulp near 0, and
//   x^2 / 2 * 2^-23 far out, where exp magnifies the rounding of x^2. 1 + erf would lose all digits
//   there.
#pragma once

#include "runtime.cuh"

namespace anychip::cuda {

// 1 / a for positive a up to 2^126; 2 ulp.
__device__ __forceinline__ float reciprocal(float a) { return __fdividef(1.0f, a); }

// The logistic function and its complement, each with a small relative error. NaN gives NaN.
struct Sigmoid {
  float value, complement;
  __device__ __forceinline__ explicit Sigmoid(float x) {
    const float e = expf(-fabsf(x));
    const float large = reciprocal(1.0f + e);
    const float small = e * large;
    value = x > 0.0f ? large : small;
    complement = x > 0.0f ? small : large;
  }
};

// The standard normal distribution left of -|x|, and its density. With a = |x|: the tail is
// exp(-a^2 / 2) erfcx(a / sqrt 2) / 2, where the second factor times a + 3 is a polynomial in
// t = (a - 3) / (a + 3) (minimax on [0, 14.6], relative error 2^-24). NaN counts as 14.42.
struct Normal {
  float tail, density;
  __device__ __forceinline__ explicit Normal(float x) {
    const float a = fminf(fabsf(x), 14.42f);  // beyond, exp(-a^2 / 2) is 0
    const float inverse = reciprocal(a + 3.0f);
    const float t = (a - 3.0f) * inverse;
    float p = -2.62244983e-04f * t - 8.96687619e-04f;
    p = p * t + 1.07444695e-03f;
    p = p * t + 6.91923220e-03f;
    p = p * t - 1.04801115e-02f;
    p = p * t - 4.72551212e-02f;
    p = p * t + 2.30019405e-01f;
    p = p * t - 5.09332359e-01f;
    p = p * t + 7.29083657e-01f;
    const float e = exp2f(a * a * (-0.5f * 1.44269504f));
    tail = e * (p * inverse);
    density = e * 0.398942280f;
  }
};

// tanh form: x / 2 (1 + tanh(u)) = x sigmoid(2 u), 2 u = x (kGeluLinear + kGeluCubic x^2).
constexpr float kGeluLinear = 1.59576912f;   // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.0713548162f;  // 0.044715 * kGeluLinear

// Beyond 30 both slopes are constant in float32; the limit keeps 0 * infinity out of them.
__device__ __forceinline__ float limited(float x) {
  return x < -30.0f ? -30.0f : x > 30.0f ? 30.0f : x;
}

__device__ __forceinline__ float gelu_of(float x, bool tanh) {
  if (tanh) {
    const float near = limited(x);
    return x * Sigmoid(near * (kGeluLinear + kGeluCubic * (near * near))).value;
  }
  // x cdf(x) is max(x, 0) - |x| tail; NaN is not less than 0. Infinity takes the tail's limit.
  const float positive = x < 0.0f ? 0.0f : x;
  return positive - fminf(fabsf(x), 14.42f) * Normal(x).tail;
}

__device__ __forceinline__ float gelu_slope(float unlimited, bool tanh) {
  const float x = limited(unlimited);
  if (tanh) {
    const float square = x * x;
    const Sigmoid s(x * (kGeluLinear + kGeluCubic * square));
    return s.value + s.value * s.complement * (x * (kGeluLinear + 3.0f * kGeluCubic * square));
  }
  const Normal normal(x);
  return (x > 0.0f ? 1.0f - normal.tail : normal.tail) + x * normal.density;
}

}  // namespace anychip::cuda
