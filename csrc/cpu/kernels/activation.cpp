// Activations: of a number, of a sum with a bias, and gated. One pass over the elements, each read
// once and written once, in float32 and rounded once.
#include "loops.h"
#include "math.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// The same number as value(x), and grad times the derivative.
template <class V>
struct Both {
  V value, gradient;
};
ANYCHIP_INLINE Both<Pair<F32>> joined(Both<F32> even, Both<F32> odd) {
  return {{even.value, odd.value}, {even.gradient, odd.gradient}};
}

// Beyond 30 the derivatives are constant; the limit keeps 0 * infinity out of them.
ANYCHIP_INLINE F32 limit(F32 x) { return maximum(fill<F32>(-30.0f), minimum(fill<F32>(30.0f), x)); }

// Error in float32: 7 ulp.
struct Gelu {
  static constexpr bool kBiased = true, kGated = true;
  ANYCHIP_INLINE F32 value(F32 x) const { return x * normal(x).cdf; }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    const F32 limited = limit(x);
    const Normal n = normal(limited);
    return {x * n.cdf, grad * (n.cdf + limited * n.pdf)};
  }
};

// 0.5 x (1 + tanh(u)) = x * sigmoid(2 u), 2 u = x * (kLinear + kCubic x^2). Error in float32: 4 ulp
// for x > 0; for x < 0 the three roundings of 2 u are magnified by |2 u|, but stay below 4 * 2^-24
// * |x|.
struct GeluTanh {
  static constexpr bool kBiased = true, kGated = true;
  static constexpr float kLinear = 1.59576912f;   // 2 sqrt(2 / pi)
  static constexpr float kCubic = 0.0713548162f;  // 0.044715 * kLinear
  ANYCHIP_INLINE F32 value(F32 x) const {
    const F32 limited = limit(x);
    return x * sigmoid(limited * (kLinear + kCubic * (limited * limited))).value;
  }
  ANYCHIP_INLINE Both<F32> both(F32 unlimited, F32 grad) const {
    const F32 x = limit(unlimited), square = x * x;
    const Sigmoid s = sigmoid(x * (kLinear + kCubic * square));
    const F32 slope = s.product * (x * (kLinear + 3.0f * kCubic * square));
    return {unlimited * s.value, grad * (s.value + slope)};
  }
};

// x sigmoid(x), whose derivative is s + x s (1 - s): both factors s and 1 - s have a small relative
// error. Error in float32: 4 ulp.
struct Silu {
  static constexpr bool kBiased = false, kGated = true;
  ANYCHIP_INLINE F32 value(F32 x) const { return x * sigmoid(x).value; }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    const Sigmoid s = sigmoid(x);
    const F32 silu = x * s.value;
    return {silu, grad * (s.value + silu * s.complement)};
  }
};

// What is made of the numbers of one tensor only. NaN stays NaN, and the gradient at 0 is 0.
struct Alone {
  static constexpr bool kBiased = false, kGated = false;
};
struct Relu : Alone {
  ANYCHIP_INLINE F32 value(F32 x) const { return maximum(F32{}, x); }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    return {value(x), select(0.0f >= x, F32{}, grad)};
  }
};
struct Relu2 : Alone {
  ANYCHIP_INLINE F32 value(F32 x) const {
    const F32 positive = maximum(F32{}, x);
    return positive * positive;
  }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    return {value(x), select(0.0f >= x, F32{}, (x + x) * grad)};
  }
};
struct Logistic : Alone {
  ANYCHIP_INLINE F32 value(F32 x) const { return sigmoid(x).value; }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    return {value(x), grad * sigmoid_slope(x)};
  }
};

struct Tanh : Alone {
  ANYCHIP_INLINE F32 value(F32 x) const { return tanh(x); }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    const F32 t = tanh(x);
    return {t, grad * (1.0f - t * t)};
  }
};

struct Softplus : Alone {
  float beta, threshold;
  ANYCHIP_INLINE F32 value(F32 x) const {
    const F32 scaled = x * beta;
    const F32 soft =
        maximum(F32{}, scaled) + log_one_plus(exp(float_of(bits_of(scaled) | 0x80000000u)));
    return select(scaled > threshold, x, soft / beta);
  }
  ANYCHIP_INLINE Both<F32> both(F32 x, F32 grad) const {
    const F32 scaled = x * beta;
    return {value(x), select(scaled > threshold, grad, grad * sigmoid(scaled).value)};
  }
};

// Calls visit(f) with the function.
template <class Args, class Visit>
ANYCHIP_INLINE void visit_function(const Args& args, const Visit& visit) {
  switch (args.function) {
    case Activation::kGelu:
      return visit(Gelu{});
    case Activation::kGeluTanh:
      return visit(GeluTanh{});
    case Activation::kSilu:
      return visit(Silu{});
    case Activation::kRelu:
      return visit(Relu{});
    case Activation::kRelu2:
      return visit(Relu2{});
    case Activation::kSigmoid:
      return visit(Logistic{});
    case Activation::kTanh:
      return visit(Tanh{});
    case Activation::kSoftplus:
      return visit(Softplus{{}, static_cast<float>(args.beta), static_cast<float>(args.threshold)});
  }
}

enum class Form { kAlone, kGated, kBiased };
template <Form form>
struct FormOf {};

// Calls visit(T{}, f, FormOf<form>{}) for the forms that a function has.
template <class Args, class Visit>
ANYCHIP_INLINE void visit_form(const Args& args, const Visit& visit) {
  visit_function(args, [&](auto f) {
    visit_dtype(args.dtype, [&](auto t) {
      if (args.up) {
        if constexpr (decltype(f)::kGated) visit(t, f, FormOf<Form::kGated>{});
      } else if (args.bias) {
        if constexpr (decltype(f)::kBiased) visit(t, f, FormOf<Form::kBiased>{});
      } else {
        visit(t, f, FormOf<Form::kAlone>{});
      }
    });
  });
}

// put(i, make(i, lanes, x), lanes, column), with x + bias rounded once for rows that have one, and
// else for all.
template <Form form, class T, class Make, class Put>
ANYCHIP_INLINE void for_each_argument(const void* all, const float* bias, int64_t hidden,
                                      Range elements, const Make& make, const Put& put) {
  const T* x = static_cast<const T*>(all);
  if constexpr (form == Form::kBiased) {
    for_each_span(hidden, elements, [&](int64_t begin, int64_t n) {
      for_each_vector(0, n, [&](int64_t j, auto lanes) {
        const int64_t i = begin + j;
        put(i, make(i, lanes, load_ahead(x + i, lanes) + load(bias + j, lanes)), lanes, j);
      });
    });
  } else {
    for_each_made<T>(
        elements, [&](int64_t i, auto lanes) { return make(i, lanes, load_ahead(x + i, lanes)); },
        [&](int64_t i, auto made, auto lanes) { put(i, made, lanes, i); });
  }
}

template <class T, class Function, Form form>
[[gnu::flatten]] void forward(const ActivationForward& args, Function f, FormOf<form>,
                              const float* bias, bool past, Range elements) {
  const T* up = static_cast<const T*>(args.up);
  T* y = static_cast<T*>(args.y);
  for_each_argument<form, T>(
      args.x, bias, args.hidden, elements,
      [&](int64_t i, auto lanes, F32 x) {
        const F32 value = f.value(x);
        return form == Form::kGated ? value * load_ahead(up + i, lanes) : value;
      },
      [&](int64_t i, auto value, auto lanes, int64_t) { store(y + i, value, lanes, past); });
  finish_stores(past);
}

template <class T, class Function, Form form>
[[gnu::flatten]] void backward(const ActivationBackward& args, Function f, FormOf<form>,
                               const float* bias, float* dbias, bool past, Range elements) {
  const T* grad = static_cast<const T*>(args.grad);
  const T* up = static_cast<const T*>(args.up);
  T* dx = static_cast<T*>(args.dx);
  T* dup = static_cast<T*>(args.dup);
  if (form == Form::kAlone && !dx) return;  // asked once, as its loop is short
  for_each_argument<form, T>(
      args.x, bias, args.hidden, elements,
      [&](int64_t i, auto lanes, F32 x) {
        const F32 dy = load_ahead(grad + i, lanes);
        if (form != Form::kGated) return f.both(x, dy);
        const Both<F32> both = f.both(x, dy * load_ahead(up + i, lanes));
        return Both<F32>{both.value * dy, both.gradient};
      },
      [&](int64_t i, auto both, auto lanes, int64_t column) {
        if (form == Form::kAlone || dx) store(dx + i, both.gradient, lanes, past);
        if (form == Form::kGated && dup) store(dup + i, both.value, lanes, false);
        if constexpr (form == Form::kBiased) {
          if (dbias) store(dbias + column, load(dbias + column, lanes) + both.gradient, lanes);
        }
      });
  finish_stores(past);
}

}  // namespace

void activation_forward(const ActivationForward& args, const float* bias, bool past,
                        Range elements) {
  visit_form(args, [&](auto t, auto f, auto form) {
    forward<decltype(t)>(args, f, form, bias, past, elements);
  });
}

void activation_backward(const ActivationBackward& args, const float* bias, float* dbias, bool past,
                         Range elements) {
  visit_form(args, [&](auto t, auto f, auto form) {
    backward<decltype(t)>(args, f, form, bias, dbias, past, elements);
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
