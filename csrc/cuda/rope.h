// Rotary positions of q and k in one launch.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

// One of the two tensors: x is (batch, seq, heads, head_dim) with these strides, in elements, and
// adjacent elements within a head; y is contiguous. No heads: nothing is done.
struct Heads {
  const void* x;
  void* y;
  int64_t count;
  int64_t batch_stride;
  int64_t seq_stride;
  int64_t head_stride;
};

// Sizes that q and k share. cos and sin: contiguous (seq, rotary_dim / 2) float32; dims of a head
// from rotary_dim on are copied.
struct Rotation {
  const float* cos;
  const float* sin;
  int64_t batch;
  int64_t seq;
  int64_t head_dim;
  int64_t rotary_dim;
  bool interleaved;  // pairs (2 i, 2 i + 1); otherwise (i, i + rotary_dim / 2)
  bool inverse;      // by the negative angle, which is the gradient
};

cudaError_t rope(const Heads& q, const Heads& k, const Rotation& rotation, DType dtype,
                 Place place);

}  // namespace anychip::cuda
