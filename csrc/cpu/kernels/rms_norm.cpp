// RMSNorm (Zhang and Sennrich 2019): y = x / sqrt(mean(x^2) + eps) * weight, over rows.
//
// Rounding: the sum of squares as in Note [Row sums] of loops.h; rstd is rounded once from float64
// (so it has half the relative error of the sum + 1/2 ulp); y takes two multiplications and the
// rounding to x's type: in float32 |error| <= (n / 128 + 7) * 2^-24 * |y|, in practice 2 ulp.
// Backward: c = sum(grad * weight * x) as in Note [Row sums]; dx has 4 roundings beyond c. dweight
// is a sum over rows in order, of terms with 2 roundings; norms.cpp states how rows are grouped.
#include "loops.h"
#include "rows.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {

[[gnu::flatten]] void rms_norm_forward(const RmsNormForward& args, const float* weight,
                                       float* scratch, Range rows) {
  const int64_t hidden = args.hidden;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* x = normed_row(args, row * hidden, scratch);

    const float squares = sum_over(hidden, [&](int64_t i, auto lanes) {
      const F32 v = load(x + i, lanes);
      return v * v;
    });
    const double mean = static_cast<double>(squares) / static_cast<double>(hidden);
    const float rstd = static_cast<float>(1.0 / __builtin_sqrt(mean + args.eps));
    if (args.rstd) args.rstd[row] = rstd;

    visit_dtype(args.dtype, [&](auto t) {
      auto* y = static_cast<decltype(t)*>(args.y) + row * hidden;
      for_each_vector(0, hidden, [&](int64_t i, auto lanes) {
        store(y + i, load(x + i, lanes) * rstd * load(weight + i, lanes), lanes);
      });
    });
  }
}

namespace {

template <class T, class R>
[[gnu::flatten]] void backward(const RmsNormBackward& args, const float* weight, float* dweight,
                               Range rows) {
  const int64_t hidden = args.hidden;
  GradientDrop drop(args.sum.drop, rows, hidden);
  for_each_row<T, R>(
      args, rows,
      [&](int64_t row, const T* grad, const R* x, const R* dtotal, T* dx, R* dresidual) {
        const float rstd = args.rstd[row];

        float along_x = 0.0f;
        if (dx || dresidual) {
          const float projection = sum_over(hidden, [&](int64_t i, auto lanes) {
            return load(grad + i, lanes) * load(weight + i, lanes) * load(x + i, lanes);
          });
          const double rstd_squared = static_cast<double>(rstd) * rstd;
          along_x = static_cast<float>(projection * rstd_squared / static_cast<double>(hidden));
        }
        drop.for_each_column(row, [&](int64_t i, auto lanes, const uint32_t* word) {
          const F32 dy = load(grad + i, lanes);
          const F32 v = load(x + i, lanes);
          store_gradient((dy * load(weight + i, lanes) - v * along_x) * rstd, dtotal, dx, dresidual,
                         i, lanes, drop, word);
          if (dweight) store(dweight + i, load(dweight + i, lanes) + dy * (v * rstd), lanes);
        });
      });
}

}  // namespace

void rms_norm_backward(const RmsNormBackward& args, const float* weight, float* dweight,
                       Range rows) {
  visit_backward(args, [&](auto t, auto r) {
    backward<decltype(t), decltype(r)>(args, weight, dweight, rows);
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
