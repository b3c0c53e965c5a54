// Philox4x32-10 on 16 blocks at once: 64 words in the order of their elements.
#pragma once

#include "../philox.h"
#include "vector.h"

namespace anychip::cpu::ANYCHIP_ISA {

// The upper and lower halves of 32 x 32 bit products.
template <class V>
struct Product {
  V high, low;
};

typedef uint64_t RegisterW __attribute__((vector_size(4 * kRegisterLanes)));

// Products of the lanes 0, 2, 4, ..., each as one 64 bit lane.
ANYCHIP_INLINE RegisterW multiply_even(RegisterW a, uint32_t factor) {
#if defined(__AVX512F__)
  return (RegisterW)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32(static_cast<int>(factor)));
#elif defined(__AVX2__)
  return (RegisterW)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32(static_cast<int>(factor)));
#elif defined(__SSE2__)
  return (RegisterW)_mm_mul_epu32((__m128i)a, _mm_set1_epi32(static_cast<int>(factor)));
#else
  return (a & 0xffffffffu) * uint64_t{factor};
#endif
}

ANYCHIP_INLINE Product<RegisterU> multiply(RegisterU a, uint32_t factor) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "lane 0 is the lower half");
  const RegisterW even = multiply_even((RegisterW)a, factor);
  const RegisterW odd = multiply_even((RegisterW)a >> 32, factor);
  return {(RegisterU)((even >> 32) | (odd & 0xffffffff00000000u)),
          (RegisterU)((even & 0xffffffffu) | (odd << 32))};
}
template <class H>
ANYCHIP_INLINE Product<Pair<H>> multiply(Pair<H> a, uint32_t factor) {
  const Product<H> low = multiply(a.low, factor);
  const Product<H> high = multiply(a.high, factor);
  return {{low.high, high.high}, {low.low, high.low}};
}

// Transposes the 4 x 4 matrices formed by each group of four lanes of four vectors.
struct InterleaveLow {
  static constexpr int source(int k) { return k / 4 * 4 + k % 4 / 2 + k % 2 * kRegisterLanes; }
};
struct InterleaveHigh {
  static constexpr int source(int k) { return InterleaveLow::source(k) + 2; }
};
struct JoinLow {
  static constexpr int source(int k) { return k % 4 < 2 ? k : k - 2 + kRegisterLanes; }
};
struct JoinHigh {
  static constexpr int source(int k) { return k % 4 < 2 ? k + 2 : k + kRegisterLanes; }
};
ANYCHIP_INLINE void transpose_groups(RegisterU& a, RegisterU& b, RegisterU& c, RegisterU& d) {
  const RegisterU ab_low = shuffle<InterleaveLow>(a, b);
  const RegisterU ab_high = shuffle<InterleaveHigh>(a, b);
  const RegisterU cd_low = shuffle<InterleaveLow>(c, d);
  const RegisterU cd_high = shuffle<InterleaveHigh>(c, d);
  a = shuffle<JoinLow>(ab_low, cd_low);
  b = shuffle<JoinHigh>(ab_low, cd_low);
  c = shuffle<JoinLow>(ab_high, cd_high);
  d = shuffle<JoinHigh>(ab_high, cd_high);
}
template <class H>
ANYCHIP_INLINE void transpose_groups(Pair<H>& a, Pair<H>& b, Pair<H>& c, Pair<H>& d) {
  transpose_groups(a.low, b.low, c.low, d.low);
  transpose_groups(a.high, b.high, c.high, d.high);
}

// Which block of the 16 each lane computes: lane 4 m + n does block 4 n + m, so that transposing
// groups of four puts all words in order without moving anything across groups.
ANYCHIP_INLINE void block_of_lane(RegisterU& block, uint32_t first) {
  for (uint32_t k = 0; k < kRegisterLanes; ++k) block[k] = (first + k) % 4 * 4 + (first + k) / 4;
}
template <class H>
ANYCHIP_INLINE void block_of_lane(Pair<H>& block, uint32_t first) {
  block_of_lane(block.low, first);
  block_of_lane(block.high, first + sizeof(H) / 4);
}

// words[j] lane k = word (16 j + k) of the stream that starts at block `counter`.
ANYCHIP_INLINE void philox_words(uint64_t key, uint64_t counter, U32 words[4]) {
  U32 block;
  block_of_lane(block, 0);
  const uint32_t first = static_cast<uint32_t>(counter);
  U32 c0 = block + first;
  U32 c1 = fill<U32>(static_cast<uint32_t>(counter >> 32));
  c1 = select(c0 < first, c1 + 1u, c1);
  U32 c2{}, c3{};
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Product<U32> product0 = multiply(c0, kPhiloxMultiplier0);
    const Product<U32> product1 = multiply(c2, kPhiloxMultiplier1);
    c0 = product1.high ^ c1 ^ key0;
    c1 = product1.low;
    c2 = product0.high ^ c3 ^ key1;
    c3 = product0.low;
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  transpose_groups(c0, c1, c2, c3);
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

}  // namespace anychip::cpu::ANYCHIP_ISA
