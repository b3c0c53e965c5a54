// Tokens to experts and back: permute, unpermute and their gradients.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// The most experts: their counters lie in shared memory, once per warp.
constexpr int kMostExperts = 1024;

// Numbers of scratch for permutation_map of `entries` choices, each int32.
int64_t permutation_scratch(int64_t entries, int num_experts);

// row_map: the place of each of `entries` choices when they are sorted by expert, in their order;
// those outside 0 to num_experts - 1 behind the others. offsets: the end of each expert's places.
// `indices` are int64 (wide) or int32.
cudaError_t permutation_map(const void* indices, bool wide, int64_t* row_map, int64_t* offsets,
                            int* scratch, int64_t entries, int num_experts, Place place);

// y[row_map[t, j]] = x[t] for rows of `row_bytes`, an even number.
cudaError_t permute_rows(const void* x, const int64_t* row_map, void* y, int64_t tokens,
                         int choices, int64_t row_bytes, Place place);
// y[t] = sum over j of weights[t, j] x[row_map[t, j]]; weights of any type, nullptr: 1.
cudaError_t combine_rows(const void* x, const int64_t* row_map, const void* weights, void* y,
                         int64_t tokens, int choices, int64_t hidden, DType dtype,
                         DType weight_dtype, Place place);
// dx[row_map[t, j]] = weights[t, j] grad[t], and dweights[t, j] = grad[t] x[row_map[t, j]]; one
// that is nullptr is not wanted.
cudaError_t combine_rows_backward(const void* grad, const void* x, const int64_t* row_map,
                                  const void* weights, void* dx, void* dweights, int64_t tokens,
                                  int choices, int64_t hidden, DType dtype, DType weight_dtype,
                                  Place place);

}  // namespace anychip::cuda
