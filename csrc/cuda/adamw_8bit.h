// AdamW over lists of tensors, with both averages as codes of 8 bits.
#pragma once

#include "updates.h"

namespace anychip::cuda {

// Elements of a tensor that share a scale.
constexpr int kCodedBlock = 256;

// `grads`, `codes`, `scales` and `low_precision` belong to the tensors of `params`; an empty list
// of copies is not given. First the averages of gradients, then those of their squares: a byte per
// element, and a float per block.
struct CodedUpdate {
  TensorList params;
  std::vector<int64_t> grads, grad_dtypes;
  std::vector<int64_t> codes[2], scales[2];
  std::vector<int64_t> low_precision, low_dtypes;
};

// Behind begin_step, with its factors.
cudaError_t adamw_8bit(const CodedUpdate& update, const float* factors, double beta1, double beta2,
                       double eps, Place place);

}  // namespace anychip::cuda
