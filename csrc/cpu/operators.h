// The native operators: what each reads and writes, as plain structs, and one function per
// operator.
//
// Addresses are of contiguous tensors; null means absent or not wanted. The functions check what
// plain arguments can tell (std::invalid_argument, std::out_of_range), share the work among the
// threads of torch's OpenMP runtime and call the kernels of the chosen instruction set. The
// equations are those of the operators' specifications; roundings are stated beside the kernels
// (kernels/).
#pragma once

#include <cstdint>
#include <vector>

#include "dtype.h"

namespace anychip::cpu {

struct RmsNormForward {
  const void* x;
  const void* weight;
  void* y;
  float* rstd;
  int64_t rows, hidden;
  double eps;
  DType dtype, weight_dtype;
};
struct RmsNormBackward {
  const void* grad;
  const void* x;
  const void* weight;
  const float* rstd;
  void* dx;
  void* dweight;
  int64_t rows, hidden;
  DType dtype, weight_dtype;
};
void rms_norm_forward(const RmsNormForward& args);
void rms_norm_backward(const RmsNormBackward& args);

struct LayerNormForward {
  const void* x;
  const void* weight;
  const void* bias;
  void* y;
  float* mean;
  float* rstd;
  int64_t rows, hidden;
  double eps;
  DType dtype, weight_dtype;
};
struct LayerNormBackward {
  const void* grad;
  const void* x;
  const void* weight;
  const float* mean;
  const float* rstd;
  void* dx;
  void* dweight;
  void* dbias;
  int64_t rows, hidden;
  DType dtype, weight_dtype;
};
void layer_norm_forward(const LayerNormForward& args);
void layer_norm_backward(const LayerNormBackward& args);

struct Dropout {
  const void* x;
  const int64_t* rng;  // seed, offset
  void* y;
  int64_t numel;
  double p;
  DType dtype;
};
void dropout(const Dropout& args);

struct GeluForward {
  const void* x;
  void* y;
  int64_t numel;
  bool tanh;
  DType dtype;
};
struct GeluBackward {
  const void* grad;
  const void* x;
  void* dx;
  int64_t numel;
  bool tanh;
  DType dtype;
};
void gelu_forward(const GeluForward& args);
void gelu_backward(const GeluBackward& args);

struct SwigluForward {
  const void* gate;
  const void* up;
  void* y;
  int64_t numel;
  DType dtype;
};
struct SwigluBackward {
  const void* grad;
  const void* gate;
  const void* up;
  void* dgate;
  void* dup;
  int64_t numel;
  DType dtype;
};
void swiglu_forward(const SwigluForward& args);
void swiglu_backward(const SwigluBackward& args);

struct Rope {
  const void* q;  // (batch, seq, heads, head_dim)
  const void* k;  // (batch, seq, kv_heads, head_dim)
  const float* cos;
  const float* sin;  // (seq, head_dim / 2)
  void* q_out;
  void* k_out;
  int64_t batch, seq, heads, kv_heads, head_dim;
  bool interleaved, inverse;
  DType dtype;
};
void rope(const Rope& args);

enum class Reduction : int { kNone = 0, kMean = 1, kSum = 2 };

struct CrossEntropyOptions {
  int64_t rows, vocab;
  int64_t ignore_index;
  double label_smoothing, z_loss;
  Reduction reduction;
  DType dtype;
};
struct CrossEntropyForward {
  const void* logits;
  const int64_t* target;
  float* loss;  // one element, or (rows,) without a reduction
  float* lse;
  CrossEntropyOptions options;
};
struct CrossEntropyBackward {
  const float* grad;  // one element, or (rows,) without a reduction
  const void* logits;
  const int64_t* target;
  const float* lse;
  void* dlogits;
  CrossEntropyOptions options;
};
void cross_entropy_forward(const CrossEntropyForward& args);
void cross_entropy_backward(const CrossEntropyBackward& args);

struct TensorRef {
  void* data;
  int64_t numel;
  DType dtype;
};

struct AdamWTensor {
  TensorRef param;
  TensorRef grad;
  float* exp_avg;
  float* exp_avg_sq;
  TensorRef low_precision;  // data is null where absent
};
struct AdamW {
  std::vector<AdamWTensor> tensors;
  const float* lr;
  float* step;
  const float* scale;
  const float* clip;
  const float* found_inf;
  double beta1, beta2, eps, weight_decay;
};
void adamw(const AdamW& args);

void l2_norm(const std::vector<TensorRef>& tensors, float* out);
void clip(const std::vector<TensorRef>& tensors, const float* norm, double max_norm);
void unscale_and_check(const std::vector<TensorRef>& grads, const float* scale, float* found_inf);

}  // namespace anychip::cpu
