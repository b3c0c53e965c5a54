// What is done to lists of tensors besides updates, one range of one tensor at a time: sums of
// squares, scaling, and unscaling with a check.
#include "blocks.h"
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

typedef float HalfRegisterF __attribute__((vector_size(2 * kRegisterLanes)));

ANYCHIP_INLINE Pair<RegisterD> widen(RegisterF v) {
  HalfRegisterF half[2];
  __builtin_memcpy(half, &v, sizeof v);
  return {__builtin_convertvector(half[0], RegisterD), __builtin_convertvector(half[1], RegisterD)};
}
template <class H>
ANYCHIP_INLINE auto widen(Pair<H> v) {
  return Pair<decltype(widen(v.low))>{widen(v.low), widen(v.high)};
}
using F64 = decltype(widen(F32{}));

ANYCHIP_INLINE double sum_double_lanes(F64 v) {
  double lane[kLanes];
  static_assert(sizeof lane == sizeof v, "16 lanes of float64, in order");
  __builtin_memcpy(lane, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) lane[k] += lane[k + width];
  }
  return lane[0];
}

// In float64 the square of a float32 is exact and cannot overflow.
template <class T>
[[gnu::flatten]] double sum_of_squares_of(const T* x, int64_t n) {
  const auto square = [&](int64_t i, auto lanes) {
    const F64 v = widen(load_ahead(x + i, lanes));
    return v * v;
  };
  F64 a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    a = a + square(i, AllLanes{});
    b = b + square(i + kLanes, AllLanes{});
    c = c + square(i + 2 * kLanes, AllLanes{});
    d = d + square(i + 3 * kLanes, AllLanes{});
  }
  for_each_vector(i, n, [&](int64_t at, auto lanes) { a = a + square(at, lanes); });
  return sum_double_lanes((a + b) + (c + d));
}

template <class T>
[[gnu::flatten]] void multiply_elements(T* x, float factor, int64_t n) {
  for_each_vector(0, n,
                  [&](int64_t i, auto lanes) { store(x + i, load(x + i, lanes) * factor, lanes); });
}

// Checks what was stored: a float16 that overflows by the division counts too.
template <class T>
[[gnu::flatten]] bool divide_and_check_elements(T* x, float divisor, int64_t n) {
  Mask all_finite = F32{} == F32{};
  for_each_vector(0, n, [&](int64_t i, auto lanes) {
    store(x + i, load_ahead(x + i, lanes) / divisor, lanes);
    all_finite = all_finite & (abs(load(x + i, lanes)) < __builtin_inff());
  });
  return sum_lanes(select(all_finite, F32{}, fill<F32>(1.0f))) == 0.0f;
}

template <class Work>
ANYCHIP_INLINE void visit_tensor(const TensorRef& tensor, Range elements, const Work& work) {
  visit_dtype(tensor.dtype, [&](auto t) {
    work(static_cast<decltype(t)*>(tensor.data) + elements.begin, elements.end - elements.begin);
  });
}

}  // namespace

double sum_of_squares(const TensorRef& tensor, Range elements) {
  double sum = 0.0;
  visit_tensor(tensor, elements, [&](auto* x, int64_t n) { sum = sum_of_squares_of(x, n); });
  return sum;
}

// In float32 and in pairs: a block's sum is that of every other chip, bit for bit.
float block_squares(const TensorRef& tensor, Range elements, int64_t block, float* scratch) {
  visit_tensor(tensor, elements, [&](auto* x, int64_t n) {
    for_each_vector(0, n, [&](int64_t i, auto lanes) {
      const F32 v = load_ahead(x + i, lanes);
      store(scratch + i, v * v, lanes);
    });
  });
  return sum_in_pairs(scratch, elements.end - elements.begin, block);
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
