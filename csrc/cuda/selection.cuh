// Which elements of a row are the largest: keys, a radix selection of them, and a bitonic sort.
//
// Note [keys]: an element's key holds its magnitude in the upper half, 31 bits, and its distance
// from the row's end in the lower one. Keys are all different; the larger key is the larger
// magnitude, and of equal ones the lower index: a selection and a sort of keys need no order of
// their inputs. 0 is below every element but the last one of a row, if that is 0, and fills what is
// left.
#pragma once

#include "reduce.cuh"
#include "vector.cuh"

namespace anychip::cuda {

using Key = unsigned long long;

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kIndexBits = 32;
constexpr int kKeyBits = 63;
// Keys that a block sorts in shared memory.
constexpr int kSortTile = 2048;

// Order of |x|: the bits of a number without its sign; every NaN is the largest of all.
__device__ __forceinline__ uint32_t order_of(float value) {
  const uint32_t bits = __float_as_uint(value) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0x7fffffffu : bits;
}
__device__ __forceinline__ uint32_t order_of_bits(unsigned short raw, uint32_t infinity) {
  const uint32_t bits = raw & 0x7fffu;
  return (bits > infinity ? 0x7fffu : bits) << 16;
}
__device__ __forceinline__ uint32_t order_of(BFloat16 value) {
  unsigned short raw;
  memcpy(&raw, &value, sizeof raw);
  return order_of_bits(raw, 0x7f80u);
}
__device__ __forceinline__ uint32_t order_of(Float16 value) {
  unsigned short raw;
  memcpy(&raw, &value, sizeof raw);
  return order_of_bits(raw, 0x7c00u);
}

template <class T>
__device__ __forceinline__ Key key_of(T value, int64_t index, int64_t length) {
  return Key{order_of(value)} << kIndexBits | static_cast<Key>(length - 1 - index);
}

__device__ __forceinline__ int64_t index_of(Key key, int64_t length) {
  return length - 1 - static_cast<int64_t>(key & 0xffffffffu);
}

// Where the next digit lies: bits [low, high) of the key. 16-bit types have no magnitude below bit
// 48, and an index has no more bits than the row's length.
struct Digit {
  int high;
  int low;
};

template <class T>
__host__ __device__ inline Digit digit_below(int high) {
  const int floor = high <= kIndexBits ? 0 : sizeof(T) == 2 ? kIndexBits + 16 : kIndexBits;
  return {high, high - floor > kDigitBits ? high - kDigitBits : floor};
}

template <class T>
__host__ __device__ inline int next_high(const Digit& digit, int index_bits) {
  const int floor = sizeof(T) == 2 ? kIndexBits + 16 : kIndexBits;
  return digit.low == floor ? index_bits : digit.low;
}

// The search for the k-th largest key: those that begin with `prefix`, down to bit `high`, are of
// the k largest or not; `need` of them are. It is found when high is 0: all keys from prefix on are
// taken.
struct Search {
  Key prefix;
  unsigned need;
  int high;
};

__device__ __forceinline__ bool is_candidate(Key key, const Search& search) {
  return key >> search.high == search.prefix >> search.high;
}

// Sum of `value` over the threads behind this one. All threads of the block call it.
__device__ __forceinline__ unsigned sum_behind(unsigned value, unsigned* scratch) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  unsigned sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const unsigned other = __shfl_down_sync(kAllLanes, sum, distance);
    if (lane + distance < kWarp) sum += other;
  }
  if (lane == 0) scratch[warp] = sum;
  __syncthreads();
  unsigned behind = sum - value;
  for (int other = warp + 1; other < warps; ++other) behind += scratch[other];
  __syncthreads();
  return behind;
}

// Goes one digit on, given how many candidates have which digit. Every thread of the block calls it
// and gets the same result; `found` is shared, `scratch` too, kMaxWarps long.
template <class T>
__device__ __forceinline__ Search narrowed(const Search& search, const unsigned* counts,
                                           int index_bits, unsigned* scratch, Search* found) {
  const int each = kDigits / static_cast<int>(blockDim.x);
  const int first = static_cast<int>(threadIdx.x) * each;
  unsigned own = 0;
  for (int i = 0; i < each; ++i) own += counts[first + i];
  unsigned above = sum_behind(own, scratch);
  // One thread has the digit of the k-th largest key.
  if (above < search.need && search.need <= above + own) {
    int digit = first + each - 1;
    while (above + counts[digit] < search.need) above += counts[digit--];
    const Digit place = digit_below<T>(search.high);
    found->prefix = search.prefix | static_cast<Key>(digit) << place.low;
    found->need = search.need - above;
    // All with this digit are taken: the rest of the key says nothing more.
    found->high = counts[digit] == found->need ? 0 : next_high<T>(place, index_bits);
  }
  __syncthreads();
  const Search result = *found;
  __syncthreads();
  return result;
}

// The larger key in front when `descending`.
__device__ __forceinline__ void order_pair(Key& a, Key& b, bool descending) {
  if ((a < b) == descending) {
    const Key other = a;
    a = b;
    b = other;
  }
}

// Which of two keys the `pair`-th comparison at a distance is about: the first one.
__device__ __forceinline__ int64_t first_of_pair(int64_t pair, int64_t distance) {
  return 2 * pair - (pair & (distance - 1));
}

// Bitonic merges of `count` shared keys from `distance` down, in runs of `size`. Runs of a segment,
// of a power of two of keys, take turns in their direction; `offset` is the place of keys[0].
__device__ __forceinline__ void merge_runs(Key* keys, int count, int64_t size, int distance,
                                           int64_t segment, int64_t offset) {
  for (; distance > 0; distance /= 2) {
    __syncthreads();
    for (int pair = static_cast<int>(threadIdx.x); pair < count / 2;
         pair += static_cast<int>(blockDim.x)) {
      const int i = static_cast<int>(first_of_pair(pair, distance));
      order_pair(keys[i], keys[i + distance], ((offset + i) & (segment - 1) & size) == 0);
    }
  }
}

// Sorts segments of shared keys, the largest first; on return all threads may read them.
// Batcher 1968, "Sorting networks and their applications".
__device__ __forceinline__ void sort_segments(Key* keys, int count, int64_t segment,
                                              int64_t offset) {
  for (int size = 2; size <= count && size <= segment; size *= 2) {
    merge_runs(keys, count, size, size / 2, segment, offset);
  }
  __syncthreads();
}

}  // namespace anychip::cuda
