// Update rules over lists of tensors, over the threads.
//
// Note [Rounded as the references]: sgd, lion and lamb take their factors in float32, each number
// rounded where torch rounds it on a 0-dim float32 tensor; kernels/updates.cpp goes on from there.
// adamw takes its factors in float64.
#include <cmath>

#include "checks.h"
#include "chunks.h"
#include "digits.h"

namespace anychip::cpu {
namespace {

ChunkGrid grid_of(const char* where, const Update& update, int num_states) {
  check_address(where, "step", update.step);
  ChunkGrid grid(update.tensors.size());
  for (const UpdateTensor& tensor : update.tensors) {
    grid.add(where, tensor.param.numel);
    if (tensor.param.numel > 0) {
      check_address(where, "a parameter", tensor.param.data);
      check_address(where, "a gradient", tensor.grad.data);
      for (int k = 0; k < num_states; ++k) check_address(where, "a state", tensor.states[k]);
    }
  }
  return grid;
}

// Counts the step, if it is one.
bool begins(const Update& update) {
  if (update.found_inf && *update.found_inf != 0.0f) return false;
  *update.step += 1.0f;
  return true;
}

float rounded(double value) { return static_cast<float>(value); }

// The product is rounded before the subtraction: the compiler may not join the two.
float decay_of(float lr, double weight_decay) {
  const double product = static_cast<double>(lr) * rounded(weight_decay);
  return 1.0f - rounded(product);
}

GradFactors grad_factors(const Update& update) {
  return {update.scale ? *update.scale : 1.0f, update.clip ? *update.clip : 1.0f};
}

AdamWFactors factors_of(const AdamW& options) {
  const Update& update = options.update;
  const double lr = *update.lr;
  const double step = *update.step;
  const double scale = update.scale ? *update.scale : 1.0;
  const double clip = update.clip ? *update.clip : 1.0;
  AdamWFactors factors;
  factors.grad = rounded(clip / scale);
  factors.decay = rounded(1.0 - lr * options.weight_decay);
  factors.beta1 = rounded(options.beta1);
  factors.one_minus_beta1 = rounded(1.0 - options.beta1);
  factors.beta2 = rounded(options.beta2);
  factors.one_minus_beta2 = rounded(1.0 - options.beta2);
  factors.update = rounded(lr / (1.0 - std::pow(options.beta1, step)));
  factors.inverse_root = rounded(1.0 / std::sqrt(1.0 - std::pow(options.beta2, step)));
  factors.eps = rounded(options.eps);
  return factors;
}

void run_adamw(const ChunkGrid& grid, const AdamW& args, decltype(KernelTable::adamw) kernel) {
  if (!begins(args.update)) return;
  const AdamWFactors factors = factors_of(args);
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernel(args.update.tensors[tensor], factors, elements);
  });
}

template <class Options>
LambFactors lamb_factors(const Options& options) {
  return {
      grad_factors(options.update), rounded(options.beta1),       rounded(1.0 - options.beta1),
      rounded(options.beta2),       rounded(1.0 - options.beta2), *options.correction1,
      *options.correction2,         rounded(options.eps),         rounded(options.weight_decay)};
}

}  // namespace

void adamw(const AdamW& args) {
  const char* where = "adamw";
  check_address(where, "lr", args.update.lr);
  run_adamw(grid_of(where, args.update, 2), args, kernels().adamw);
}

void adamw_8bit(const AdamW& args) {
  const Update& update = args.update;
  const char* where = "adamw_8bit";
  static_assert(kChunk % kStateBlock == 0, "a chunk begins where a block does");
  check_address(where, "lr", update.lr);
  const ChunkGrid grid = grid_of(where, update, 2);
  for (const UpdateTensor& tensor : update.tensors) {
    if (tensor.param.numel == 0) continue;
    for (const float* scales : tensor.scales) check_address(where, "a state's scales", scales);
  }
  run_adamw(grid, args, kernels().adamw_8bit);
}

void sgd(const Sgd& options) {
  const Update& update = options.update;
  const char* where = "sgd";
  check_address(where, "lr", update.lr);
  const ChunkGrid grid = grid_of(where, update, options.momentum != 0.0 ? 1 : 0);
  if (!begins(update)) return;
  const SgdFactors factors = {grad_factors(update),
                              *update.lr,
                              decay_of(*update.lr, options.weight_decay),
                              rounded(options.weight_decay),
                              rounded(options.momentum),
                              options.nesterov,
                              options.decoupled};
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().sgd(update.tensors[tensor], factors, elements);
  });
}

void lion(const Lion& options) {
  const Update& update = options.update;
  const char* where = "lion";
  check_address(where, "lr", update.lr);
  const ChunkGrid grid = grid_of(where, update, 1);
  if (!begins(update)) return;
  const LionFactors factors = {grad_factors(update),
                               *update.lr,
                               decay_of(*update.lr, options.weight_decay),
                               rounded(options.beta1),
                               rounded(1.0 - options.beta1),
                               rounded(options.beta2),
                               rounded(1.0 - options.beta2)};
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().lion(update.tensors[tensor], factors, elements);
  });
}

void lamb(const Lamb& options) {
  const Update& update = options.update;
  const char* where = "lamb";
  check_address(where, "lr", update.lr);
  check_address(where, "correction1", options.correction1);
  check_address(where, "correction2", options.correction2);
  if (!update.tensors.empty()) check_address(where, "trust", options.trust);
  const ChunkGrid grid = grid_of(where, update, 2);
  if (!begins(update)) return;
  const LambFactors factors = lamb_factors(options);
  grid.run([&](size_t tensor, int64_t, Range elements) {
    kernels().lamb(update.tensors[tensor], factors, *update.lr * options.trust[tensor], elements);
  });
}

void lamb_sums_of_squares(const LambSums& options) {
  const Update& update = options.update;
  const char* where = "lamb_sums_of_squares";
  check_address(where, "correction1", options.correction1);
  check_address(where, "correction2", options.correction2);
  const size_t count = update.tensors.size();
  if (count > 0) check_address(where, "out", options.out);
  const ChunkGrid grid = grid_of(where, update, 2);
  const LambFactors factors = lamb_factors(options);
  std::vector<Digits> rows(2 * count);
  grid.run([&](size_t tensor, int64_t, Range elements) {
    Digits weights, steps;
    kernels().add_lamb_squares(update.tensors[tensor], factors, elements, weights.row, steps.row);
    weights.add_to(rows[tensor].row);
    steps.add_to(rows[count + tensor].row);
  });
  write_rows(rows, options.out);
}

}  // namespace anychip::cpu
