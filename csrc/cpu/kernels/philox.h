// Philox4x32-10 on 16 blocks at once, and a window of a stream's words in the order of elements.
#pragma once

#include "../philox.h"
#include "vector.h"

namespace anychip::cpu::ANYCHIP_ISA {

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

// Pairs of lanes of 64 bits, the even ones of a and b, and the odd ones.
struct EvenPairs {
  static constexpr int source(int k) { return k / 4 * 4 + k % 2 + k % 4 / 2 * kRegisterLanes; }
};
struct OddPairs {
  static constexpr int source(int k) { return EvenPairs::source(k) + 2; }
};

constexpr int kWideLanes = kRegisterLanes / 2, kWordsTogether = 4 * kLanes;
constexpr int kRegistersOfBlocks = kLanes / kWideLanes;

// A register has one block per lane of 64 bits, and registers r come out as the words of blocks
// r * kWideLanes and so on: even lanes have the first half of these, odd lanes the second.
ANYCHIP_INLINE RegisterW block_of_lane(int r) {
  RegisterW block;
  for (int k = 0; k < kWideLanes; ++k) {
    block[k] = static_cast<uint64_t>(r * kWideLanes + k / 2 + k % 2 * (kWideLanes / 2));
  }
  return block;
}

// The 64 words of the 16 blocks from `counter` on. Of every lane of 64 bits the upper half may hold
// anything on the way: only lower halves are multiplied, and the upper ones are dropped at the end.
ANYCHIP_INLINE void philox_words(uint64_t key, uint64_t counter, uint32_t* words) {
  RegisterW c0[kRegistersOfBlocks], c1[kRegistersOfBlocks], c2[kRegistersOfBlocks],
      c3[kRegistersOfBlocks];
  for (int r = 0; r < kRegistersOfBlocks; ++r) {
    c0[r] = block_of_lane(r) + counter;
    c1[r] = c0[r] >> 32;
    c2[r] = c3[r] = RegisterW{};
  }
  uint32_t key0 = static_cast<uint32_t>(key), key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int r = 0; r < kRegistersOfBlocks; ++r) {
      const RegisterW product0 = multiply_even(c0[r], kPhiloxMultiplier0);
      const RegisterW product1 = multiply_even(c2[r], kPhiloxMultiplier1);
      c0[r] = (product1 >> 32) ^ c1[r] ^ key0;
      c1[r] = product1;
      c2[r] = (product0 >> 32) ^ c3[r] ^ key1;
      c3[r] = product0;
    }
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  for (int r = 0; r < kRegistersOfBlocks; ++r) {
    const auto joined = [](RegisterW low, RegisterW high) {
      return reinterpret_cast<RegisterU>((low & 0xffffffffu) | (high << 32));
    };
    const RegisterU first = joined(c0[r], c1[r]), second = joined(c2[r], c3[r]);
    write(words + 2 * r * kRegisterLanes, shuffle<EvenPairs>(first, second));
    write(words + (2 * r + 1) * kRegisterLanes, shuffle<OddPairs>(first, second));
  }
}

// A window of the words of a stream. It is generated when what is asked for is not in it.
class Words {
 public:
  static constexpr int64_t kMost = 1024;

  ANYCHIP_INLINE explicit Words(const int64_t* rng)
      : seed_(rng ? static_cast<uint64_t>(rng[0]) : 0),
        offset_(rng ? static_cast<uint64_t>(rng[1]) : 0) {}

  // Words `first`, which may be negative, and so on: n of them, at most kMost, and as many as fit
  // of those up to `ahead`, which may be asked for next. A whole vector can be read at the last.
  ANYCHIP_INLINE const uint32_t* from(int64_t first, int64_t n, int64_t ahead) {
    const uint64_t place = static_cast<uint64_t>(first) - static_cast<uint64_t>(begin_);
    if (place < kRoom && static_cast<int64_t>(place) + n <= count_) return words_ + place;
    begin_ = first & -4;
    const int64_t skipped = first - begin_, wanted = skipped + (ahead > n ? ahead : n);
    for (count_ = 0; count_ < wanted && count_ < kRoom; count_ += kWordsTogether) {
      const int64_t block = (begin_ >> 2) + count_ / 4;
      philox_words(seed_, offset_ + static_cast<uint64_t>(block), words_ + count_);
    }
    return words_ + skipped;
  }

 private:
  static constexpr int64_t kRoom = kMost + kWordsTogether;
  uint64_t seed_, offset_;
  int64_t begin_ = 0, count_ = 0;
  alignas(64) uint32_t words_[kRoom + kLanes];
};

}  // namespace anychip::cpu::ANYCHIP_ISA
