// Softmax of rows of scores, and its gradient.
//
// Rounding: a score has one or, with a bias, two; exp(score - largest) has 1 ulp, and the sum of
// those is as in Note [Row sums] of loops.h; the quotient is a product with the rounded inverse.
// The gradient has 4 beyond those of its sum, which is taken likewise.
#include "codes.h"
#include "loops.h"
#include "math.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

constexpr float kInfinity = __builtin_inff();

// scores: whole vectors for (keys,), which are stored whole (float_row of rows.h says why). Returns
// the largest that is not NaN; -infinity if there is none.
template <class T, class B>
ANYCHIP_INLINE float write_scores(const T* x, const uint8_t* mask, const B* bias, float scale,
                                  int64_t keys, float* scores) {
  F32 largest = fill<F32>(-kInfinity);
  for_each_vector(0, keys, [&](int64_t i, auto lanes) {
    F32 score = load_ahead(x + i, lanes) * scale;
    if (bias) score = score + load(bias + i, lanes);
    if (mask) score = select(load_bytes(mask + i, lanes) == 0u, fill<F32>(-kInfinity), score);
    largest = maximum(replace_rest(score, lanes, -kInfinity), largest);
    store(scores + i, score, AllLanes{});
  });
  return largest_lane(largest);
}

template <class T, class B>
[[gnu::flatten]] void forward(const SoftmaxForward& args, float* scores, Range rows) {
  const float scale = static_cast<float>(args.scale);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* x = static_cast<const T*>(args.x) + row * args.keys;
    T* y = static_cast<T*>(args.y) + row * args.keys;
    const auto* mask = reinterpret_cast<const uint8_t*>(args.mask);
    if (mask) mask += args.mask_rows[row];
    const B* bias = static_cast<const B*>(args.bias);
    if (bias) bias += args.bias_rows[row];
    int64_t visible = args.keys;
    if (args.causal) {
      const int64_t last = row % args.queries + args.keys - args.queries;
      visible = last < 0 ? 0 : last + 1;
    }
    const float largest = write_scores(x, mask, bias, scale, visible, scores);
    float factor;
    if (largest == -kInfinity) {  // nothing is visible, or NaN is
      factor = sum_over(visible, [&](int64_t i, auto lanes) {
        const F32 score = load(scores + i, lanes);
        return select(score < 0.0f, F32{}, score);
      });
      visible = 0;
    } else {
      factor = 1.0f / sum_over(visible, [&](int64_t i, auto lanes) {
                 const F32 weight = exp(load(scores + i, lanes) - largest);
                 store(scores + i, weight, AllLanes{});
                 return replace_rest(weight, lanes, 0.0f);
               });
    }
    for_each_vector(0, visible, [&](int64_t i, auto lanes) {
      store(y + i, load(scores + i, lanes) * factor, lanes);
    });
    const F32 hidden = fill<F32>(0.0f * factor);
    for_each_vector(visible, args.keys,
                    [&](int64_t i, auto lanes) { store(y + i, hidden, lanes); });
  }
}

template <class T>
[[gnu::flatten]] void backward(const SoftmaxBackward& args, Range rows) {
  const float scale = static_cast<float>(args.scale);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* grad = static_cast<const T*>(args.grad) + row * args.keys;
    const T* y = static_cast<const T*>(args.y) + row * args.keys;
    T* dx = static_cast<T*>(args.dx) + row * args.keys;
    const float along = sum_over(args.keys, [&](int64_t i, auto lanes) {
      return load_ahead(grad + i, lanes) * load_ahead(y + i, lanes);
    });
    for_each_vector(0, args.keys, [&](int64_t i, auto lanes) {
      store(dx + i, load(y + i, lanes) * (load(grad + i, lanes) - along) * scale, lanes);
    });
  }
}

}  // namespace

void softmax_forward(const SoftmaxForward& args, float* scratch, Range rows) {
  visit_dtype(args.dtype, [&](auto t) {
    visit_dtype(args.bias ? args.bias_dtype : DType::kFloat32,
                [&](auto b) { forward<decltype(t), decltype(b)>(args, scratch, rows); });
  });
}

void softmax_backward(const SoftmaxBackward& args, Range rows) {
  visit_dtype(args.dtype, [&](auto t) { backward<decltype(t)>(args, rows); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
