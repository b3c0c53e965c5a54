// Softmax over the threads, which share the rows.
#include <algorithm>

#include "checks.h"
#include "row_blocks.h"
#include "scratch.h"

namespace anychip::cpu {
namespace {

// Each row of `keys` elements lies within a tensor of `numel`.
void check_rows(const char* where, const char* name, const void* tensor, const int64_t* begins,
                int64_t numel, int64_t rows, int64_t keys) {
  if (!tensor || rows == 0) return;
  check_address(where, name, begins);
  const auto [low, high] = std::minmax_element(begins, begins + rows);
  check(*low >= 0 && *high <= numel - keys, where,
        std::string("expected rows of ") + name + " within its " + std::to_string(numel) +
            " elements, got one from " + std::to_string(*low < 0 ? *low : *high) + " on");
}

}  // namespace

void softmax_forward(const SoftmaxForward& args) {
  const char* where = "softmax_forward";
  const int64_t numel = check_sizes(where, {{"rows", args.rows}, {"keys", args.keys}});
  check_sizes(where, {{"queries", args.queries}});
  check_sizes(where, {{"mask_numel", args.mask_numel}});
  check_sizes(where, {{"bias_numel", args.bias_numel}});
  if (numel == 0) return;
  check_address(where, "x", args.x);
  check_address(where, "y", args.y);
  check(!args.causal || args.queries > 0, where, "expected queries >= 1 where causal, got 0");
  check_rows(where, "mask", args.mask, args.mask_rows, args.mask_numel, args.rows, args.keys);
  check_rows(where, "bias", args.bias, args.bias_rows, args.bias_numel, args.rows, args.keys);
  parallel_items(args.rows, args.keys, [&](Range rows) {
    const AlignedFloats scores = whole_vectors(args.keys);
    kernels().softmax_forward(args, scores.get(), rows);
  });
}

void softmax_backward(const SoftmaxBackward& args) {
  const char* where = "softmax_backward";
  if (check_sizes(where, {{"rows", args.rows}, {"keys", args.keys}}) == 0) return;
  check_address(where, "grad", args.grad);
  check_address(where, "y", args.y);
  check_address(where, "dx", args.dx);
  parallel_items(args.rows, args.keys, [&](Range rows) { kernels().softmax_backward(args, rows); });
}

}  // namespace anychip::cpu
