// Operators over lists of tensors: norms, clipping, unscaling. Scalars are float32 on the device.
#pragma once

#include "tensor_list.h"

namespace anychip::cuda {

// *out = sqrt(sum of squares). `scratch` holds a float for each of at most sum(numel) / kChunk +
// tensors chunks; `room` says how many it has.
cudaError_t l2_norm(const TensorList& tensors, float* scratch, int64_t room, float* out,
                    Place place);
// Row t of 21 numbers at rows + 21 t, which are 0: digits of the exact sum of squares of tensor t
// are added, not carried; see squares.cuh.
cudaError_t sums_of_squares(const TensorList& tensors, int64_t* rows, Place place);
// Row t of `count` rows has every digit from 0 to 2^32 - 1 afterwards: the same sum, of rows added
// up.
cudaError_t carry_sums(int64_t* rows, int64_t count, Place place);
// ratios[t] = sqrt(row t) / sqrt(row count + t), of sums of squares that need not be carried; 1
// where one of the two is 0 or NaN.
cudaError_t ratios_of_sums(const int64_t* rows, int64_t count, float* ratios, Place place);
// t = t * min(1, max_norm / (*norm + 1e-6)), in place.
cudaError_t clip(const TensorList& tensors, const float* norm, float max_norm, Place place);
// g = g / *scale, in place; *found_inf = 1 when a stored g is not finite.
cudaError_t unscale_and_check(const TensorList& grads, const float* scale, float* found_inf,
                              Place place);

// What a block works on: the index arithmetic of the kernels, for tests.
Part list_part(int64_t numel, int64_t head, int64_t chunk);

}  // namespace anychip::cuda
