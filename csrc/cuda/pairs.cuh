// Sums in pairs: first half plus second half, until one is left. The order that gives the bits of
// anychip.operators.partials on every chip.
//
// Note [Zeros above]: zeros appended to a sequence of numbers that are not negative change no bit
// of its sum, as x + 0 = x. So a sequence of any length up to 1,024 is summed as one of 1,024, and
// a longer one as 1,024 interleaved ones, of which each comes first.
#pragma once

#include "reduce.cuh"

namespace anychip::cuda {

// What a warp sums at once: eight times the four values of each lane.
constexpr int kPairs = 1024;
constexpr int kPairVectors = 8;

template <int kSums>
__device__ __forceinline__ void add_to(float (&sums)[kSums][4], const float (&more)[kSums][4]) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int k = 0; k < 4; ++k) sums[s][k] += more[s][k];
  }
}

// Sums of kSums sequences of kPairs values; every lane gets them. load(first, values) gives the
// values from `first` to first + 4. Lane l loads those from 128 j + 4 l on, for j from 0 to 7: the
// partners at distances 512, 256 and 128 are its own, those at 64 to 4 are other lanes'.
template <int kSums, class Load>
__device__ __forceinline__ void warp_sum_in_pairs(const Load& load, float (&sums)[kSums]) {
  const int lane = threadIdx.x % kWarp;
  float total[2][kSums][4];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float part[4][kSums][4];
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      load((j + 2 * quarter) * 128 + 4 * lane, part[quarter]);
    }
    add_to(part[0], part[2]);
    add_to(part[1], part[3]);
    add_to(part[0], part[1]);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int k = 0; k < 4; ++k) total[j][s][k] = part[0][s][k];
    }
  }
  add_to(total[0], total[1]);
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
    float (&four)[4] = total[0][s];
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int k = 0; k < 4; ++k) four[k] += __shfl_xor_sync(kAllLanes, four[k], distance);
    }
    sums[s] = (four[0] + four[2]) + (four[1] + four[3]);
  }
}

// Sums of kSums sequences of `count` values each, a power of two from 4 to 4 * 2^kLevels;
// load(j, values) gives value j of every sequence.
//
// Note [Reversed bits]: with the bits of the index reversed, partners follow each other, so that
// sums wait in registers, one per level, as carries do in a binary counter.
template <int kSums, int kLevels, class Load>
__device__ __forceinline__ void thread_sum_in_pairs(int count, const Load& load,
                                                    float (&sums)[kSums]) {
  float waiting[kLevels][kSums];
  int first = 0;
  for (int group = 0; group < count / 4; ++group) {
    float values[4][kSums];
#pragma unroll
    for (int k = 0; k < 4; ++k) load(first + k * (count / 4), values[k]);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      sums[s] = (values[0][s] + values[2][s]) + (values[1][s] + values[3][s]);
    }
#pragma unroll
    for (int level = 0; level < kLevels; ++level) {
      const bool is_second = (group >> level) & 1;
#pragma unroll
      for (int s = 0; s < kSums; ++s) {
        if (is_second) {
          sums[s] = waiting[level][s] + sums[s];
        } else {
          waiting[level][s] = sums[s];
        }
      }
      if (!is_second) break;
    }
    // The next number when the highest bit of a quarter counts least.
    int bit = count / 8;
    while (first & bit) {
      first ^= bit;
      bit /= 2;
    }
    first |= bit;
  }
}

// The same for a whole block of kPairs threads, for sequences of `count` values, which need not be
// a power of two: load(j, values) is asked for j below `count` only. Thread 0 gets the sums.
// `scratch` is shared, kSums * kPairs long, and must not be used again before a barrier.
template <int kSums, int kLevels, class Load>
__device__ __forceinline__ void block_sum_in_pairs(int count, const Load& load, float* scratch,
                                                   float (&sums)[kSums]) {
  const auto strided = [&](int j, float (&values)[kSums]) {
    const int position = j * kPairs + threadIdx.x;
    if (position < count) {
      load(position, values);
    } else {
#pragma unroll
      for (int s = 0; s < kSums; ++s) values[s] = 0.0f;
    }
  };
  int rows = 4;
  while (rows * kPairs < count) rows *= 2;
  thread_sum_in_pairs<kSums, kLevels>(rows, strided, sums);
#pragma unroll
  for (int s = 0; s < kSums; ++s) scratch[s * kPairs + threadIdx.x] = sums[s];
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const auto shared = [&](int first, float (&values)[kSums][4]) {
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
#pragma unroll
      for (int k = 0; k < 4; ++k) values[s][k] = scratch[s * kPairs + first + k];
    }
  };
  warp_sum_in_pairs(shared, sums);
}

}  // namespace anychip::cuda
