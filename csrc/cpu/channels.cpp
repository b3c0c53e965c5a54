// GroupNorm and conv1d over the threads, which share the groups or channels of all of the batch,
// and what makes channels the innermost dim, or others.
//
// What weights get is summed by each channel of each part of the batch, and then over the batch in
// order, in float64.
#include <algorithm>
#include <memory>

#include "checks.h"
#include "row_blocks.h"

namespace anychip::cpu {
namespace {

using Floats = std::unique_ptr<float[]>;

Floats floats(int64_t count) { return Floats(new float[static_cast<size_t>(count)]); }

// sums: (batch, channels, stride). Writes (channels, count) sums over the batch.
void write_sums(const float* sums, int64_t batch, int64_t channels, int64_t stride, int64_t first,
                int64_t count, DType dtype, void* out) {
  const Floats totals = floats(channels * count);
  for (int64_t i = 0; i < channels * count; ++i) {
    double total = 0.0;
    for (int64_t n = 0; n < batch; ++n) {
      total += sums[(n * channels + i / count) * stride + first + i % count];
    }
    totals[static_cast<size_t>(i)] = static_cast<float>(total);
  }
  kernels().from_float(dtype, totals.get(), out, channels * count);
}

// Returns how many numbers a group has.
template <class Args>
int64_t check_groups(const char* where, const Args& args) {
  const Size batch{"batch", args.batch}, size{"size", args.size};
  const int64_t numel = check_sizes(where, {batch, {"channels", args.channels}, size});
  check(args.groups > 0 && args.channels % args.groups == 0, where,
        "expected channels in groups of one size, got " + std::to_string(args.channels) + " in " +
            std::to_string(args.groups));
  check_sizes(where, {batch, {"groups", args.groups}});
  check_address(where, "mean", args.mean);
  check_address(where, "rstd", args.rstd);
  if (numel > 0) check_address(where, "x", args.x);
  if (args.channels > 0) check_address(where, "weight", args.weight);
  return args.channels / args.groups * args.size;
}

template <class Args>
int64_t check_taps(const char* where, const Args& args) {
  const Size channels{"channels", args.channels};
  const int64_t numel =
      check_sizes(where, {{"batch", args.batch}, channels, {"length", args.length}});
  if (check_sizes(where, {channels, {"taps", args.taps}}) > 0) {
    check_address(where, "weight", args.weight);
  }
  check(args.taps > 0, where, "expected taps >= 1, got 0");
  check_sizes(where, {{"batch", args.batch}, channels, {"taps and one", args.taps + 1}});
  if (numel > 0) check_address(where, "x", args.x);
  return numel;
}

}  // namespace

void group_norm_forward(const GroupNormForward& args) {
  const char* where = "group_norm_forward";
  const int64_t group = check_groups(where, args);
  if (group > 0) check_address(where, "y", args.y);
  const FloatVector weight(args.weight, args.weight_dtype, args.channels);
  const FloatVector bias(args.bias, args.weight_dtype, args.channels);
  parallel_items(args.batch * args.groups, group, [&](Range rows) {
    kernels().group_norm_forward(args, weight.data(), bias.data(), rows);
  });
}

void group_norm_backward(const GroupNormBackward& args) {
  const char* where = "group_norm_backward";
  const int64_t group = check_groups(where, args);
  if (args.batch * group > 0) check_address(where, "grad", args.grad);
  const FloatVector weight(args.weight, args.weight_dtype, args.channels);
  const Floats sums = floats(args.batch * args.channels * 2);
  parallel_items(args.batch * args.groups, group, [&](Range rows) {
    kernels().group_norm_backward(args, weight.data(), sums.get(), rows);
  });
  const auto write = [&](int64_t first, void* out) {
    if (!out) return;
    write_sums(sums.get(), args.batch, args.channels, 2, first, 1, args.weight_dtype, out);
  };
  write(1, args.dweight);
  write(0, args.dbias);
}

void conv1d_forward(const Conv1dForward& args) {
  const char* where = "conv1d_forward";
  if (check_taps(where, args) == 0) return;
  check_address(where, "y", args.y);
  const FloatVector weight(args.weight, args.weight_dtype, args.channels * args.taps);
  const FloatVector bias(args.bias, args.weight_dtype, args.channels);
  parallel_items(args.batch * args.channels, args.length, [&](Range rows) {
    const Floats scratch = floats(args.length + args.taps);
    kernels().conv1d_forward(args, weight.data(), bias.data(), scratch.get(), rows);
  });
}

void conv1d_backward(const Conv1dBackward& args) {
  const char* where = "conv1d_backward";
  if (check_taps(where, args) > 0) check_address(where, "grad", args.grad);
  const FloatVector weight(args.weight, args.weight_dtype, args.channels * args.taps);
  const int64_t stride = args.taps + 1;
  const bool sums_up = args.dweight || args.dbias;
  const Floats sums = floats(sums_up ? args.batch * args.channels * stride : 0);
  parallel_items(args.batch * args.channels, args.length, [&](Range rows) {
    const Floats scratch = floats(2 * (args.length + args.taps));
    kernels().conv1d_backward(args, weight.data(), sums_up ? sums.get() : nullptr, scratch.get(),
                              rows);
  });
  const auto write = [&](int64_t first, int64_t count, void* out) {
    if (!out) return;
    write_sums(sums.get(), args.batch, args.channels, stride, first, count, args.weight_dtype, out);
  };
  write(0, args.taps, args.dweight);
  write(args.taps, 1, args.dbias);
}

void turn(const Turned& args) {
  const char* where = "turn";
  const Size rows{"rows", args.rows}, columns{"columns", args.columns};
  if (check_sizes(where, {{"batch", args.batch}, rows, columns}) == 0) return;
  check_address(where, "x", args.x);
  check_address(where, "y", args.y);
  const int64_t parts = (args.columns + kTurnedColumns - 1) / kTurnedColumns;
  parallel_items(args.batch * parts, args.rows * std::min(args.columns, kTurnedColumns),
                 [&](Range some) { kernels().turn(args, some); });
}

}  // namespace anychip::cpu
