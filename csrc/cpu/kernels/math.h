// exp and the functions made of it, on 16 lanes.
//
// The error bounds are measured against float64 over all float32 arguments of the range
// (tests/native/test_math.cpp repeats that on a sample). NaN gives NaN.
#pragma once

#include "vector.h"

namespace anychip::cpu::ANYCHIP_ISA {

// x * 2^n, rounded once.
ANYCHIP_INLINE F32 times_power(F32 x, F32 n, F32 shifted) {
#if defined(__AVX512F__)
  static_cast<void>(shifted);
  return _mm512_scalef_ps(x, n);
#else
  static_cast<void>(n);
  return x * float_of(bits_of(shifted) << 23) * 0x1p-64f;
#endif
}

// exp(x) = (fraction + 1) 2^n, with n = round(x / ln 2) also as `shifted`, for times_power.
struct Powers {
  F32 fraction, n, shifted;
};

// ((first * x + second) * x + third) ..., each step rounded once.
template <class... Floats>
ANYCHIP_INLINE F32 polynomial(F32 x, float first, Floats... rest) {
  F32 sum = fill<F32>(first);
  ((sum = fused(sum, x, fill<F32>(rest))), ...);
  return sum;
}

// Of exp(high + low) for sums in [-104, 40], where low is a correction that is small against high.
//
// A polynomial for exp(x - n ln 2) on [-ln 2 / 2, ln 2 / 2] (minimax for (e^r - 1 - r) / r^2,
// relative error 2^-28). ln 2 is split (Cody and Waite): n * 0.693359375 is exact. Without an
// instruction for it 2^n is applied as 2^(n + 64), a normal number, and 2^-64, so that subnormal
// results are reached.
template <bool kHasLow>
ANYCHIP_INLINE Powers powers_of(F32 high, F32 low) {
  // Adding this rounds to an integer and leaves n + 64 + 127, the exponent field, in the low bits.
  constexpr float kShift = 0x1.8p23f + 191.0f;
  const F32 sum = kHasLow ? high + low : high;
  const F32 shifted = fused(sum, fill<F32>(1.44269504f), fill<F32>(kShift));
  const F32 n = shifted - kShift, small = fill<F32>(2.12194440e-4f);
  const F32 most = fused(n, fill<F32>(-0.693359375f), high);
  const F32 r = kHasLow ? most + fused(n, small, low) : fused(n, small, most);
  const F32 p =
      polynomial(r, 0.00138142219f, 0.00836889866f, 0.0416684057f, 0.166665191f, 0.499999933f);
  return {fused(p, r * r, r), n, shifted};
}
template <bool kHasLow>
ANYCHIP_INLINE F32 exp_of_parts(F32 high, F32 low) {
  const Powers found = powers_of<kHasLow>(high, low);
  return times_power(found.fraction + 1.0f, found.n, found.shifted);
}

// exp(x) for x <= 40; error 1.0 ulp (a subnormal result: 1.5 of its ulp); 0 below -104.
ANYCHIP_INLINE F32 exp(F32 x) { return exp_of_parts<false>(maximum(fill<F32>(-104.0f), x), F32{}); }

// The logistic function and its complement, each with a small relative error:
// value = 1 / (1 + exp(-x)), complement = 1 - value = 1 / (1 + exp(x)); error 2.9 ulp. Their
// product needs no choice between them.
struct Sigmoid {
  F32 value, complement, product;
};
ANYCHIP_INLINE Sigmoid sigmoid(F32 x) {
  const F32 e = exp(float_of(bits_of(x) | 0x80000000u));  // of -|x|
  const F32 large = 1.0f / (1.0f + e);
  const F32 small = e * large;
  const Mask positive = x > 0.0f;
  return {select(positive, large, small), select(positive, small, large), small * large};
}
// The derivative alone, which is the product. Error 3.6 ulp.
ANYCHIP_INLINE F32 sigmoid_slope(F32 x) {
  const F32 e = exp(float_of(bits_of(x) | 0x80000000u)), sum = 1.0f + e;
  return e / (sum * sum);
}

// m = exp(-2 |x|) - 1 without a cancellation, and -m / (2 + m). Error 2.5 ulp.
ANYCHIP_INLINE F32 tanh(F32 x) {
  const F32 a = minimum(fill<F32>(10.0f), abs(x));  // beyond, tanh is 1
  const Powers found = powers_of<false>(-2.0f * a, F32{});
  const F32 power = times_power(fill<F32>(1.0f), found.n, found.shifted);
  const F32 m = fused(found.fraction, power, power - 1.0f);
  const F32 size = (0.0f - m) / (2.0f + m);
  return float_of(bits_of(size) | (bits_of(x) & 0x80000000u));
}

// log(1 + x) for x in [0, 1], as 2 atanh(s) with s = x / (2 + x) (minimax for (atanh(s) / s - 1) /
// s^2, relative error 2^-27). Error 2 ulp.
ANYCHIP_INLINE F32 log_one_plus(F32 x) {
  const F32 s = x / (x + 2.0f), square = s * s;
  const F32 p = polynomial(square, 0.140873283f, 0.139901266f, 0.200108632f, 0.333332241f);
  const F32 twice = s + s;
  return fused(twice, square * p, twice);
}

// The standard normal distribution: cdf(x) = (1 + erf(x / sqrt 2)) / 2, pdf(x) = exp(-x^2 / 2) /
// sqrt(2 pi).
struct Normal {
  F32 cdf, pdf;
};

// With a = |x|: cdf(-a) = exp(-a^2 / 2) * erfcx(a / sqrt 2) / 2, where the second factor times a +
// 3 is a polynomial in t = (a - 3) / (a + 3) (minimax on [0, 14.6], relative error 2^-24). So the
// small values on the left have a small relative error too, which 1 + erf has not. a^2 is taken in
// two parts, the first exact. Errors: cdf 6 ulp, pdf 2.1 ulp.
ANYCHIP_INLINE Normal normal(F32 x) {
  const F32 a = minimum(fill<F32>(14.42f), abs(x));  // beyond, exp(-a^2 / 2) is 0
  const F32 inverse = 1.0f / (a + 3.0f);
  const F32 t = (a - 3.0f) * inverse;
  const F32 tail = polynomial(t, -2.62244983e-04f, -8.96687619e-04f, 1.07444695e-03f,
                              6.91923220e-03f, -1.04801115e-02f, -4.72551212e-02f, 2.30019405e-01f,
                              -5.09332359e-01f, 7.29083657e-01f);

  const F32 head = float_of(bits_of(a) & 0xfffff000u);
  const F32 e = exp_of_parts<true>(-0.5f * (head * head), -0.5f * ((a - head) * (a + head)));
  const F32 left = e * (tail * inverse);
  return {select(x > 0.0f, 1.0f - left, left), e * 0.398942280f};
}

}  // namespace anychip::cpu::ANYCHIP_ISA
