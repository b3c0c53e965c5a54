// The operators over lists of tensors, one range of one tensor at a time: AdamW, the sum of
// squares, scaling, and unscaling with a check.
#include "loops.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

struct NoTensor {};
ANYCHIP_INLINE void store(NoTensor*, F32, AllLanes) {}
ANYCHIP_INLINE void store(NoTensor*, F32, FirstLanes) {}
ANYCHIP_INLINE NoTensor* advance(NoTensor*, int64_t) { return nullptr; }
template <class T>
ANYCHIP_INLINE T* advance(T* p, int64_t elements) {
  return p + elements;
}

// AdamW (Loshchilov and Hutter 2019). Float32 throughout, float64 for the factors, which are
// rounded once. Roundings: g 1; m 3; v 4; the update 5 beyond m and v; p 2 more.
template <class Param, class Grad, class Low>
[[gnu::flatten]] void adamw_elements(const AdamWTensor& tensor, const AdamWFactors& f,
                                     Range elements) {
  Param* p = static_cast<Param*>(tensor.param.data);
  const Grad* g = static_cast<const Grad*>(tensor.grad.data);
  float* m = tensor.exp_avg;
  float* v = tensor.exp_avg_sq;
  Low* low = static_cast<Low*>(tensor.low_precision.data);

  for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
    const F32 grad = load_ahead(g + i, lanes) * f.grad;
    const F32 average = load_ahead(m + i, lanes) * f.beta1 + grad * f.one_minus_beta1;
    const F32 square = load_ahead(v + i, lanes) * f.beta2 + (grad * grad) * f.one_minus_beta2;
    const F32 step = (average * f.update) / (sqrt(square) * f.inverse_root + f.eps);
    const F32 param = load_ahead(p + i, lanes) * f.decay - step;
    store(m + i, average, lanes);
    store(v + i, square, lanes);
    store(p + i, param, lanes);
    store(advance(low, i), param, lanes);
  });
}

template <class Param, class Grad>
void adamw_with_low_precision(const AdamWTensor& tensor, const AdamWFactors& factors,
                              Range elements) {
  if (!tensor.low_precision.data) {
    return adamw_elements<Param, Grad, NoTensor>(tensor, factors, elements);
  }
  visit_dtype(tensor.low_precision.dtype, [&](auto low) {
    adamw_elements<Param, Grad, decltype(low)>(tensor, factors, elements);
  });
}

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

void adamw(const AdamWTensor& tensor, const AdamWFactors& factors, Range elements) {
  visit_dtype(tensor.param.dtype, [&](auto param) {
    visit_dtype(tensor.grad.dtype, [&](auto grad) {
      adamw_with_low_precision<decltype(param), decltype(grad)>(tensor, factors, elements);
    });
  });
}

double sum_of_squares(const TensorRef& tensor, Range elements) {
  double sum = 0.0;
  visit_tensor(tensor, elements, [&](auto* x, int64_t n) { sum = sum_of_squares_of(x, n); });
  return sum;
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
