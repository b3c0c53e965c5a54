// Rows of logits: log-sum-exp and sum, and the gradients of what is made of these (loss.cpp).
//
// Rounding: exp(logit - max) is summed as in Note [Row sums] of loops.h, with 2 ulp per term; the
// logarithm is float64. A gradient's exp(logit - lse) carries the rounding of the float32 lse, a
// relative error of 2^-24 * |lse|, and has 3 roundings more, and at the column 4.
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
    __builtin_prefetch(x + n + i, 0, 2);  // the next row, whose largest is looked for without work
    return replace_rest(exp(load(x + i, lanes) - shift), lanes, 0.0f);
  });
  return static_cast<double>(shift) + __builtin_log(static_cast<double>(sum));
}

template <class T>
[[gnu::flatten]] void sum(const T* logits, int64_t vocab, const int64_t* columns, bool wants_total,
                          LogitSums* sums, Range rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* x = logits + row * vocab;
    const int64_t column = columns[row];
    float total = 0.0f;
    if (wants_total) {
      total = sum_over(vocab, [&](int64_t i, auto lanes) { return load(x + i, lanes); });
    }
    sums[row] = {log_sum_exp(x, vocab), column < 0 ? 0.0f : load_one(x + column), total};
  }
}

template <class T>
[[gnu::flatten]] void slope(const T* logits, int64_t vocab, const LogitSlopes* slopes, T* dlogits,
                            Range rows) {
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const T* x = logits + row * vocab;
    T* dx = dlogits + row * vocab;
    const LogitSlopes& own = slopes[row];
    if (own.column == kIgnored) {
      for_each_vector(0, vocab, [&](int64_t i, auto lanes) { store(dx + i, F32{}, lanes); });
      continue;
    }
    const auto slope_at = [&](F32 logit) { return exp(logit - own.lse) * own.by_exp + own.by_all; };
    const FirstLanes one{1};
    const F32 at_column = own.column < 0 ? F32{} : load(x + own.column, one);
    for_each_vector(0, vocab, [&](int64_t i, auto lanes) {
      store(dx + i, slope_at(load_ahead(x + i, lanes)) * own.grad, lanes);
    });
    if (own.column < 0) continue;
    store(dx + own.column, (slope_at(at_column) + own.by_column) * own.grad, one);
  }
}

}  // namespace

void sum_logits(DType dtype, const void* logits, int64_t vocab, const int64_t* columns,
                bool wants_total, LogitSums* sums, Range rows) {
  visit_dtype(dtype, [&](auto t) {
    sum(static_cast<const decltype(t)*>(logits), vocab, columns, wants_total, sums, rows);
  });
}

void slope_logits(DType dtype, const void* logits, int64_t vocab, const LogitSlopes* slopes,
                  void* dlogits, Range rows) {
  visit_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    slope(static_cast<const T*>(logits), vocab, slopes, static_cast<T*>(dlogits), rows);
  });
}

}  // namespace anychip::cpu::ANYCHIP_ISA
