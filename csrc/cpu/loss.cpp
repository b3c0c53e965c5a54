// Losses of logits over the threads, which share the rows.
//
// Cross-entropy, per row:
//   nll = lse - logit[target]
//   smooth = lse - mean(logits)
//   loss = (1 - ls) nll + ls smooth + z lse^2
// and its gradient, with p = exp(logit - lse):
//   (1 + 2 z lse) p - ls / vocab - (1 - ls) [target]
// All but the sums over a row is float64 and rounded once; a reduction is one float64 sum in order.
#include <memory>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

// Before anything is written. Returns how many rows are not ignored.
int64_t check_targets(const char* where, const int64_t* target,
                      const CrossEntropyOptions& options) {
  int64_t counted = 0;
  for (int64_t row = 0; row < options.rows; ++row) {
    const int64_t value = target[row];
    if (value == options.ignore_index) continue;
    if (value < 0 || value >= options.vocab) {
      throw std::out_of_range(std::string(where) + ": expected targets in [0, " +
                              std::to_string(options.vocab) + ") or ignore_index " +
                              std::to_string(options.ignore_index) + ", got " +
                              std::to_string(value) + " in row " + std::to_string(row));
    }
    ++counted;
  }
  return counted;
}

template <class T>
std::unique_ptr<T[]> array_of(int64_t count) {
  return std::unique_ptr<T[]>(new T[static_cast<size_t>(count)]);
}

// The target's column, -1 of an ignored row.
std::unique_ptr<int64_t[]> columns_of(const int64_t* target, const CrossEntropyOptions& options) {
  auto columns = array_of<int64_t>(options.rows);
  for (int64_t row = 0; row < options.rows; ++row) {
    columns[static_cast<size_t>(row)] = target[row] == options.ignore_index ? -1 : target[row];
  }
  return columns;
}

// The column of a class that may be of another part: -1.
template <class Args>
int64_t column_of(const Args& args, int64_t row) {
  const int64_t target = args.target[row];
  return target >= args.first && target - args.first < args.vocab ? target - args.first : -1;
}

std::unique_ptr<LogitSums[]> sum_all(DType dtype, const void* logits, int64_t rows, int64_t vocab,
                                     const int64_t* columns, bool wants_total) {
  auto sums = array_of<LogitSums>(rows);
  parallel_items(rows, vocab, [&](Range range) {
    kernels().sum_logits(dtype, logits, vocab, columns, wants_total, sums.get(), range);
  });
  return sums;
}

void slope_all(DType dtype, const void* logits, int64_t rows, int64_t vocab,
               const LogitSlopes* slopes, void* dlogits) {
  parallel_items(rows, vocab, [&](Range range) {
    kernels().slope_logits(dtype, logits, vocab, slopes, dlogits, range);
  });
}

template <class Args>
void check_partials(const char* where, const Args& args) {
  const int64_t numel = check_sizes(where, {{"rows", args.rows}, {"vocab", args.vocab}});
  check(args.first >= 0, where, "expected first >= 0, got " + std::to_string(args.first));
  if (args.rows > 0) check_address(where, "target", args.target);
  if (numel > 0) check_address(where, "logits", args.logits);
}

void check_options(const char* where, const CrossEntropyOptions& options) {
  check_sizes(where, {{"rows", options.rows}, {"vocab", options.vocab}});
}

}  // namespace

void cross_entropy_forward(const CrossEntropyForward& args) {
  const char* where = "cross_entropy_forward";
  const CrossEntropyOptions& options = args.options;
  check_options(where, options);
  const bool per_row = options.reduction == Reduction::kNone;
  if (!per_row || options.rows > 0) check_address(where, "loss", args.loss);
  if (options.rows > 0) {
    check_address(where, "target", args.target);
    if (options.vocab > 0) check_address(where, "logits", args.logits);
  }
  const int64_t counted = check_targets(where, args.target, options);
  const auto columns = columns_of(args.target, options);
  const bool smooths = options.label_smoothing != 0.0;
  const auto sums =
      sum_all(options.dtype, args.logits, options.rows, options.vocab, columns.get(), smooths);
  double total = 0.0;
  for (int64_t row = 0; row < options.rows; ++row) {
    const LogitSums& of_row = sums[static_cast<size_t>(row)];
    const double lse = of_row.lse;
    if (args.lse) args.lse[row] = static_cast<float>(lse);
    double loss = (1.0 - options.label_smoothing) * (lse - of_row.picked);
    if (smooths) {
      const double mean = of_row.total / static_cast<double>(options.vocab);
      loss += options.label_smoothing * (lse - mean);
    }
    if (options.z_loss != 0.0) loss += options.z_loss * lse * lse;
    const float rounded = columns[static_cast<size_t>(row)] < 0 ? 0.0f : static_cast<float>(loss);
    if (per_row) args.loss[row] = rounded;
    total += rounded;
  }
  if (per_row) return;
  if (options.reduction == Reduction::kMean) total /= static_cast<double>(counted);  // 0 / 0: NaN
  *args.loss = static_cast<float>(total);
}

void cross_entropy_backward(const CrossEntropyBackward& args) {
  const char* where = "cross_entropy_backward";
  const CrossEntropyOptions& options = args.options;
  check_options(where, options);
  if (options.rows == 0) return;
  check_address(where, "grad", args.grad);
  check_address(where, "target", args.target);
  check_address(where, "lse", args.lse);
  if (options.vocab > 0) {
    check_address(where, "logits", args.logits);
    check_address(where, "dlogits", args.dlogits);
  }
  const int64_t counted = check_targets(where, args.target, options);
  const double divisor = options.reduction == Reduction::kMean ? static_cast<double>(counted) : 1.0;
  const bool per_row = options.reduction == Reduction::kNone;
  const float spread =
      static_cast<float>(options.label_smoothing / static_cast<double>(options.vocab));
  const float certain = static_cast<float>(1.0 - options.label_smoothing);
  const auto slopes = array_of<LogitSlopes>(options.rows);
  for (int64_t row = 0; row < options.rows; ++row) {
    LogitSlopes& own = slopes[static_cast<size_t>(row)];
    const int64_t target = args.target[row];
    own.column = target == options.ignore_index ? kIgnored : target;
    own.lse = args.lse[row];
    own.by_exp = static_cast<float>(1.0 + 2.0 * options.z_loss * own.lse);
    own.by_all = -spread;
    own.by_column = -certain;
    own.grad = static_cast<float>(args.grad[per_row ? row : 0] / divisor);
  }
  slope_all(options.dtype, args.logits, options.rows, options.vocab, slopes.get(), args.dlogits);
}

void logit_partials_forward(const LogitPartials& args) {
  const char* where = "logit_partials_forward";
  check_partials(where, args);
  if (args.rows == 0) return;
  check_address(where, "lse", args.lse);
  check_address(where, "picked", args.picked);
  check_address(where, "total", args.total);
  const auto columns = array_of<int64_t>(args.rows);
  for (int64_t row = 0; row < args.rows; ++row)
    columns[static_cast<size_t>(row)] = column_of(args, row);
  const auto sums =
      sum_all(DType::kFloat32, args.logits, args.rows, args.vocab, columns.get(), true);
  for (int64_t row = 0; row < args.rows; ++row) {
    const LogitSums& of_row = sums[static_cast<size_t>(row)];
    args.lse[row] = static_cast<float>(of_row.lse);
    args.picked[row] = of_row.picked;
    args.total[row] = of_row.total;
  }
}

void logit_partials_backward(const LogitPartialsBackward& args) {
  const char* where = "logit_partials_backward";
  check_partials(where, args);
  if (args.rows == 0) return;
  for (const float* grad : {args.lse_grad, args.picked_grad, args.total_grad}) {
    check_address(where, "a gradient", grad);
  }
  check_address(where, "lse", args.lse);
  if (args.vocab > 0) check_address(where, "dlogits", args.dlogits);
  const auto slopes = array_of<LogitSlopes>(args.rows);
  for (int64_t row = 0; row < args.rows; ++row) {
    slopes[static_cast<size_t>(row)] = {
        args.lse[row], args.lse_grad[row],  args.total_grad[row], args.picked_grad[row],
        1.0f,          column_of(args, row)};
  }
  slope_all(DType::kFloat32, args.logits, args.rows, args.vocab, slopes.get(), args.dlogits);
}

}  // namespace anychip::cpu
