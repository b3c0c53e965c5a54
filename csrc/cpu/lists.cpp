// Norms, clipping and unscaling over lists of tensors, over the threads.
//
// Note [Norms in any order]: chunks are added up exactly, so that neither their order nor the
// number of threads shows. l2_norm is the root of that sum rounded to float32: within 1/2 ulp and
// 10^-14 of the true norm.
#include <atomic>
#include <vector>

#include "checks.h"
#include "chunks.h"
#include "digits.h"

namespace anychip::cpu {
namespace {

ChunkGrid grid_of(const char* where, const std::vector<TensorRef>& tensors) {
  ChunkGrid grid(tensors.size());
  for (const TensorRef& tensor : tensors) {
    grid.add(where, tensor.numel);
    if (tensor.numel > 0) check_address(where, "a tensor", tensor.data);
  }
  return grid;
}

// Adds the squares of tensor i to the row at rows + i * stride.
void add_squares(const char* where, const std::vector<TensorRef>& tensors, int64_t* rows,
                 size_t stride) {
  grid_of(where, tensors).run([&](size_t tensor, int64_t, Range elements) {
    Digits digits;
    kernels().add_squares(tensors[tensor], elements, digits.row);
    digits.add_to(rows + tensor * stride);
  });
}

}  // namespace

void l2_norm(const L2Norm& args) {
  const char* where = "l2_norm";
  check_address(where, "out", args.out);
  Digits sum;
  add_squares(where, args.tensors, sum.row, 0);
  sum.carry();
  *args.out = sum.root();
}

void sums_of_squares(const SumsOfSquares& args) {
  const char* where = "sums_of_squares";
  std::vector<Digits> rows(args.tensors.size());
  if (rows.empty()) return;
  check_address(where, "out", args.out);
  add_squares(where, args.tensors, rows[0].row, kDigits);
  write_rows(rows, args.out);
}

// The coefficient as in torch.nn.utils.clip_grad_norm_; a NaN norm makes it, and the tensors, NaN.
void clip(const Clip& args) {
  const char* where = "clip";
  check_address(where, "norm", args.norm);
  const ChunkGrid grid = grid_of(where, args.tensors);
  const float ratio = static_cast<float>(args.max_norm) / (*args.norm + 1e-6f);
  if (ratio >= 1.0f) return;  // multiplying by 1 would change nothing
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().multiply(args.tensors[tensor], ratio, elements);
  });
}

void unscale_and_check(const Unscale& args) {
  const char* where = "unscale_and_check";
  check_address(where, "scale", args.scale);
  check_address(where, "found_inf", args.found_inf);
  const ChunkGrid grid = grid_of(where, args.grads);
  std::atomic<bool> all_finite{true};
  grid.run([&](size_t tensor, int64_t, Range elements) {
    if (!kernels().divide_and_check(args.grads[tensor], *args.scale, elements)) {
      all_finite.store(false, std::memory_order_relaxed);
    }
  });
  if (!all_finite.load(std::memory_order_relaxed)) *args.found_inf = 1.0f;
}

}  // namespace anychip::cpu
