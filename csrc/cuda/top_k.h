// The largest magnitudes of rows: top_k and its gradient.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// Bytes of scratch for a call, 16-byte aligned; 0 where a row is the work of one block.
int64_t top_k_scratch(int64_t rows, int64_t length, int64_t k, int multiprocessors);

// values and indices of the k largest |x| of each row, the largest first, the lower index first of
// equal ones; NaN is the largest. A row is shorter than 2^32.
cudaError_t top_k(const void* x, void* values, int64_t* indices, void* scratch, int64_t rows,
                  int64_t length, int64_t k, int multiprocessors, DType dtype, Place place);
// dx: grad where a value came from, 0 elsewhere.
cudaError_t top_k_backward(const void* grad, const int64_t* indices, void* dx, int64_t rows,
                           int64_t length, int64_t k, DType dtype, Place place);

}  // namespace anychip::cuda
