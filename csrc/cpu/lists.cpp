// Norms, clipping and unscaling over lists of tensors, over the threads.
//
// Note [Norm on a fixed grid]: l2_norm sums squares in float64, chunk by chunk, and adds the chunks
// in order. The result is the square root rounded to float32: within 1/2 ulp and 10^-12 of the true
// norm, for any number of threads.
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "checks.h"
#include "chunks.h"

namespace anychip::cpu {
namespace {

ChunkGrid grid_of(const char* where, const std::vector<TensorRef>& tensors,
                  int64_t chunk = kChunk) {
  ChunkGrid grid(tensors.size(), chunk);
  for (const TensorRef& tensor : tensors) {
    grid.add(where, tensor.numel);
    if (tensor.numel > 0) check_address(where, "a tensor", tensor.data);
  }
  return grid;
}

}  // namespace

void l2_norm(const std::vector<TensorRef>& tensors, float* out) {
  const char* where = "l2_norm";
  check_address(where, "out", out);
  const ChunkGrid grid = grid_of(where, tensors);
  std::vector<double> squares(static_cast<size_t>(grid.chunks()));
  grid.run([&](size_t tensor, int64_t chunk, Range elements) {
    squares[static_cast<size_t>(chunk)] = kernels().sum_of_squares(tensors[tensor], elements);
  });
  double sum = 0.0;
  for (const double square : squares) sum += square;
  *out = static_cast<float>(std::sqrt(sum));
}

void l2_norm_partials(const std::vector<TensorRef>& tensors, const BlockGrid& blocks) {
  const char* where = "l2_norm_partials";
  check_block_grid(where, blocks, tensors.size());
  const ChunkGrid grid = grid_of(where, tensors, chunk_of_blocks(blocks.block));
  for (size_t i = 0; i < tensors.size(); ++i) {
    check_place(where, blocks, i, tensors[i].numel, kMaxElements);
  }
  if (grid.chunks() > 0) check_address(where, "out", blocks.out);
  grid.run([&](size_t tensor, int64_t, Range elements) {
    const std::unique_ptr<float[]> scratch(new float[static_cast<size_t>(blocks.block)]);
    for_each_block(blocks, tensor, elements, [&](Range block, float* out) {
      *out = kernels().block_squares(tensors[tensor], block, blocks.block, scratch.get());
    });
  });
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
