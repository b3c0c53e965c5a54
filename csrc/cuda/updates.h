// Update rules over lists of tensors: adamw, sgd, lion, lamb. Scalars are float32 on the device.
#pragma once

#include "tensor_list.h"

namespace anychip::cuda {

// What every rule is given. `grads`, `states` and `low_precision` have the elements of `params`;
// an empty list is not given, and so is a scalar that is nullptr.
struct Update {
  TensorList params;
  std::vector<int64_t> grads, grad_dtypes;
  std::vector<int64_t> states[2];  // float32
  std::vector<int64_t> low_precision, low_dtypes;
};

struct StepScalars {
  const float* lr;
  float* step;
  const float* scale;
  const float* clip;
  const float* found_inf;
};

// Room for what begin_step leaves to the kernels of the step.
constexpr int kStepFactors = 8;

// One thread reads the scalars and leaves factors for the launches behind it; counts the step when
// `counts`, unless found_inf is set. log_beta: natural logarithms, -infinity where there is no
// beta.
cudaError_t begin_step(const StepScalars& scalars, float log_beta1, float log_beta2,
                       float weight_decay, bool counts, float* factors, Place place);

// Behind begin_step, with its factors. Betas and the like are rounded from float64 once.
cudaError_t adamw(const Update& update, const float* factors, double beta1, double beta2,
                  double eps, Place place);
cudaError_t sgd(const Update& update, const float* factors, double momentum, bool nesterov,
                double weight_decay, bool decoupled, Place place);
cudaError_t lion(const Update& update, const float* factors, double beta1, double beta2,
                 Place place);
// The learning rate of tensor t is multiplied by trust[t].
cudaError_t lamb(const Update& update, const float* factors, const float* trust, double beta1,
                 double beta2, double eps, double weight_decay, Place place);
// Adds to rows, which are 0, and to nothing else: as sums_of_squares those of the parameters, then
// those of the steps.
cudaError_t lamb_sums_of_squares(const Update& update, const float* factors, double beta1,
                                 double beta2, double eps, double weight_decay, int64_t* rows,
                                 Place place);

}  // namespace anychip::cuda
