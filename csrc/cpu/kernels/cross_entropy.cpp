// Cross-entropy of rows of logits: log-sum-exp, loss, and gradient.
//
// Per row: nll = lse - logit[target], smooth = lse - mean(logits),
// loss = (1 - ls) nll + ls smooth + z lse^2; gradient with p = exp(logit - lse):
// (1 + 2 z lse) p - ls / vocab - (1 - ls) [target].
//
// Rounding: exp(logit - max) is summed as in Note [Row sums] of loops.h, with 2 ulp per term; the
// logarithm and all that follows is float64, rounded once for lse and once for the loss. In the
// gradient p carries the rounding of the float32 lse, a relative error of 2^-24 * |lse|, and 3
// roundings more.
#include "loops.h"
#include "math.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// The largest logit that is not NaN; -infinity if there is none.
template <class T>
ANYCHIP_INLINE float largest_of(const T* x, int64_t n) {
  F32 a = fill<F32>(-kInfinity), b = a;
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    a = maximum(load(x + i, AllLanes{}), a);
    b = maximum(load(x + i + kLanes, AllLanes{}), b);
  }
  for_each_vector(i, n, [&](int64_t at, auto lanes) {
    a = maximum(replace_rest(load(x + at, lanes), lanes, -kInfinity), a);
  });
  return largest_lane(maximum(a, b));
}

// Infinity if a logit is, -infinity if all are, NaN if one is.
template <class T>
ANYCHIP_INLINE double log_sum_exp(const T* x, int64_t n) {
  const float largest = largest_of(x, n);
  if (largest == kInfinity) {
    return sum_over(n, [&](int64_t i, auto lanes) {
      const F32 v = load(x + i, lanes);
      return select(v < 0.0f, F32{}, v);
    });
  }
  const float shift = largest == -kInfinity ? 0.0f : largest;
  const float sum = sum_over(n, [&](int64_t i, auto lanes) {
    return replace_rest(exp(load(x + i, lanes) - shift), lanes, 0.0f);
  });
  return static_cast<double>(shift) + __builtin_log(static_cast<double>(sum));
}

template <class T>
[[gnu::flatten]] void forward(const CrossEntropyForward& args, float* row_loss, Range rows) {
  const CrossEntropyOptions& options = args.options;
  const int64_t vocab = options.vocab;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * vocab;
    const double lse = log_sum_exp(x, vocab);
    if (args.lse) args.lse[row] = static_cast<float>(lse);

    const int64_t target = args.target[row];
    if (target == options.ignore_index) {
      row_loss[row] = 0.0f;
      continue;
    }
    double loss = (1.0 - options.label_smoothing) * (lse - load_one(x + target));
    if (options.label_smoothing != 0.0) {
      const float sum = sum_over(vocab, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
      loss += options.label_smoothing * (lse - sum / static_cast<double>(vocab));
    }
    if (options.z_loss != 0.0) loss += options.z_loss * lse * lse;
    row_loss[row] = static_cast<float>(loss);
  }
}

template <class T>
[[gnu::flatten]] void backward(const CrossEntropyBackward& args, double grad_divisor, Range rows) {
  const CrossEntropyOptions& options = args.options;
  const int64_t vocab = options.vocab;
  const bool per_row = options.reduction == Reduction::kNone;
  const float spread = static_cast<float>(options.label_smoothing / static_cast<double>(vocab));
  const float certain = static_cast<float>(1.0 - options.label_smoothing);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* x = static_cast<const T*>(args.logits) + row * vocab;
    T* dx = static_cast<T*>(args.dlogits) + row * vocab;
    const int64_t target = args.target[row];
    if (target == options.ignore_index) {
      for_each_vector(0, vocab, [&](int64_t i, auto lanes) { store(dx + i, F32{}, lanes); });
      continue;
    }
    const float lse = args.lse[row];
    const float grad = static_cast<float>(args.grad[per_row ? row : 0] / grad_divisor);
    const float factor = static_cast<float>(1.0 + 2.0 * options.z_loss * lse);
    const auto towards_uniform = [&](F32 logits) { return exp(logits - lse) * factor - spread; };
    for_each_vector(0, vocab, [&](int64_t i, auto lanes) {
      store(dx + i, towards_uniform(load_ahead(x + i, lanes)) * grad, lanes);
    });
    const FirstLanes one{1};
    store(dx + target, (towards_uniform(load(x + target, one)) - certain) * grad, one);
  }
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& args, float* row_loss, Range rows) {
  visit_dtype(args.options.dtype, [&](auto t) { forward<decltype(t)>(args, row_loss, rows); });
}

void cross_entropy_backward(const CrossEntropyBackward& args, double grad_divisor, Range rows) {
  visit_dtype(args.options.dtype, [&](auto t) { backward<decltype(t)>(args, grad_divisor, rows); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
