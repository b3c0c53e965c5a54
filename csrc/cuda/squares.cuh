// Exact sums of squares over lists of tensors: anychip.operators.squares.
//
// A block has a chunk of a tensor. Its threads add squares to two sums of float64 each, whose units
// are 2^45 apart and follow from a sample of the chunk: a sum that begins at 1.5 * 2^(52 + p)
// rounds what is added to it to a multiple of 2^p, and what it leaves goes to the next one, as in
// Demmel and Nguyen 2013 (IEEE ARITH 21). What the second one leaves, and a number too large for
// the first, is added to the chunk's digits in shared memory, as a whole number: seldom, where the
// sample was one. Integers are added up in any order.
//
// What is squared comes from Sources, whose kSums sequences go side by side:
// sources.visit(table, tensor, first, visit) gives the source of a tensor from element `first` on,
// and source.load(i, values) what elements i to i + N are before they are squared; N is 4, from a
// vector's address on, or 1. kAhead vectors of a thread are loaded before the first is used: as
// many as the registers have room for.
#pragma once

#include "reduce.cuh"
#include "tensor_list.cuh"

namespace anychip::cuda {

using Digit = unsigned long long;  // which atomicAdd takes; negative ones wrap around

// Digits in base 2^32 of multiples of 2^-298, infinities, NaN.
constexpr int kDigits = 21, kInfinities = 19, kNaNs = 20;
constexpr int kLowest = -298;
constexpr int kLogPerThread = 7;  // of a chunk: kChunk / kListThreads, and a few singles
constexpr int kStepDown = 52 - kLogPerThread;
constexpr int kMargin = 3;  // exponents that the sample's largest number may be exceeded by

static_assert((kChunk / kListThreads + 2) <= 1 << kLogPerThread, "sums stay in their binade");

// value * 2^(place + kLowest)
__device__ __forceinline__ void add_at(Digit* digits, int place, int64_t value) {
  const int shift = place % 32;
  Digit* to = digits + place / 32;
  // As low + 2^32 high, each shifted on its own.
  const uint64_t low = static_cast<uint64_t>(value & 0xffffffff) << shift;
  const int64_t high = static_cast<int64_t>(static_cast<uint64_t>(value >> 32) << shift);
  atomicAdd(to, static_cast<Digit>(low & 0xffffffffu));
  atomicAdd(to + 1, static_cast<Digit>((low >> 32) + (static_cast<uint64_t>(high) & 0xffffffffu)));
  atomicAdd(to + 2, static_cast<Digit>(high >> 32));
}

__device__ __forceinline__ uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

__device__ __forceinline__ double power_of_two(int exponent, double times) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value * times;
}

__device__ __forceinline__ void add_one_square(float value, Digit* digits) {
  const uint32_t bits = __float_as_uint(value);
  const int stored = static_cast<int>(bits >> 23 & 0xffu);
  const int64_t fraction = bits & 0x7fffffu;
  if (stored == 255) {
    atomicAdd(digits + (fraction == 0 ? kInfinities : kNaNs), Digit{1});
    return;
  }
  const int64_t whole = stored == 0 ? fraction : fraction | 0x800000;
  add_at(digits, stored == 0 ? 0 : 2 * (stored - 1), whole * whole);
}

// Any multiple of 2^kLowest whose bits span less than 53.
__device__ __forceinline__ void add_rest(double rest, Digit* digits) {
  const uint64_t bits = bits_of(rest);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ffu) - 1023 - 52;
  int64_t whole = static_cast<int64_t>((bits & ((uint64_t{1} << 52) - 1)) | uint64_t{1} << 52);
  int place = exponent - kLowest;
  if (place < 0) {
    whole >>= -place;  // zeros
    place = 0;
  }
  add_at(digits, place, rest < 0.0 ? -whole : whole);
}

// The two sums of a thread.
class Squares {
 public:
  // `largest`: bits of a number that most are not much larger than.
  __device__ __forceinline__ void begin(uint32_t largest) {
    const int stored = static_cast<int>(largest >> 23);
    int exponent = (stored > 0 ? stored : 1) - 127 + kMargin;
    exponent = exponent < 127 ? exponent : 127;
    limit_ = static_cast<uint32_t>(exponent + 128) << 23;
    const int top = 2 * exponent + 2 + kLogPerThread - 51;
    places_[0] = (top > kLowest ? top : kLowest) - kLowest;
    places_[1] = (top - kStepDown > kLowest ? top - kStepDown : kLowest) - kLowest;
#pragma unroll
    for (int k = 0; k < 2; ++k) sums_[k] = start(k);
  }

  __device__ __forceinline__ void add(float value, Digit* digits) {
    if ((__float_as_uint(value) & 0x7fffffffu) >= limit_) {
      add_one_square(value, digits);
      return;
    }
    double rest = static_cast<double>(value) * static_cast<double>(value);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const double sum = sums_[k] + rest;
      rest -= sum - sums_[k];
      sums_[k] = sum;
    }
    if (rest != 0.0) add_rest(rest, digits);
  }

  // Adds those of a warp. In one binade, numbers differ by as many units as their bits do.
  __device__ __forceinline__ void join(Digit* digits) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      long long units = static_cast<long long>(bits_of(sums_[k]) - bits_of(start(k)));
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        units += __shfl_xor_sync(kAllLanes, units, distance);
      }
      if (threadIdx.x % kWarp == 0) add_at(digits, places_[k], units);
    }
  }

 private:
  __device__ __forceinline__ double start(int k) const {
    return power_of_two(places_[k] + kLowest + 52, 1.5);
  }

  double sums_[2];
  int places_[2];
  uint32_t limit_;
};

template <int kSums, int N>
__device__ __forceinline__ void add_all(Squares (&sums)[kSums], const float (&values)[kSums][N],
                                        Digit* digits) {
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int k = 0; k < N; ++k) sums[s].add(values[s][k], digits + s * kDigits);
  }
}

// Rows of the first sequence begin at `rows`, those of the next one `behind` later. Four blocks per
// multiprocessor leave 64 registers to a thread; left to itself, ptxas takes 40 or 48 and spills.
template <class Table, class Sources>
__global__ void __launch_bounds__(kListThreads, 4)
    squares_kernel(const __grid_constant__ Table table, Sources sources, Digit* rows,
                   int64_t behind) {
  constexpr int kSums = Sources::kSums, kAhead = Sources::kAhead;
  ANYCHIP_SHARED(Digit, digits, kSums * kDigits);
  ANYCHIP_SHARED(unsigned, largest, kSums);
  for (int i = threadIdx.x; i < kSums * kDigits; i += kListThreads) digits[i] = 0;
  if (threadIdx.x < kSums) largest[threadIdx.x] = 0;
  __syncthreads();
  int64_t chunk;
  const int tensor = tensor_of_block(table, chunk);
  const int64_t begin = chunk * kChunk;
  const int64_t left = table.numel[tensor] - begin;
  const int count = static_cast<int>(left < kChunk ? left : kChunk);
  const int whole = table.traits[tensor] & kVectors ? count / 4 * 4 : 0;
  sources.visit(table, tensor, begin, [&](const auto& source) {
    // The sample: an element per thread, evenly spread.
    const int stride = count < kListThreads ? 1 : count / kListThreads;
    float one[kSums][1] = {};
    if (threadIdx.x * stride < count) source.load(threadIdx.x * stride, one);
#pragma unroll
    for (int s = 0; s < kSums; ++s) {
      unsigned found = __float_as_uint(one[s][0]) & 0x7fffffffu;
#pragma unroll
      for (int distance = kWarp / 2; distance > 0; distance /= 2) {
        const unsigned other = __shfl_xor_sync(kAllLanes, found, distance);
        found = other > found ? other : found;
      }
      if (threadIdx.x % kWarp == 0) atomicMax(largest + s, found);
    }
    __syncthreads();
    Squares sums[kSums];
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s].begin(largest[s]);
#pragma unroll 1
    for (int start = 4 * threadIdx.x; start < whole; start += 4 * kListThreads * kAhead) {
      float values[kAhead][kSums][4];
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        const int i = start + 4 * kListThreads * step;
        if (i < whole) source.load(i, values[step]);
      }
#pragma unroll
      for (int step = 0; step < kAhead; ++step) {
        if (start + 4 * kListThreads * step < whole) add_all(sums, values[step], digits);
      }
    }
#pragma unroll 1
    for (int i = whole + threadIdx.x; i < count; i += kListThreads) {
      source.load(i, one);
      add_all(sums, one, digits);
    }
#pragma unroll
    for (int s = 0; s < kSums; ++s) sums[s].join(digits + s * kDigits);
  });
  __syncthreads();
  if (threadIdx.x >= kSums) return;
  // Each digit from 0 to 2^32 - 1 again, so that those of 2^31 chunks have room in a row.
  const Digit* own = digits + threadIdx.x * kDigits;
  Digit* row = rows + threadIdx.x * behind + (table.tensors_before + tensor) * int64_t{kDigits};
  long long carry = 0;
  for (int k = 0; k < kDigits; ++k) {
    const long long digit = static_cast<long long>(own[k]) + carry;
    carry = k < kInfinities - 1 ? digit >> 32 : 0;
    const long long kept = k < kInfinities - 1 ? digit & 0xffffffff : digit;
    if (kept != 0) atomicAdd(row + k, static_cast<Digit>(kept));
  }
}

// Chunks of a tensor.
inline int64_t chunks_of_squares(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace anychip::cuda
