// Dropout, GELU and SwiGLU: one pass over the elements, each read once and written once.
#include "loops.h"
#include "math.h"
#include "philox.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

// An element keeps its value when its word n, which is word n % 4 of block offset + n / 4, is at
// least floor(p * 2^32); with rows n is signed, and / rounds down;
// what is kept is multiplied by 1 / (1 - p) in float32 and rounded once to its type. Nothing
// survives p = 1, whose threshold is no 32 bit number.
template <class T>
[[gnu::flatten]] void dropout_elements(const Dropout& args, Range elements) {
  constexpr int64_t kWords = 4 * kLanes;
  const T* x = static_cast<const T*>(args.x);
  T* y = static_cast<T*>(args.y);
  if (args.p >= 1.0) {
    for_each_vector(elements.begin, elements.end,
                    [&](int64_t i, auto lanes) { store(y + i, F32{}, lanes); });
    return;
  }
  const uint32_t threshold = static_cast<uint32_t>(args.p * 0x1p32);
  const float scale = static_cast<float>(1.0 / (1.0 - args.p));
  const uint64_t seed = static_cast<uint64_t>(args.rng[0]);
  const uint64_t offset = static_cast<uint64_t>(args.rng[1]);

  // Elements begin ... end - 1, which have the words from `word` on.
  const auto drop = [&](int64_t begin, int64_t end, int64_t word) {
    U32 words[4];
    if (word % 4 != 0) {
      philox_words(seed, offset + static_cast<uint64_t>(word >> 2), words);
      uint32_t block[4];
      __builtin_memcpy(block, words, sizeof(block));
      for (; begin < end && word % 4 != 0; ++begin, ++word) {
        const F32 scaled = load(x + begin, FirstLanes{1}) * scale;
        store(y + begin, block[word & 3] >= threshold ? scaled : F32{}, FirstLanes{1});
      }
    }
    uint64_t counter = offset + static_cast<uint64_t>(word >> 2);
    for (int64_t first = begin; first < end; first += kWords, counter += kWords / 4) {
      philox_words(seed, counter, words);
      const int64_t last = first + kWords < end ? first + kWords : end;
      for_each_vector(first, last, [&](int64_t i, auto lanes) {
        const Mask keep = words[(i - first) / kLanes] >= threshold;
        store(y + i, select(keep, load_ahead(x + i, lanes) * scale, F32{}), lanes);
      });
    }
  };
  if (args.rows == nullptr) return drop(elements.begin, elements.end, elements.begin);
  for (int64_t begin = elements.begin, end; begin < elements.end; begin = end) {
    const int64_t row = begin / args.columns, start = row * args.columns;
    end = start + args.columns < elements.end ? start + args.columns : elements.end;
    // Unsigned, because a number that is no row's may wrap.
    const uint64_t whole =
        static_cast<uint64_t>(args.rows[row]) * static_cast<uint64_t>(args.width);
    drop(begin, end,
         static_cast<int64_t>(whole + static_cast<uint64_t>(args.column + begin - start)));
  }
}

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

ANYCHIP_INLINE F32 gelu_derivative(F32 unlimited, bool tanh) {
  const F32 x = limit(unlimited);
  if (!tanh) {
    const Normal n = normal(x);
    return n.cdf + x * n.pdf;
  }
  const F32 square = x * x;
  const Sigmoid s = sigmoid(x * (kLinear + kCubic * square));
  return s.value + (s.value * s.complement) * (x * (kLinear + 3.0f * kCubic * square));
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

void dropout(const Dropout& args, Range elements) {
  visit_dtype(args.dtype, [&](auto t) { dropout_elements<decltype(t)>(args, elements); });
}

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

}  // namespace anychip::cpu::ANYCHIP_ISA
