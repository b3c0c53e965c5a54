// Rows of a table by their indices, and the sum of gradients of the rows that an index took.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// Indices in memory: int64, or int32 where `is_wide` is false.
struct Indices {
  const void* data;
  bool is_wide;
};

// y[i] = weight[indices[i]] for `count` indices; rows of `width` elements, bit for bit. A row whose
// index is not from 0 to num_rows - 1 is NaN: a device cannot raise.
cudaError_t embedding_forward(const Indices& indices, const void* weight, void* y, int64_t count,
                              int64_t num_rows, int64_t width, DType dtype, Place place);

// How many int64 and how many floats of scratch embedding_backward needs.
int64_t embedding_starts(int64_t num_rows);
int64_t embedding_partials(int64_t count, int64_t width);

// dweight[v] = sum of grad[order[i]] over the i with sorted[i] = v, in the order of i, in float32;
// 0 for a row that is not used. `sorted` are the indices in ascending order, and order[i] is where
// sorted[i] stood; indices that are no row are left out. Same inputs, same bits.
cudaError_t embedding_backward(const void* grad, const Indices& sorted, const int64_t* order,
                               void* dweight, int64_t* starts, float* partials, int64_t count,
                               int64_t num_rows, int64_t width, DType dtype, int multiprocessors,
                               Place place);

}  // namespace anychip::cuda
