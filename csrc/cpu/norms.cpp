// RMSNorm and LayerNorm, also of a sum with a residual, over the threads.
#include "checks.h"
#include "drop.h"
#include "row_blocks.h"
#include "scratch.h"

namespace anychip::cpu {
namespace {

int64_t check_rows(const char* where, int64_t rows, int64_t hidden) {
  return check_sizes(where, {{"rows", rows}, {"hidden", hidden}});
}

void check_sum(const char* where, const ResidualSum& sum) {
  if (sum.residual) check_address(where, "total", sum.total);
}

void check_gradient(const char* where, const ResidualGradient& sum, int64_t rows, int64_t hidden) {
  if (sum.drop.rng) check_drop(where, sum.drop, rows * hidden, hidden);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& args) {
  const char* where = "rms_norm_forward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "y", args.y);
    check_sum(where, args.sum);
  }
  if (args.hidden == 0 && !args.rstd) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  parallel_items(args.rows, args.hidden, [&](Range rows) {
    const AlignedFloats scratch = whole_vectors(args.hidden);
    kernels().rms_norm_forward(args, weight.data(), scratch.get(), rows);
  });
}

void rms_norm_backward(const RmsNormBackward& args) {
  const char* where = "rms_norm_backward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "rstd", args.rstd);
  }
  check_gradient(where, args.sum, args.rows, args.hidden);
  if (args.hidden == 0) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  if (!args.dweight) {
    parallel_items(args.rows, args.hidden, [&](Range rows) {
      kernels().rms_norm_backward(args, weight.data(), nullptr, rows);
    });
    return;
  }
  const RowBlocks blocks(args.rows, args.hidden, 1);
  blocks.run([&](Range rows, float* dweight) {
    kernels().rms_norm_backward(args, weight.data(), dweight, rows);
  });
  blocks.write_sum(0, args.weight_dtype, args.dweight);
}

void layer_norm_forward(const LayerNormForward& args) {
  const char* where = "layer_norm_forward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "y", args.y);
    check_sum(where, args.sum);
  }
  if (args.hidden == 0 && !args.mean && !args.rstd) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  const FloatVector bias(args.bias, args.weight_dtype, args.hidden);
  parallel_items(args.rows, args.hidden, [&](Range rows) {
    const AlignedFloats scratch = whole_vectors(args.hidden);
    kernels().layer_norm_forward(args, weight.data(), bias.data(), scratch.get(), rows);
  });
}

void layer_norm_backward(const LayerNormBackward& args) {
  const char* where = "layer_norm_backward";
  if (check_rows(where, args.rows, args.hidden) > 0) {
    check_address(where, "grad", args.grad);
    check_address(where, "x", args.x);
    check_address(where, "weight", args.weight);
    check_address(where, "mean", args.mean);
    check_address(where, "rstd", args.rstd);
  }
  check_gradient(where, args.sum, args.rows, args.hidden);
  if (args.hidden == 0) return;
  const FloatVector weight(args.weight, args.weight_dtype, args.hidden);
  if (!args.dweight && !args.dbias) {
    parallel_items(args.rows, args.hidden, [&](Range rows) {
      kernels().layer_norm_backward(args, weight.data(), nullptr, nullptr, rows);
    });
    return;
  }
  const RowBlocks blocks(args.rows, args.hidden, 2);
  blocks.run([&](Range rows, float* sums) {
    kernels().layer_norm_backward(args, weight.data(), args.dweight ? sums : nullptr,
                                  args.dbias ? sums + args.hidden : nullptr, rows);
  });
  if (args.dweight) blocks.write_sum(0, args.weight_dtype, args.dweight);
  if (args.dbias) blocks.write_sum(1, args.weight_dtype, args.dbias);
}

}  // namespace anychip::cpu
