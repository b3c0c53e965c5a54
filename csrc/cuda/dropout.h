// dropout, bias_dropout_add: the mask is Philox's, by the element's index alone.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// Element i is kept when word i % 4 of block offset + i / 4 is at least floor(p 2^32), and is then
// multiplied by 1 / (1 - p), a float32 number. rng: (seed, offset), int64, on the device.
struct Drop {
  const int64_t* rng;
  double p;  // 0 to 1
};

// y = dropout(x) of `numel` contiguous elements. It is its own gradient.
cudaError_t dropout(const void* x, void* y, int64_t numel, const Drop& drop, DType dtype,
                    Place place);

// The same of contiguous (rows, columns) that are a part of a whole of `width` columns: element j
// of row i has the word with the number at[i] * width + column + j, which may be negative, and
// wraps.
struct RowsOfWhole {
  const int64_t* at;  // (rows,)
  int64_t rows, columns, width, column;
};
cudaError_t dropout_rows(const void* x, void* y, const RowsOfWhole& part, const Drop& drop,
                         DType dtype, Place place);

// y = residual + dropout(x + bias), contiguous (rows, hidden). dtype is that of x, stream_dtype of
// residual and y: the same or float32. bias may be nullptr.
cudaError_t bias_dropout_add_forward(const void* x, const void* residual, const void* bias, void* y,
                                     int64_t rows, int64_t hidden, const Drop& drop, DType dtype,
                                     DType stream_dtype, DType bias_dtype, Place place);

// dx = dropout(grad), dresidual = grad, both of the dtype of grad; dbias, float32, is the sum over
// rows of dx before it is rounded. A gradient that is nullptr is not wanted. partial: (parts,
// hidden) float32 scratch for dbias; parts is at least 1.
cudaError_t bias_dropout_add_backward(const void* grad, void* dx, void* dresidual, float* dbias,
                                      float* partial, int64_t rows, int64_t hidden, int64_t parts,
                                      const Drop& drop, DType dtype, Place place);

}  // namespace anychip::cuda
