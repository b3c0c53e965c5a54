// Dropout, alone and before a residual's sum, over the threads.
#include "checks.h"
#include "drop.h"
#include "row_blocks.h"

namespace anychip::cpu {
void dropout(const Dropout& args) {
  const char* where = "dropout";
  check_sizes(where, {{"numel", args.numel}});
  check_drop(where, args.drop, args.numel, args.columns);
  if (args.numel > 0) {
    check_address(where, "x", args.x);
    check_address(where, "y", args.y);
  }
  parallel_elements(args.numel, [&](Range elements) { kernels().dropout(args, elements); });
}

void bias_dropout_add(const BiasDropoutAdd& args) {
  const char* where = "bias_dropout_add";
  const int64_t numel = check_sizes(where, {{"rows", args.rows}, {"hidden", args.hidden}});
  check_drop(where, args.drop, numel, args.hidden);
  if (numel == 0) return;
  check_address(where, "x", args.x);
  check_address(where, "residual", args.residual);
  check_address(where, "y", args.y);
  // Rows that have numbers stay themselves.
  const WideRows rows(args.bias, args.bias_dtype, args.rows, args.hidden, !args.drop.rows);
  BiasDropoutAdd wide = args;
  wide.hidden = rows.width();
  rows.run([&](Range elements) { kernels().bias_dropout_add(wide, rows.bias(), elements); });
}

void bias_dropout_backward(const BiasDropoutBackward& args) {
  const char* where = "bias_dropout_backward";
  const int64_t numel = check_sizes(where, {{"rows", args.rows}, {"hidden", args.hidden}});
  check_drop(where, args.drop, numel, args.hidden);
  if (numel > 0) check_address(where, "grad", args.grad);
  if (args.hidden == 0) return;
  const WideRows rows(nullptr, DType::kFloat32, args.rows, args.hidden, !args.drop.rows);
  BiasDropoutBackward wide = args;
  wide.hidden = rows.width();
  const auto run = [&](Range elements, float* dbias) {
    kernels().bias_dropout_backward(wide, dbias, elements);
  };
  if (args.dbias) return rows.run_sum(DType::kFloat32, args.dbias, run);
  rows.run([&](Range elements) { run(elements, nullptr); });
}

}  // namespace anychip::cpu
