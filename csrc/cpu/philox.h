// Philox4x32-10, a counter-based random generator, one block at a time.
//
// The kernels have a vector form (kernels/philox.h); this one is for known answers.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include <array>
#include <cstdint>

namespace anychip::cpu {

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53;
constexpr uint32_t kPhiloxMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9;
constexpr uint32_t kPhiloxKeyStep1 = 0xBB67AE85;
constexpr int kPhiloxRounds = 10;

inline std::array<uint32_t, 4> philox_block(std::array<uint32_t, 4> counter,
                                            std::array<uint32_t, 2> key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kPhiloxKeyStep0;
    key[1] += kPhiloxKeyStep1;
  }
  return counter;
}

}  // namespace anychip::cpu
