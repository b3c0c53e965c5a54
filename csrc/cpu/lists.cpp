// The operators over lists of tensors, over the threads.
//
// All tensors of a list are cut into chunks of 16384 elements, each tensor on its own, and the
// chunks are shared among the threads: many small tensors cost one parallel region.
//
// Note [Norm on a fixed grid]: l2_norm sums squares in float64, chunk by chunk, and adds the chunks
// in order. The result is the square root rounded to float32: within 1/2 ulp and 10^-12 of the true
// norm, for any number of threads.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "checks.h"
#include "parallel.h"

namespace anychip::cpu {
namespace {

constexpr int64_t kChunk = 16384;

// Which tensor a chunk belongs to, and its elements.
class ChunkGrid {
 public:
  explicit ChunkGrid(size_t tensors) { first_.reserve(tensors + 1); }

  void add(int64_t numel) {
    numel_.push_back(numel);
    first_.push_back(first_.back() + (numel + kChunk - 1) / kChunk);
  }

  int64_t chunks() const { return first_.back(); }

  // work(tensor, chunk, elements) for every chunk.
  template <class Work>
  void run(const Work& work) const {
    parallel_items(chunks(), average(), [&](Range range) {
      auto next = std::upper_bound(first_.begin(), first_.end(), range.begin);
      for (int64_t chunk = range.begin; chunk < range.end; ++chunk) {
        while (*next <= chunk) ++next;
        const size_t tensor = static_cast<size_t>(next - first_.begin()) - 1;
        const int64_t begin = (chunk - first_[tensor]) * kChunk;
        work(tensor, chunk, Range{begin, std::min(numel_[tensor], begin + kChunk)});
      }
    });
  }

 private:
  // Elements per chunk, so that a list of many tiny tensors is not taken for a large one.
  int64_t average() const {
    int64_t total = 0;
    for (const int64_t numel : numel_) total += numel;
    return chunks() == 0 ? 0 : (total + chunks() - 1) / chunks();
  }

  std::vector<int64_t> numel_;
  std::vector<int64_t> first_ = {0};
};

ChunkGrid grid_of(const char* where, const std::vector<TensorRef>& tensors) {
  ChunkGrid grid(tensors.size());
  for (const TensorRef& tensor : tensors) {
    check_size(where, "numel", tensor.numel);
    if (tensor.numel > 0) check_address(where, "a tensor", tensor.data);
    grid.add(tensor.numel);
  }
  return grid;
}

AdamWFactors factors_of(const AdamW& args, double step) {
  const double lr = *args.lr;
  const double scale = args.scale ? *args.scale : 1.0;
  const double clip = args.clip ? *args.clip : 1.0;
  AdamWFactors factors;
  factors.grad = static_cast<float>(clip / scale);
  factors.decay = static_cast<float>(1.0 - lr * args.weight_decay);
  factors.beta1 = static_cast<float>(args.beta1);
  factors.one_minus_beta1 = static_cast<float>(1.0 - args.beta1);
  factors.beta2 = static_cast<float>(args.beta2);
  factors.one_minus_beta2 = static_cast<float>(1.0 - args.beta2);
  factors.update = static_cast<float>(lr / (1.0 - std::pow(args.beta1, step)));
  factors.inverse_root = static_cast<float>(1.0 / std::sqrt(1.0 - std::pow(args.beta2, step)));
  factors.eps = static_cast<float>(args.eps);
  return factors;
}

}  // namespace

void adamw(const AdamW& args) {
  const char* where = "adamw";
  check_address(where, "lr", args.lr);
  check_address(where, "step", args.step);
  ChunkGrid grid(args.tensors.size());
  for (const AdamWTensor& tensor : args.tensors) {
    check_size(where, "numel", tensor.param.numel);
    if (tensor.param.numel > 0) {
      check_address(where, "a parameter", tensor.param.data);
      check_address(where, "a gradient", tensor.grad.data);
      check_address(where, "an exp_avg", tensor.exp_avg);
      check_address(where, "an exp_avg_sq", tensor.exp_avg_sq);
    }
    grid.add(tensor.param.numel);
  }
  if (args.found_inf && *args.found_inf != 0.0f) return;
  *args.step += 1.0f;
  const AdamWFactors factors = factors_of(args, *args.step);
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().adamw(args.tensors[tensor], factors, elements);
  });
}

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
