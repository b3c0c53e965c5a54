// rms_norm and layer_norm over the rows of contiguous arrays, also of the sum with a residual;
// group_norm.
//
// rms_norm is a layer_norm whose mean is taken as 0: one launcher serves both. Addresses that are
// nullptr are absent or not wanted.
#pragma once

#include "dropout.h"

namespace anychip::cuda {

// y = (v - mean) * rstd * weight + bias of v = x, or of v = x + residual as stored in total.
struct NormForward {
  const void* x;         // (rows, hidden), dtype
  const void* residual;  // (rows, hidden), residual_dtype: dtype or float32; nullptr: v is x
  const void* weight;    // (hidden,)
  const void* bias;      // (hidden,) or nullptr
  void* y;               // as x
  void* total;           // as residual
  float* mean;           // (rows,); nullptr for rms_norm
  float* rstd;           // (rows,)
  int64_t rows;
  int hidden;  // at most 2^30
  float eps;
  DType dtype, residual_dtype, weight_dtype, bias_dtype;
};
cudaError_t norm_forward(const NormForward& args, Place place);

// The same of v = dropout(x) + residual: element i of x has word i of the stream. There is a
// residual.
cudaError_t dropout_add_norm_forward(const NormForward& args, const Drop& drop, Place place);

// With a = grad * weight and n = (v - mean) * rstd:
//   dx = dresidual = rstd * (a - mean(a) - n * mean(a n)) + dtotal, without mean(a) for rms_norm
//   dweight = sum of grad * n, dbias = sum of grad, over the rows
struct NormBackward {
  const void* grad;    // (rows, hidden), dtype
  const void* v;       // (rows, hidden), residual_dtype
  const void* dtotal;  // as v; nullptr when v was no sum
  const void* weight;  // (hidden,)
  const float* mean;   // (rows,); nullptr for rms_norm
  const float* rstd;   // (rows,)
  void* dx;            // as grad
  void* dresidual;     // as v
  void* dweight;       // (hidden,), weight_dtype
  void* dbias;         // (hidden,), weight_dtype
  int64_t rows;
  int hidden;  // at most 2^30
  DType dtype, residual_dtype, weight_dtype;
};

// For the sums over the rows of each of at most `blocks` blocks: float32 (wanted, blocks, hidden),
// where `wanted` counts dweight and dbias as far as they are. The contents do not matter.
struct NormScratch {
  float* partials;
  int64_t blocks;
};
cudaError_t norm_backward(const NormBackward& args, const NormScratch& scratch, Place place);

// The same of v = dropout(x) + residual: dx is dropped, dresidual is not.
cudaError_t dropout_add_norm_backward(const NormBackward& args, const Drop& drop,
                                      const NormScratch& scratch, Place place);

// The rows of group_norm over x (batch, count * channels, spatial...): row r is group r % count,
// its columns are `channels` times `spatial` adjacent ones that share a number of weight and of
// bias, which are (count * channels,) here as dweight and dbias are. At least one element, and
// fewer than 2^31 rows. There is no residual.
struct Groups {
  int64_t count;
  int64_t channels;
  int64_t spatial;
};
cudaError_t group_norm_forward(const NormForward& args, const Groups& groups, Place place);

// Rows are cut over at most `blocks` blocks, a multiple of the groups. For sums: float32 (2, parts,
// count * channels) whose contents do not matter; with spatial 1 parts are blocks / count.
struct GroupScratch {
  float* partials;
  int64_t blocks;
  int64_t parts;
};
cudaError_t group_norm_backward(const NormBackward& args, const Groups& groups,
                                const GroupScratch& scratch, Place place);

}  // namespace anychip::cuda
