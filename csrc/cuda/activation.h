// Activations: gelu, bias_gelu, swiglu, geglu. All arrays are contiguous; `tanh` picks gelu's
// approximation. A gradient that is nullptr is not wanted.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// y = gelu(x) of `numel` elements.
cudaError_t gelu_forward(const void* x, void* y, int64_t numel, bool tanh, DType dtype,
                         Place place);
// dx = grad * gelu'(x).
cudaError_t gelu_backward(const void* grad, const void* x, void* dx, int64_t numel, bool tanh,
                          DType dtype, Place place);

// A matrix (rows, hidden) with one bias per column, of a dtype of its own.
struct BiasedRows {
  const void* x;
  const void* bias;
  int64_t rows;
  int64_t hidden;
  DType dtype;
  DType bias_dtype;
};

// y = gelu(x + bias); the sum stays float32.
cudaError_t bias_gelu_forward(const BiasedRows& input, void* y, bool tanh, Place place);
// dx = grad * gelu'(x + bias); dbias, in the bias's dtype, is the float32 sum over rows of the
// same. partial: (parts, hidden) float32 scratch for dbias; parts is at least 1.
cudaError_t bias_gelu_backward(const void* grad, const BiasedRows& input, void* dx, void* dbias,
                               float* partial, int64_t parts, bool tanh, Place place);

// y = gate * sigmoid(gate) * up.
cudaError_t swiglu_forward(const void* gate, const void* up, void* y, int64_t numel, DType dtype,
                           Place place);
cudaError_t swiglu_backward(const void* grad, const void* gate, const void* up, void* dgate,
                            void* dup, int64_t numel, DType dtype, Place place);

// y = gelu(gate) * up.
cudaError_t geglu_forward(const void* gate, const void* up, void* y, int64_t numel, bool tanh,
                          DType dtype, Place place);
cudaError_t geglu_backward(const void* grad, const void* gate, const void* up, void* dgate,
                           void* dup, int64_t numel, bool tanh, DType dtype, Place place);

}  // namespace anychip::cuda
