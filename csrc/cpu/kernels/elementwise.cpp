// GELU, alone, of a sum with a bias and gated, and SwiGLU: one pass over the elements, each read
// once and written once.
#include "loops.h"
#include "math.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// tanh form: 0.5 x (1 + tanh(u)) = x * sigmoid(2 u), 2 u = x * (kLinear + kCubic x^2).
constexpr float kLinear = 1.59576912f;   // 2 sqrt(2 / pi)
constexpr float kCubic = 0.0713548162f;  // 0.044715 * kLinear

// Beyond 30 the derivatives are constant; the limit keeps 0 * infinity out of them.
ANYCHIP_INLINE F32 limit(F32 x) { return maximum(fill<F32>(-30.0f), minimum(fill<F32>(30.0f), x)); }

// Error in float32: none 7 ulp. tanh 4 ulp for x > 0; for x < 0 the three roundings of 2 u are
// magnified by |2 u|, but stay below 4 * 2^-24 * |x|.
ANYCHIP_INLINE F32 gelu(F32 x, bool tanh) {
  if (!tanh) return x * normal(x).cdf;
  const F32 limited = limit(x);
  return x * sigmoid(limited * (kLinear + kCubic * (limited * limited))).value;
}

// gelu(x), the same number as above, and its derivative.
struct Gelu {
  F32 value, derivative;
};
ANYCHIP_INLINE Gelu gelu_and_derivative(F32 unlimited, bool tanh) {
  const F32 x = limit(unlimited);
  if (!tanh) {
    const Normal n = normal(x);
    return {unlimited * n.cdf, n.cdf + x * n.pdf};
  }
  const F32 square = x * x;
  const Sigmoid s = sigmoid(x * (kLinear + kCubic * square));
  const F32 slope = (s.value * s.complement) * (x * (kLinear + 3.0f * kCubic * square));
  return {unlimited * s.value, s.value + slope};
}
ANYCHIP_INLINE F32 gelu_derivative(F32 x, bool tanh) {
  return gelu_and_derivative(x, tanh).derivative;
}

template <class T>
[[gnu::flatten]] void gelu_forward_elements(const GeluForward& args, Range elements) {
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  const auto apply = [&](bool tanh) {
    for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
      store(y + i, gelu(load_ahead(x + i, lanes), tanh), lanes);
    });
  };
  args.tanh ? apply(true) : apply(false);
}

template <class T>
[[gnu::flatten]] void gelu_backward_elements(const GeluBackward& args, Range elements) {
  const T* grad = static_cast<const T*>(args.grad);
  const T* x = static_cast<const T*>(args.x);
  T* dx = static_cast<T*>(args.dx);
  const auto apply = [&](bool tanh) {
    for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
      store(dx + i, load_ahead(grad + i, lanes) * gelu_derivative(load_ahead(x + i, lanes), tanh),
            lanes);
    });
  };
  args.tanh ? apply(true) : apply(false);
}

template <class T>
[[gnu::flatten]] void geglu_forward_elements(const GegluForward& args, Range elements) {
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  T* y = static_cast<T*>(args.y);
  const auto apply = [&](bool tanh) {
    for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
      const F32 opened = gelu(load_ahead(gate + i, lanes), tanh);
      store(y + i, opened * load_ahead(up + i, lanes), lanes);
    });
  };
  args.tanh ? apply(true) : apply(false);
}

template <class T>
[[gnu::flatten]] void geglu_backward_elements(const GegluBackward& args, Range elements) {
  const T* grad = static_cast<const T*>(args.grad);
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  T* dgate = static_cast<T*>(args.dgate);
  T* dup = static_cast<T*>(args.dup);
  const auto apply = [&](bool tanh) {
    for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
      const F32 dy = load_ahead(grad + i, lanes);
      const Gelu g = gelu_and_derivative(load_ahead(gate + i, lanes), tanh);
      if (dgate) store(dgate + i, dy * load_ahead(up + i, lanes) * g.derivative, lanes);
      if (dup) store(dup + i, g.value * dy, lanes);
    });
  };
  args.tanh ? apply(true) : apply(false);
}

// x + bias has one rounding before.
template <class T>
[[gnu::flatten]] void bias_gelu_forward_elements(const BiasGeluForward& args, const float* bias,
                                                 Range elements) {
  const auto apply = [&](bool tanh) {
    for_each_span(args.hidden, elements, [&](int64_t begin, int64_t n) {
      const T* x = static_cast<const T*>(args.x) + begin;
      T* y = static_cast<T*>(args.y) + begin;
      for_each_vector(0, n, [&](int64_t i, auto lanes) {
        store(y + i, gelu(load_ahead(x + i, lanes) + load(bias + i, lanes), tanh), lanes);
      });
    });
  };
  args.tanh ? apply(true) : apply(false);
}

template <class T>
[[gnu::flatten]] void bias_gelu_backward_elements(const BiasGeluBackward& args, const float* bias,
                                                  float* dbias, Range elements) {
  const auto apply = [&](bool tanh) {
    for_each_span(args.hidden, elements, [&](int64_t begin, int64_t n) {
      const T* grad = static_cast<const T*>(args.grad) + begin;
      const T* x = static_cast<const T*>(args.x) + begin;
      T* dx = args.dx ? static_cast<T*>(args.dx) + begin : nullptr;
      for_each_vector(0, n, [&](int64_t i, auto lanes) {
        const F32 total = load_ahead(x + i, lanes) + load(bias + i, lanes);
        const F32 gradient = load_ahead(grad + i, lanes) * gelu_derivative(total, tanh);
        if (dx) store(dx + i, gradient, lanes);
        if (dbias) store(dbias + i, load(dbias + i, lanes) + gradient, lanes);
      });
    });
  };
  args.tanh ? apply(true) : apply(false);
}

// silu(g) * up with silu(g) = g * sigmoid(g). Error in float32: 4 ulp.
template <class T>
[[gnu::flatten]] void swiglu_forward_elements(const SwigluForward& args, Range elements) {
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  T* y = static_cast<T*>(args.y);
  for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
    const F32 g = load_ahead(gate + i, lanes);
    store(y + i, g * sigmoid(g).value * load_ahead(up + i, lanes), lanes);
  });
}

// silu'(g) = s + g s (1 - s); both factors s and 1 - s have a small relative error.
template <class T>
[[gnu::flatten]] void swiglu_backward_elements(const SwigluBackward& args, Range elements) {
  const T* grad = static_cast<const T*>(args.grad);
  const T* gate = static_cast<const T*>(args.gate);
  const T* up = static_cast<const T*>(args.up);
  T* dgate = static_cast<T*>(args.dgate);
  T* dup = static_cast<T*>(args.dup);
  for_each_vector(elements.begin, elements.end, [&](int64_t i, auto lanes) {
    const F32 dy = load_ahead(grad + i, lanes);
    const F32 g = load_ahead(gate + i, lanes);
    const Sigmoid s = sigmoid(g);
    const F32 silu = g * s.value;
    if (dgate)
      store(dgate + i, dy * load_ahead(up + i, lanes) * (s.value + silu * s.complement), lanes);
    if (dup) store(dup + i, dy * silu, lanes);
  });
}

}  // namespace

void gelu_forward(const GeluForward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { gelu_forward_elements<decltype(t)>(args, elements); });
}

void gelu_backward(const GeluBackward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { gelu_backward_elements<decltype(t)>(args, elements); });
}

void swiglu_forward(const SwigluForward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { swiglu_forward_elements<decltype(t)>(args, elements); });
}

void swiglu_backward(const SwigluBackward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { swiglu_backward_elements<decltype(t)>(args, elements); });
}

void geglu_forward(const GegluForward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { geglu_forward_elements<decltype(t)>(args, elements); });
}

void geglu_backward(const GegluBackward& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { geglu_backward_elements<decltype(t)>(args, elements); });
}

void bias_gelu_forward(const BiasGeluForward& args, const float* bias, Range elements) {
  visit_dtype(args.dtype,
              [&](auto t) { bias_gelu_forward_elements<decltype(t)>(args, bias, elements); });
}

void bias_gelu_backward(const BiasGeluBackward& args, const float* bias, float* dbias,
                        Range elements) {
  visit_dtype(args.dtype, [&](auto t) {
    bias_gelu_backward_elements<decltype(t)>(args, bias, dbias, elements);
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
