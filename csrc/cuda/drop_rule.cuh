// Which elements dropout keeps, and what it makes of them; one Philox block serves four elements.
#pragma once

#include "dropout.h"
#include "philox.cuh"

namespace anychip::cuda {

inline bool is_valid(const Drop& drop) {
  return drop.rng != nullptr && drop.p >= 0.0 && drop.p <= 1.0;
}

// What the kernels take for p, worked out on the host once for all chips alike.
struct DropRule {
  const int64_t* rng;
  float scale;
  uint32_t threshold;
  bool drops_all;  // p = 1, whose threshold is no 32-bit number

  explicit DropRule(const Drop& drop)
      : rng(drop.rng),
        scale(drop.p < 1.0 ? static_cast<float>(1.0 / (1.0 - drop.p)) : 0.0f),
        threshold(drop.p < 1.0 ? static_cast<uint32_t>(drop.p * 4294967296.0) : 0u),
        drops_all(drop.p >= 1.0) {}

  __device__ __forceinline__ PhiloxStream begin() const { return read_stream(rng); }
  // Left out, not multiplied by 0: a dropped NaN is 0.
  __device__ __forceinline__ float dropped(uint32_t word, float value) const {
    return !drops_all && word >= threshold ? value * scale : 0.0f;
  }
  // values[i] of element first + i, dropped or scaled. first is a multiple of 4 unless N is 1.
  template <int N>
  __device__ __forceinline__ void apply(const PhiloxStream& stream, int64_t first,
                                        float (&values)[N]) const {
    constexpr int kWords = N < 4 ? N : 4;
#pragma unroll
    for (int group = 0; group < N / kWords; ++group) {
      const uint4 block = philox_block(stream, static_cast<uint64_t>(first) / 4 + group);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const uint32_t word = word_of(block, N < 4 ? static_cast<int>(first % 4) : i);
        float& value = values[group * kWords + i];
        value = dropped(word, value);
      }
    }
  }
};

}  // namespace anychip::cuda
