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

// What a norm of x + residual has besides; residual is null for a norm of x alone.
struct ResidualSum {
  const void* residual = nullptr;
  void* total = nullptr;  // x + residual, rounded to this type, is written and normed
  DType dtype = DType::kFloat32;
};
// The same for its backward, where x is that total and has this type; dtotal is null for a norm of
// x alone. dx and dresidual are one number, in their two types.
struct ResidualGradient {
  const void* dtotal = nullptr;
  void* dresidual = nullptr;
  DType dtype = DType::kFloat32;
};

struct RmsNormForward {
  const void* x;
  const void* weight;
  void* y;
  float* rstd;
  int64_t rows, hidden;
  double eps;
  DType dtype, weight_dtype;
  ResidualSum sum = {};
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
  ResidualGradient sum = {};
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
  ResidualSum sum = {};
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
  ResidualGradient sum = {};
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
  // Element i has word i; with rows, (numel / columns,), element j of row i has word
  // rows[i] * width + column + j, as of a part of a tensor that is `width` wide.
  const int64_t* rows = nullptr;
  int64_t columns = 0, width = 0, column = 0;
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

// One tensor of an update rule. states: float32 and written, as many as the rule has.
struct UpdateTensor {
  TensorRef param, grad;
  float* states[2];
  TensorRef low_precision;  // data is null where absent; written with the new param as stored
};
// What every update rule is given. Addresses of one float32 each; scale, clip and found_inf may be
// null. Nothing is written when found_inf is not 0; step counts otherwise.
struct Update {
  std::vector<UpdateTensor> tensors;
  const float* lr;
  float* step;
  const float* scale;
  const float* clip;
  const float* found_inf;
};

struct AdamWOptions {
  double beta1, beta2, eps, weight_decay;
};
void adamw(const Update& update, const AdamWOptions& options);

struct SgdOptions {
  double momentum;
  bool nesterov;
  double weight_decay;
  bool decoupled;
};
void sgd(const Update& update, const SgdOptions& options);  // one state, none without momentum

struct LionOptions {
  double beta1, beta2, weight_decay;
};
void lion(const Update& update, const LionOptions& options);

struct LambOptions {
  double beta1, beta2, eps, weight_decay;
  const float* correction1;  // 1 - beta1^t and 1 - beta2^t
  const float* correction2;
};
void lamb(const Update& update, const LambOptions& options, const float* trust);  // per tensor

// Note [Exact sums]: a row of kDigits numbers is the exact sum of squares of float32 numbers, in
// any order: sum(row[k] * 2^(32 k - 298)) over k < kInfinities, each of these from 0 to 2^32 - 1;
// then how many infinities there were, and how many NaN. Up to 2^47 elements fit. See
// anychip.operators.squares.
constexpr int kDigits = 21, kInfinities = 19, kNaNs = 20;

// Writes a row per tensor.
void sums_of_squares(const std::vector<TensorRef>& tensors, int64_t* out);
// Reads all but lr and found_inf, and writes nothing but out: rows for the parameters, then rows
// for the steps.
void lamb_sums_of_squares(const Update& update, const LambOptions& options, int64_t* out);

void l2_norm(const std::vector<TensorRef>& tensors, float* out);
void clip(const std::vector<TensorRef>& tensors, const float* norm, double max_norm);
void unscale_and_check(const std::vector<TensorRef>& grads, const float* scale, float* found_inf);

}  // namespace anychip::cpu
