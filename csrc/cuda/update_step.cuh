// What kernels of update rules have in common: the factors of a step, averages, and AdamW.
//
// Note [Same bits everywhere]: every product that meets a sum is an explicit fmaf, so that vectors,
// heads, tails and the two compilers round alike: a shard is updated like the whole, bit for bit.
#pragma once

#include "updates.h"
#include "vector.cuh"

namespace anychip::cuda {

struct alignas(16) StepFactors {
  float is_skipped;  // not 0: nothing may be written
  float gradient;    // clip / scale
  float lr;
  float decay;               // 1 - lr weight_decay
  float inverse_correction;  // 1 / (1 - beta1^t)
  float corrected_lr;        // lr / (1 - beta1^t)
  float inverse_root;        // 1 / sqrt(1 - beta2^t)
  float unused;
};
static_assert(sizeof(StepFactors) == kStepFactors * sizeof(float), "as the row allocates it");

// What an average becomes with one value more; rest is 1 - beta.
__device__ __forceinline__ float averaged(float old, float beta, float rest, float value) {
  return fmaf(old, beta, value * rest);
}

struct Betas {
  float beta1, rest1, beta2, rest2;
};

// A rule: rule(factors, rate, p, g, s) moves one element. g has no loss scale any more and is
// clipped; rate is the learning rate of the tensor. Loshchilov and Hutter 2019, algorithm 2.
struct AdamW {
  static constexpr int kStates = 2, kBlocks = 4;
  Betas b;
  float eps;

  __device__ __forceinline__ void operator()(const StepFactors& f, float, float& p, float g,
                                             float (&s)[kStates]) const {
    s[0] = averaged(s[0], b.beta1, b.rest1, g);
    s[1] = averaged(s[1], b.beta2, b.rest2, g * g);
    const float step = (s[0] * f.corrected_lr) / fmaf(sqrtf(s[1]), f.inverse_root, eps);
    p = fmaf(p, f.decay, -step);
  }
};

inline float rounded_once(double value) { return static_cast<float>(value); }

inline Betas betas_of(double beta1, double beta2) {
  return {rounded_once(beta1), rounded_once(1.0 - beta1), rounded_once(beta2),
          rounded_once(1.0 - beta2)};
}

}  // namespace anychip::cuda
