// Operators over lists of tensors: norms, clipping, unscaling. Scalars are float32 on the device.
#pragma once

#include "tensor_list.h"

namespace anychip::cuda {

// *out = sqrt(sum of squares). `scratch` holds a float for each of at most sum(numel) / kChunk +
// tensors chunks; `room` says how many it has.
cudaError_t l2_norm(const TensorList& tensors, float* scratch, int64_t room, float* out,
                    Place place);
// out[first[t] + b] = sum of squares of block b of tensor t, in pairs; `block` is a power of two.
cudaError_t l2_norm_partials(const TensorList& tensors, const std::vector<int64_t>& first,
                             int64_t block, float* out, Place place);
// t = t * min(1, max_norm / (*norm + 1e-6)), in place.
cudaError_t clip(const TensorList& tensors, const float* norm, float max_norm, Place place);
// g = g / *scale, in place; *found_inf = 1 when a stored g is not finite.
cudaError_t unscale_and_check(const TensorList& grads, const float* scale, float* found_inf,
                              Place place);

// What a block works on: the index arithmetic of the kernels, for tests.
Part list_part(int64_t numel, int64_t head, int64_t chunk);

}  // namespace anychip::cuda
