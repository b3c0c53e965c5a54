// Philox4x32-10: the random stream that is the same on every chip.
//
// Word i % 4 of block (offset + i / 4) belongs to logical element i of a tensor.
// Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
#pragma once

#include "runtime.cuh"

namespace anychip::cuda {

// (seed, offset) as they lie on the device: an int64[2] tensor.
struct PhiloxStream {
  uint64_t seed;
  uint64_t offset;
};

__device__ __forceinline__ PhiloxStream read_stream(const int64_t* rng) {
  return {static_cast<uint64_t>(rng[0]), static_cast<uint64_t>(rng[1])};
}

// The four words of block `number` of the stream; 64-bit counters, the upper 64 bits are 0.
__device__ __forceinline__ uint4 philox_block(const PhiloxStream& stream, uint64_t number) {
  const uint64_t position = stream.offset + number;
  uint4 counter =
      make_uint4(static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0u, 0u);
  uint32_t key0 = static_cast<uint32_t>(stream.seed);
  uint32_t key1 = static_cast<uint32_t>(stream.seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = __umulhi(0xD2511F53u, counter.x);
    const uint32_t low0 = 0xD2511F53u * counter.x;
    const uint32_t high1 = __umulhi(0xCD9E8D57u, counter.z);
    const uint32_t low1 = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high1 ^ counter.y ^ key0, low1, high0 ^ counter.w ^ key1, low0);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// Word `index` of a block, for code that has one element at a time.
__device__ __forceinline__ uint32_t word_of(const uint4& block, int index) {
  return index == 0 ? block.x : index == 1 ? block.y : index == 2 ? block.z : block.w;
}

}  // namespace anychip::cuda
