// What is done to lists of tensors besides updates, one range of one tensor at a time: sums of
// squares, scaling, and unscaling with a check.
#include "squares.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr int fraction_bits(float) { return 23; }
constexpr int fraction_bits(BFloat16) { return 7; }
constexpr int fraction_bits(Float16) { return 10; }

[[gnu::flatten]] void add_squares_of_range(const float* x, int64_t n, int64_t* digits) {
  for (int64_t begin = 0; begin < n; begin += kSquaresTile) {
    const int64_t count = begin + kSquaresTile < n ? kSquaresTile : n - begin;
    add_squares_of(x + begin, count, digits);
  }
}

// By smaller tiles, of which more need one sum alone.
template <class T>
[[gnu::flatten]] void add_squares_of_range(const T* x, int64_t n, int64_t* digits) {
  constexpr int64_t kTile = kSquaresTile / 4;
  alignas(64) float tile[kTile];
  for (int64_t begin = 0; begin < n; begin += kTile) {
    const int64_t count = begin + kTile < n ? kTile : n - begin;
    const T* from = x + begin;
    const Magnitudes found = magnitudes(from, count, [&](int64_t i, F32 value, auto lanes) {
      __builtin_prefetch(from + 2 * kTile + i);
      store(tile + i, value, lanes);
    });
    add_squares_of(tile, count, found, fraction_bits(T{}), digits);
  }
}

template <class T>
[[gnu::flatten]] void multiply_elements(T* x, float factor, int64_t n) {
  for_each_vector(0, n,
                  [&](int64_t i, auto lanes) { store(x + i, load(x + i, lanes) * factor, lanes); });
}

// Checks what was stored: a float16 that overflows by the division counts too. 0 times a number is
// 0 where that is finite, and NaN else, which stays in the sum.
template <class T, class Unscale>
ANYCHIP_INLINE bool unscale_and_check_elements(T* x, int64_t n, const Unscale& unscale) {
  F32 zero{};
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    store(x + i, unscale(load(x + i, lanes)), lanes);
    zero = zero + load(x + i, lanes) * 0.0f;
  });
  return sum_lanes(zero) == 0.0f;
}

// A loss scale is a power of two as a rule, and to multiply by its reciprocal rounds as to divide
// by it does, in a fraction of the time: both are the same number.
template <class T>
[[gnu::flatten]] bool divide_and_check_elements(T* x, float divisor, int64_t n) {
  uint32_t bits;
  __builtin_memcpy(&bits, &divisor, sizeof bits);
  const float factor = 1.0f / divisor;
  const bool is_power = (bits & 0x7fffffu) == 0 && factor >= 0x1p-126f;
  if (is_power) {
    return unscale_and_check_elements(x, n, [&](F32 value) { return value * factor; });
  }
  return unscale_and_check_elements(x, n, [&](F32 value) { return value / divisor; });
}

template <class Work>
ANYCHIP_INLINE void visit_tensor(const TensorRef& tensor, Range elements, const Work& work) {
  visit_dtype(tensor.dtype, [&](auto t) {
    work(static_cast<decltype(t)*>(tensor.data) + elements.begin, elements.end - elements.begin);
  });
}

}  // namespace

void add_squares(const TensorRef& tensor, Range elements, int64_t* digits) {
  visit_tensor(tensor, elements, [&](auto* x, int64_t n) { add_squares_of_range(x, n, digits); });
}

void multiply(const TensorRef& tensor, float factor, Range elements) {
  visit_tensor(tensor, elements, [&](auto* x, int64_t n) { multiply_elements(x, factor, n); });
}

bool divide_and_check(const TensorRef& tensor, float divisor, Range elements) {
  bool finite = true;
  visit_tensor(tensor, elements,
               [&](auto* x, int64_t n) { finite = divide_and_check_elements(x, divisor, n); });
  return finite;
}

}  // namespace anychip::cpu::ANYCHIP_ISA
