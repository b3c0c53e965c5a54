// Cross-entropy of rows of logits: loss and log-sum-exp, the sum over rows, and the gradient.
#pragma once

#include "dtype.h"

namespace anychip::cuda {

struct CrossEntropyOptions {
  int64_t rows;
  int64_t vocabulary;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
};

// Rows of logits: of one dtype, consecutive in a row, `stride` elements from row to row.
struct LogitRows {
  void* data;
  int64_t stride;
  DType dtype;
};

// loss[row] and lse[row]; a row whose target is ignore_index has the loss 0, and one whose target
// is no class has NaN: a device cannot raise.
cudaError_t cross_entropy_forward(const LogitRows& logits, const int64_t* target, float* loss,
                                  float* lse, const CrossEntropyOptions& options, Place place);

// dlogits of any of the dtypes; it may be the logits themselves where both have one dtype.
// grad: one number per row, or one for all (`per_row` false). count: as of reduce_losses; nullptr
// where the loss is no mean.
cudaError_t cross_entropy_backward(const float* grad, bool per_row, const float* count,
                                   const LogitRows& logits, const int64_t* target, const float* lse,
                                   const LogitRows& dlogits, const CrossEntropyOptions& options,
                                   Place place);

// How many floats of scratch a reduction over rows needs.
int64_t reduction_scratch(int64_t rows);

// total: the sum of row_loss, with `mean` divided by the number of targets that are not
// ignore_index (NaN when there are none). count: that number. Either may be nullptr; row_loss may
// be too, when no total is wanted. Same inputs, same bits.
cudaError_t reduce_losses(const float* row_loss, const int64_t* target, float* total, float* count,
                          float* scratch, int64_t rows, int64_t ignore_index, bool mean,
                          Place place);

}  // namespace anychip::cuda
