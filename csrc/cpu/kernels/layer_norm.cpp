// LayerNorm (Ba, Kiros, Hinton 2016): y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, rows;
// and GroupNorm (Wu and He 2018), whose rows are groups of channels with one weight for each.
//
// The mean is taken twice: a first value, then its error as the mean of x - first, which is small
// and therefore accurate; the variance is the mean square of x - first less that error squared. So
// a large common offset of x costs nothing but the rounding of x - first. All row sums as in Note
// [Row sums] of loops.h; mean and rstd are rounded once from float64. y has 5 roundings beyond rstd
// (6 with bias). The backward starts from the rounded mean: x - mean carries 2^-24 * |mean|; dx has
// 7 roundings beyond its two row sums; dweight and dbias are sums over rows in order (norms.cpp).
#include "loops.h"
#include "rows.h"
#include "table.h"

namespace anychip::cpu::ANYCHIP_ISA {
namespace {

struct Moments {
  float first, error;  // mean = first + error
  float rstd;
};

template <class T>
ANYCHIP_INLINE Moments moments(const T* x, int64_t hidden, double eps) {
  const double n = static_cast<double>(hidden);
  const float total = sum_over(hidden, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
  const float first = static_cast<float>(total / n);
  const TwoFloats centred = sum_over(hidden, [&](int64_t i, auto lanes) {
    const F32 v = replace_rest(load(x + i, lanes) - first, lanes, 0.0f);
    return TwoF32{v, v * v};
  });
  const double error = centred.first / n;
  const double spread = centred.second / n - error * error;
  const double variance = spread < 0.0 ? 0.0 : spread;
  return {first, static_cast<float>(error),
          static_cast<float>(1.0 / __builtin_sqrt(variance + eps))};
}

}  // namespace

[[gnu::flatten]] void layer_norm_forward(const LayerNormForward& args, const float* weight,
                                         const float* bias, float* scratch, Range rows) {
  const int64_t hidden = args.hidden;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* x = normed_row(args, row * hidden, scratch);

    const Moments m = moments(x, hidden, args.eps);
    if (args.mean) args.mean[row] = static_cast<float>(static_cast<double>(m.first) + m.error);
    if (args.rstd) args.rstd[row] = m.rstd;

    visit_dtype(args.dtype, [&](auto t) {
      auto* y = static_cast<decltype(t)*>(args.y) + row * hidden;
      for_each_vector(0, hidden, [&](int64_t i, auto lanes) {
        const F32 centred = (load(x + i, lanes) - m.first) - m.error;
        const F32 scaled = centred * m.rstd * load(weight + i, lanes);
        store(y + i, bias ? scaled + load(bias + i, lanes) : scaled, lanes);
      });
    });
  }
}

namespace {

template <class T, class R>
[[gnu::flatten]] void backward(const LayerNormBackward& args, const float* weight, float* dweight,
                               float* dbias, Range rows) {
  const int64_t hidden = args.hidden;
  GradientDrop drop(args.sum.drop, rows, hidden);
  for_each_row<T, R>(
      args, rows,
      [&](int64_t row, const T* grad, const R* x, const R* dtotal, T* dx, R* dresidual) {
        const float mean = args.mean[row];
        const float rstd = args.rstd[row];
        const auto normalized = [&](int64_t i, auto lanes) {
          return (load(x + i, lanes) - mean) * rstd;
        };

        float along_one = 0.0f, along_x = 0.0f;
        if (dx || dresidual) {
          const TwoFloats sums = sum_over(hidden, [&](int64_t i, auto lanes) {
            const F32 dy = load(grad + i, lanes) * load(weight + i, lanes);
            return TwoF32{dy, dy * normalized(i, lanes)};
          });
          along_one = static_cast<float>(sums.first / static_cast<double>(hidden));
          along_x = static_cast<float>(sums.second / static_cast<double>(hidden));
        }
        drop.for_each_column(row, [&](int64_t i, auto lanes, const uint32_t* word) {
          const F32 dy = load(grad + i, lanes);
          const F32 v = normalized(i, lanes);
          store_gradient((dy * load(weight + i, lanes) - along_one - v * along_x) * rstd, dtotal,
                         dx, dresidual, i, lanes, drop, word);
          if (dweight) store(dweight + i, load(dweight + i, lanes) + dy * v, lanes);
          if (dbias) store(dbias + i, load(dbias + i, lanes) + dy, lanes);
        });
      });
}

}  // namespace

void layer_norm_backward(const LayerNormBackward& args, const float* weight, float* dweight,
                         float* dbias, Range rows) {
  visit_backward(args, [&](auto t, auto r) {
    backward<decltype(t), decltype(r)>(args, weight, dweight, dbias, rows);
  });
}

namespace {

template <class T>
[[gnu::flatten]] void group_forward(const GroupNormForward& args, const float* weight,
                                    const float* bias, Range rows) {
  const int64_t channels = args.channels / args.groups, hidden = channels * args.size;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t first_channel = row % args.groups * channels;
    const T* x = static_cast<const T*>(args.x) + row * hidden;
    T* y = static_cast<T*>(args.y) + row * hidden;
    const Moments m = moments(x, hidden, args.eps);
    args.mean[row] = static_cast<float>(static_cast<double>(m.first) + m.error);
    args.rstd[row] = m.rstd;
    for (int64_t channel = 0; channel < channels; ++channel) {
      const float factor = weight[first_channel + channel];
      const float offset = bias ? bias[first_channel + channel] : 0.0f;
      const int64_t begin = channel * args.size;
      for_each_made<T>(
          {begin, begin + args.size},
          [&](int64_t i, auto lanes) {
            const F32 centred = (load(x + i, lanes) - m.first) - m.error;
            const F32 scaled = centred * m.rstd * factor;
            return bias ? scaled + offset : scaled;
          },
          [&](int64_t i, auto made, auto lanes) { store(y + i, made, lanes, false); });
    }
  }
}

template <class T>
[[gnu::flatten]] void group_backward(const GroupNormBackward& args, const float* weight,
                                     float* sums, Range rows) {
  const int64_t channels = args.channels / args.groups, size = args.size;
  const double hidden = static_cast<double>(channels * size);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const float* weights = weight + row % args.groups * channels;
    const T* grad = static_cast<const T*>(args.grad) + row * channels * size;
    const T* x = static_cast<const T*>(args.x) + row * channels * size;
    const float mean = args.mean[row], rstd = args.rstd[row];
    const auto normalized = [&](int64_t i, auto lanes) {
      return (load(x + i, lanes) - mean) * rstd;
    };
    double along_one = 0.0, along_x = 0.0;
    for (int64_t channel = 0; channel < channels; ++channel) {
      const int64_t begin = channel * size;
      const TwoFloats found = sum_over(size, [&](int64_t i, auto lanes) {
        const F32 dy = load(grad + begin + i, lanes);
        return TwoF32{dy, dy * normalized(begin + i, lanes)};
      });
      float* own = sums + 2 * (row * channels + channel);
      own[0] = found.first, own[1] = found.second;
      along_one += static_cast<double>(found.first) * weights[channel];
      along_x += static_cast<double>(found.second) * weights[channel];
    }
    if (!args.dx) continue;
    T* dx = static_cast<T*>(args.dx) + row * channels * size;
    const float one = static_cast<float>(along_one / hidden);
    const float along = static_cast<float>(along_x / hidden);
    for (int64_t channel = 0; channel < channels; ++channel) {
      const float factor = weights[channel];
      for_each_made<T>(
          {channel * size, (channel + 1) * size},
          [&](int64_t i, auto lanes) {
            const F32 v = normalized(i, lanes);
            return (load(grad + i, lanes) * factor - one - v * along) * rstd;
          },
          [&](int64_t i, auto made, auto lanes) { store(dx + i, made, lanes, false); });
    }
  }
}

}  // namespace

void group_norm_forward(const GroupNormForward& args, const float* weight, const float* bias,
                        Range rows) {
  visit_dtype(args.dtype, [&](auto t) { group_forward<decltype(t)>(args, weight, bias, rows); });
}

void group_norm_backward(const GroupNormBackward& args, const float* weight, float* sums,
                         Range rows) {
  visit_dtype(args.dtype, [&](auto t) { group_backward<decltype(t)>(args, weight, sums, rows); });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
