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

void l2_norm(const std::vector<TensorRef>& tensors, float* out) {
  const char* where = "l2_norm";
  check_address(where, "out", out);
  Digits sum;
  add_squares(where, tensors, sum.row, 0);
  sum.carry();
  *out = sum.root();
}

void sums_of_squares(const std::vector<TensorRef>& tensors, int64_t* out) {
  const char* where = "sums_of_squares";
  if (!tensors.empty()) check_address(where, "out", out);
  std::vector<Digits> rows(tensors.size());
  if (!rows.empty()) add_squares(where, tensors, rows[0].row, kDigits);
  write_rows(rows, out);
}

// The coefficient as in torch.nn.utils.clip_grad_norm_; a NaN norm makes it, and the tensors, NaN.
void clip(const std::vector<TensorRef>& tensors, const float* norm, double max_norm) {
  const char* where = "clip";
  check_address(where, "norm", norm);
  const ChunkGrid grid = grid_of(where, tensors);
  const float ratio = static_cast<float>(max_norm) / (*norm + 1e-6f);
  if (ratio >= 1.0f) return;  // multiplying by 1 would change nothing
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().multiply(tensors[tensor], ratio, elements);
  });
}

void unscale_and_check(const std::vector<TensorRef>& grads, const float* scale, float* found_inf) {
  const char* where = "unscale_and_check";
  check_address(where, "scale", scale);
  check_address(where, "found_inf", found_inf);
  const ChunkGrid grid = grid_of(where, grads);
  std::atomic<bool> all_finite{true};
  grid.run([&](size_t tensor, int64_t, Range elements) {
    if (!kernels().divide_and_check(grads[tensor], *scale, elements)) {
      all_finite.store(false, std::memory_order_relaxed);
    }
  });
  if (!all_finite.load(std::memory_order_relaxed)) *found_inf = 1.0f;
}

}  // namespace anychip::cpu
