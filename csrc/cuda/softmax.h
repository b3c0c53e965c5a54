// softmax over the last dim, with a scale, a mask, a bias and causality; its gradients.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// Dims before the last one, merged by the caller, leading sizes 1 where there are fewer.
constexpr int kRowDims = 4;

// A mask or a bias that is broadcast to x: its strides, in elements, 0 along a dim that it lacks.
struct Broadcast {
  const void* values;  // nullptr: none
  int64_t strides[kRowDims];
  int64_t key_stride;  // 0 or 1
};

// x is contiguous (sizes..., keys): `rows` rows, fewer than 2^31, of which every `queries`
// following ones are a sequence. The mask is of bytes, of which 0 hides; bias_dtype is float32 or
// x's own.
struct Softmax {
  int64_t rows;
  int64_t keys;
  int64_t queries;
  int64_t sizes[kRowDims];
  Broadcast mask;
  Broadcast bias;
  float scale;
  bool causal;  // query i sees keys up to i + keys - queries
  DType dtype;
  DType bias_dtype;
};

cudaError_t softmax_forward(const void* x, void* y, const Softmax& call, Place place);

// dx = scale ds for ds = y (grad - sum grad y). Of each row, where wanted: the sum of grad y, and
// the sum of ds. What is nullptr is not wanted. Masks and biases are not looked at.
struct SoftmaxGradients {
  void* dx;
  float* inner;     // (rows,)
  float* row_sums;  // (rows,)
};
cudaError_t softmax_backward(const void* grad, const void* y, const SoftmaxGradients& wanted,
                             const Softmax& call, Place place);

// Rows that share an entry of the bias: entry (o, key) sums over row r of the reduced dims at
// row(o) + row(r). Strides are in rows.
struct SharedRows {
  int64_t sizes[kRowDims];
  int64_t strides[kRowDims];
  int64_t reduced_sizes[kRowDims];
  int64_t reduced_strides[kRowDims];
};

// dbias, in its dtype: the sums of ds over shared rows. grad nullptr: y is (rows, keys) float32 and
// is itself summed. partial: (parts, entries of the bias) float32 scratch.
cudaError_t softmax_bias_gradient(const void* grad, const void* y, const float* inner,
                                  const SharedRows& shared, int64_t keys, float* partial,
                                  int64_t parts, void* dbias, DType dtype, DType bias_dtype,
                                  Place place);

}  // namespace anychip::cuda
