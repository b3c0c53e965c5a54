#include "reduce.h"

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <type_traits>
#include <vector>

// A loop's output may be one of its inputs, element by element: compilers are told that this is the
// only overlap, and take vectors.
#if defined(__clang__)
#define ANYCHIP_ELEMENTWISE _Pragma("clang loop vectorize(assume_safety)")
#else
#define ANYCHIP_ELEMENTWISE _Pragma("GCC ivdep")
#endif

namespace anychip::comm {
namespace {

constexpr size_t kBlock = 1024;  // elements that stay in the first cache between two levels

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
T load(T value) {
  return value;
}
float load(BF16 value) { return float_of(static_cast<uint32_t>(value.bits) << 16); }
// As csrc/cpu/kernels/vector.h has it: exponents differ by 112; subtracting 2^-14 makes subnormals
// normal.
float load(F16 value) {
  const uint32_t shifted = (value.bits & 0x7fffu) << 13, exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + 0x38000000u;
  const uint32_t subnormal = bits_of(float_of(normal + 0x00800000u) - 0x1p-14f);
  const uint32_t magnitude = exponent == 0             ? subnormal
                             : exponent == 0x0f800000u ? normal + 0x38000000u
                                                       : normal;
  return float_of(magnitude | ((value.bits & 0x8000u) << 16));
}

template <class T>
void store(T& place, T value) {
  place = value;
}
void store(BF16& place, float value) {
  const uint32_t bits = bits_of(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  place.bits = static_cast<uint16_t>(value == value ? rounded : 0x7fc0u);
}
void store(F16& place, float value) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t half = magnitude >= 0x47800000u  ? special
                        : magnitude < 0x38800000u ? subnormal
                                                  : normal;
  place.bits = static_cast<uint16_t>(half | ((bits >> 16) & 0x8000u));
}

// Integers wrap around.
struct Sum {
  template <class A>
  A operator()(A one, A other) const {
    if constexpr (std::is_integral_v<A>) {
      using U = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<U>(static_cast<U>(one) + static_cast<U>(other)));
    } else {
      return one + other;
    }
  }
};
// A NaN on either side is the result, as torch and numpy have it.
struct Max {
  template <class A>
  A operator()(A one, A other) const {
    return one != one ? one : (one > other ? one : other);
  }
};
struct Min {
  template <class A>
  A operator()(A one, A other) const {
    return one != one ? one : (one < other ? one : other);
  }
};

template <class T>
using Wide = decltype(load(T{}));

// The processor's own conversions, or wide vectors, of as many values as they take.
#if defined(__x86_64__)
[[gnu::target("avx2")]] size_t widen_vectors(const BF16* from, float* to, size_t n) {
  ANYCHIP_ELEMENTWISE
  for (size_t i = 0; i < n; ++i) to[i] = load(from[i]);
  return n;
}
[[gnu::target("avx2")]] size_t narrow_vectors(const float* from, BF16* to, size_t n) {
  ANYCHIP_ELEMENTWISE
  for (size_t i = 0; i < n; ++i) store(to[i], from[i]);
  return n;
}
[[gnu::target("avx,f16c")]] size_t widen_vectors(const F16* from, float* to, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + i))));
  }
  return i;
}
[[gnu::target("avx,f16c")]] size_t narrow_vectors(const float* from, F16* to, size_t n) {
  size_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128((__m128i*)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
  }
  return i;
}
bool has_vectors() {
  static const bool found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  return found;
}
#endif

// Blocks of values as they are stored, and as they are joined.
template <class T, class A>
void widen(const T* from, A* to, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if constexpr (!std::is_same_v<T, A>) i = has_vectors() ? widen_vectors(from, to, n) : 0;
#endif
  ANYCHIP_ELEMENTWISE
  for (; i < n; ++i) to[i] = load(from[i]);
}
template <class T, class A>
void narrow(const A* from, T* to, size_t n) {
  size_t i = 0;
#if defined(__x86_64__)
  if constexpr (!std::is_same_v<T, A>) i = has_vectors() ? narrow_vectors(from, to, n) : 0;
#endif
  ANYCHIP_ELEMENTWISE
  for (; i < n; ++i) store(to[i], from[i]);
}

template <class T, class Op>
struct Tree {
  using A = Wide<T>;
  const T* const* parts;
  Op op;

  // out[0..n) = the tree over ranks first..first+count at element `at`; spare: a block per level.
  void join(int first, int count, size_t at, size_t n, A* out, A* spare) const {
    const T* one = parts[first] + at;
    if (count == 1) {
      widen(one, out, n);
      return;
    }
    if constexpr (std::is_same_v<A, T>) {
      if (count == 2) {
        const T* other = parts[first + 1] + at;
        ANYCHIP_ELEMENTWISE
        for (size_t i = 0; i < n; ++i) out[i] = op(one[i], other[i]);
        return;
      }
    }
    // Neighbours, level by level, are halves of a power of two; the rest waits for the next level.
    int left = 1;
    while (left * 2 < count) left *= 2;
    join(first, left, at, n, out, spare);
    join(first + left, count - left, at, n, spare, spare + kBlock);
    ANYCHIP_ELEMENTWISE
    for (size_t i = 0; i < n; ++i) out[i] = op(out[i], spare[i]);
  }
};

template <class T, class Op>
void reduce_by(T* output, const T* const* parts, int count, size_t numel, Op op, bool is_avg) {
  using A = Wide<T>;
  const Tree<T, Op> tree{parts, op};
  if constexpr (std::is_same_v<A, T>) {
    if (count == 2 && !is_avg) {
      tree.join(0, 2, 0, numel, output, nullptr);
      return;
    }
  }
  A block[kBlock];
  std::vector<A> spare(kBlock * 32);  // more levels than there are processes
  for (size_t at = 0; at < numel; at += kBlock) {
    const size_t n = std::min(kBlock, numel - at);
    tree.join(0, count, at, n, block, spare.data());
    if (is_avg) {
      const A divisor = static_cast<A>(count);
      ANYCHIP_ELEMENTWISE
      for (size_t i = 0; i < n; ++i) block[i] = static_cast<A>(block[i] / divisor);
    }
    narrow(block, output + at, n);
  }
}

template <class T>
void reduce_of(void* output, const void* const* parts, int count, size_t numel, Reduction how) {
  auto* to = static_cast<T*>(output);
  std::vector<const T*> from(count);
  for (int i = 0; i < count; ++i) from[i] = static_cast<const T*>(parts[i]);
  if (how == Reduction::kMax) {
    reduce_by(to, from.data(), count, numel, Max{}, false);
  } else if (how == Reduction::kMin) {
    reduce_by(to, from.data(), count, numel, Min{}, false);
  } else {
    reduce_by(to, from.data(), count, numel, Sum{}, how == Reduction::kAvg);
  }
}

}  // namespace

void reduce(void* output, const void* const* parts, int count, size_t numel, DType dtype,
            Reduction reduction) {
  constexpr decltype(&reduce_of<float>) kTable[] = {
      reduce_of<float>,   reduce_of<double>,  reduce_of<BF16>,
      reduce_of<F16>,     reduce_of<int8_t>,  reduce_of<uint8_t>,
      reduce_of<int16_t>, reduce_of<int32_t>, reduce_of<int64_t>};
  kTable[static_cast<int>(dtype)](output, parts, count, numel, reduction);
}

}  // namespace anychip::comm
