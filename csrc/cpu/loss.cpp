// Cross-entropy over the threads: rows are independent, the reduction is one float64 sum in order.
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

  std::unique_ptr<float[]> scratch;
  float* row_loss = args.loss;
  if (!per_row) {
    scratch.reset(new float[static_cast<size_t>(options.rows)]);
    row_loss = scratch.get();
  }
  parallel_items(options.rows, options.vocab,
                 [&](Range rows) { kernels().cross_entropy_forward(args, row_loss, rows); });
  if (per_row) return;

  double sum = 0.0;
  for (int64_t row = 0; row < options.rows; ++row) sum += row_loss[row];
  if (options.reduction == Reduction::kMean) sum /= static_cast<double>(counted);  // 0 / 0 is NaN
  *args.loss = static_cast<float>(sum);
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
  parallel_items(options.rows, options.vocab,
                 [&](Range rows) { kernels().cross_entropy_backward(args, divisor, rows); });
}

}  // namespace anychip::cpu
