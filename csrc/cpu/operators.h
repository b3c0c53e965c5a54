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

// What becomes 0, with probability p; the rest is multiplied by 1 / (1 - p). Element i has word i
// of the stream; with rows, element j of row i has word rows[i] * width + column + j, as of a part
// of a tensor that is `width` wide.
struct Drop {
  const int64_t* rng = nullptr;  // seed, offset
  double p = 0.0;
  const int64_t* rows = nullptr;
  int64_t width = 0, column = 0;
};

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
  Drop drop = {};  // of dx; without rng nothing is dropped
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

// LayerNorm of groups of channels; x: (batch, channels, size), the statistics: (batch, groups).
struct GroupNormForward {
  const void* x;
  const void* weight;  // (channels,)
  const void* bias;    // null: none
  void* y;
  float* mean;
  float* rstd;
  int64_t batch, groups, channels, size;
  double eps;
  DType dtype, weight_dtype;
};
struct GroupNormBackward {
  const void* grad;
  const void* x;
  const void* weight;
  const float* mean;
  const float* rstd;
  void* dx;
  void* dweight;
  void* dbias;
  int64_t batch, groups, channels, size;
  DType dtype, weight_dtype;
};
void group_norm_forward(const GroupNormForward& args);
void group_norm_backward(const GroupNormBackward& args);

// y[n, c, t] = bias[c] + sum over k of weight[c, k] x[n, c, t + k + 1 - taps], x being 0 before.
struct Conv1dForward {
  const void* x;       // (batch, channels, length)
  const void* weight;  // (channels, taps)
  const void* bias;    // (channels,); null: none
  void* y;
  int64_t batch, channels, length, taps;
  DType dtype, weight_dtype;
};
struct Conv1dBackward {
  const void* grad;
  const void* x;
  const void* weight;
  void* dx;
  void* dweight;
  void* dbias;
  int64_t batch, channels, length, taps;
  DType dtype, weight_dtype;
};
void conv1d_forward(const Conv1dForward& args);
void conv1d_backward(const Conv1dBackward& args);

// y[n, j, i] = x[n, i, j]: columns become rows, as channels become innermost, and outermost again.
struct Turned {
  const void* x;  // (batch, rows, columns)
  void* y;
  int64_t batch, rows, columns;
  DType dtype;
};
void turn(const Turned& args);

struct Dropout {
  const void* x;
  void* y;
  int64_t numel, columns;  // columns: of a row, where rows have numbers
  DType dtype;
  Drop drop;
};
void dropout(const Dropout& args);

// y = residual + dropout(x + bias), of rows that are `hidden` wide.
struct BiasDropoutAdd {
  const void* x;
  const void* residual;
  const void* bias;  // (hidden,); null: none
  void* y;           // of the residual's type
  int64_t rows, hidden;
  DType dtype, residual_dtype, bias_dtype;
  Drop drop;
};
struct BiasDropoutBackward {
  const void* grad;
  void* dx;      // like grad
  float* dbias;  // (hidden,)
  int64_t rows, hidden;
  DType dtype;
  Drop drop;
};
void bias_dropout_add(const BiasDropoutAdd& args);
void bias_dropout_backward(const BiasDropoutBackward& args);

// Of a number: its value f(x), and its derivative. Softplus is x where beta x is above threshold.
enum class Activation : int {
  kGelu = 0,
  kGeluTanh = 1,
  kSilu = 2,
  kRelu = 3,
  kRelu2 = 4,  // relu(x)^2
  kSigmoid = 5,
  kTanh = 6,
  kSoftplus = 7
};

// y = f(x); or f(x) * up; or f(x + bias), of rows that are `hidden` wide. With up f is kGelu,
// kGeluTanh or kSilu, with a bias one of the first two.
struct ActivationForward {
  const void* x;
  const void* up;    // null: none
  const void* bias;  // (hidden,); null: none
  void* y;
  int64_t rows, hidden;
  Activation function;
  double beta, threshold;  // of kSoftplus
  DType dtype, bias_dtype;
};
struct ActivationBackward {
  const void* grad;
  const void* x;
  const void* up;
  const void* bias;
  void* dx;
  void* dup;
  void* dbias;  // like bias
  int64_t rows, hidden;
  Activation function;
  double beta, threshold;
  DType dtype, bias_dtype;
};
void activation_forward(const ActivationForward& args);
void activation_backward(const ActivationBackward& args);

// Softmax of each row of scores s = x scale + bias, over the keys that are visible: those that the
// mask has, whose score is not -infinity and, if causal, that do not lie behind the query, where
// row r is query r % queries. The rest, and a row without a visible key, is 0.
struct SoftmaxForward {
  const void* x;  // (rows, keys)
  void* y;
  const bool* mask;          // null: all
  const int64_t* mask_rows;  // (rows,) where each row's mask begins
  const void* bias;          // null: none
  const int64_t* bias_rows;  // (rows,)
  int64_t mask_numel, bias_numel;
  int64_t rows, queries, keys;
  double scale;
  bool causal;
  DType dtype, bias_dtype;
};
// dx = scale (grad - sum(grad y)) y.
struct SoftmaxBackward {
  const void* grad;
  const void* y;
  void* dx;
  int64_t rows, keys;
  double scale;
  DType dtype;
};
void softmax_forward(const SoftmaxForward& args);
void softmax_backward(const SoftmaxBackward& args);

// Heads of rows of a batch: how many elements further the next one of each is. A head's elements
// lie without a gap.
struct StridedHeads {
  const void* data;
  int64_t batch, row, head;
};
// Of (batch, queries, heads, head_dim) and (batch, keys, kv_heads, head_dim), where query head h
// reads key head h / (heads / kv_heads). With ends, `batch` sequences are packed into queries and
// keys in all, without a batch: sequence b is ends[b] to ends[b + 1], what is left is padding.
// Causal is aligned to the last key. A query that sees nothing has y = 0 and lse = -infinity.
// With a stream, weights are dropped: key j of a query's row i of (batch, heads, queries) has word
// rows[i] * width + key_index[j], or + j without key_index, as of weights that are `width` wide.
struct AttentionShape {
  int64_t batch, queries, keys, heads, kv_heads, head_dim;
  const int64_t* ends_q;  // (batch + 1,); null: none
  const int64_t* ends_k;
  double scale;
  bool causal;
  DType dtype, y_dtype;  // y_dtype: of y and its gradient
  Drop drop = {};
  const int64_t* key_index = nullptr;
};
struct AttentionForward {
  StridedHeads q, k, v;
  void* y;     // contiguous, like all that is written
  float* lse;  // (batch, heads, queries), packed (heads, queries)
  AttentionShape shape;
};
struct AttentionBackward {
  StridedHeads grad, q, k, v, y;
  const float* lse;
  void* dq;
  void* dk;
  void* dv;
  AttentionShape shape;
};
void attention_forward(const AttentionForward& args);
void attention_backward(const AttentionBackward& args);

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
void cross_entropy_backward(const CrossEntropyBackward& args);  // dlogits may be the logits

// Of rows of some of the logits, of the classes from `first` on: their log-sum-exp, that of the
// target's class, 0 where it is of another part, and their sum.
struct LogitPartials {
  const float* logits;    // (rows, vocab)
  const int64_t* target;  // (rows,)
  float* lse;
  float* picked;
  float* total;
  int64_t rows, vocab, first;
};
struct LogitPartialsBackward {
  const float* lse_grad;  // (rows,), all three
  const float* picked_grad;
  const float* total_grad;
  const float* logits;
  const int64_t* target;
  const float* lse;
  float* dlogits;  // may be the logits
  int64_t rows, vocab, first;
};
void logit_partials_forward(const LogitPartials& args);
void logit_partials_backward(const LogitPartialsBackward& args);

// y[r] = sum over j of weights[r, j] x[index[r, j]], j ascending. Throws std::out_of_range for a
// number that is no row of x.
struct RowSums {
  const void* x;         // (x_rows, width)
  const int64_t* index;  // (rows, terms)
  const void* weights;   // (rows, terms); null: all 1
  void* y;               // (rows, width)
  int64_t rows, terms, x_rows, width;
  DType dtype, weight_dtype;
  const int64_t* ends = nullptr;  // of each row's terms, where these differ in number
};
void sum_rows(const RowSums& args);
// The same the other way round: y[r] is the sum of those x[i] that have index[i] = r.
void sum_rows_by_index(const RowSums& args);

// Where the choices stand when they are sorted by expert, in order within one: place[i] is that of
// choice i, choice[place[i]] = i, and ends[e] counts the choices of experts 0 to e. Choices of no
// expert stand behind all others.
struct Places {
  const int64_t* experts;  // (count,)
  int64_t* place;          // (count,)
  int64_t* choice;         // (count,)
  int64_t* ends;           // (num_experts,)
  int64_t count, num_experts;
};
void places_by_expert(const Places& args);

// Whether (count,) numbers are those from 0 on, each once.
bool is_permutation(const int64_t* index, int64_t count);

// The gradients of sum_rows, where index holds each row of x once: dx[index[r, j]] = weights[r, j]
// y[r], and dweights[r, j] is the product of y[r] and x[index[r, j]].
struct RowSpread {
  const void* y;
  const void* x;  // read for dweights
  const int64_t* index;
  const void* weights;
  void* dx;
  void* dweights;
  int64_t rows, terms, width;
  DType dtype, weight_dtype;
};
void spread_rows(const RowSpread& args);

// The formats of anychip.operators.codes; the codes are part of the Python interface.
enum class CodeFormat : int {
  kInt8 = 0,
  kInt4 = 1,
  kNF4 = 2,
  kE4M3 = 3,
  kE5M2 = 4,
  kMXE4M3 = 5,
  kMXE5M2 = 6,
  kMXE2M1 = 7
};
constexpr bool has_half_bytes(CodeFormat format) {
  return format == CodeFormat::kInt4 || format == CodeFormat::kNF4 || format == CodeFormat::kMXE2M1;
}

struct Quantize {
  const void* x;
  const int64_t* rng;  // seed, offset; null: to the nearest code. Of kInt8 and kInt4
  uint8_t* codes;
  void* scales;  // one per block: float32, or uint8 of an MX format
  int64_t numel, block;
  CodeFormat format;
  DType dtype;
};
struct Dequantize {
  const uint8_t* codes;
  const void* scales;
  float* y;
  int64_t numel, block;
  CodeFormat format;
};
void quantize(const Quantize& args);
void dequantize(const Dequantize& args);

struct Hadamard {
  const void* x;
  void* y;
  int64_t numel, block;  // whole blocks of a power of two
  DType dtype;
};
void hadamard(const Hadamard& args);

// Of each row the `count` numbers of largest magnitude, the largest first, those of one magnitude
// by place; every NaN is as large as another, and larger than infinity.
struct TopK {
  const void* x;     // (rows, width)
  void* y;           // (rows, count)
  int64_t* indices;  // (rows, count)
  int64_t rows, width, count;
  DType dtype;
};
void top_k(const TopK& args);

struct TensorRef {
  void* data;
  int64_t numel;
  DType dtype;
};

// One tensor of an update rule. states: written; float32, or of adamw_8bit
// uint8 codes; as many as the rule has.
struct UpdateTensor {
  TensorRef param, grad;
  void* states[2];
  TensorRef low_precision;  // data is null where absent; written with the new param as stored
  float* scales[2] = {};    // of states that are uint8 codes: one per kStateBlock elements
};
constexpr int64_t kStateBlock = 256;
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

struct AdamW {
  const Update& update;
  double beta1, beta2, eps, weight_decay;
};
void adamw(const AdamW& args);
void adamw_8bit(const AdamW& args);  // states are codes

struct Sgd {  // one state, none without momentum
  const Update& update;
  double momentum;
  bool nesterov;
  double weight_decay;
  bool decoupled;
};
void sgd(const Sgd& args);

struct Lion {
  const Update& update;
  double beta1, beta2, weight_decay;
};
void lion(const Lion& args);

struct Lamb {
  const Update& update;
  const float* trust;        // one per tensor
  const float* correction1;  // 1 - beta1^t and 1 - beta2^t
  const float* correction2;
  double beta1, beta2, eps, weight_decay;
};
void lamb(const Lamb& args);

// Note [Exact sums]: a row of kDigits numbers is the exact sum of squares of float32 numbers, in
// any order: sum(row[k] * 2^(32 k - 298)) over k < kInfinities, each of these from 0 to 2^32 - 1;
// then how many infinities there were, and how many NaN. Up to 2^47 elements fit. See
// anychip.operators.squares.
constexpr int kDigits = 21, kInfinities = 19, kNaNs = 20;

// Writes a row per tensor.
struct SumsOfSquares {
  const std::vector<TensorRef>& tensors;
  int64_t* out;
};
void sums_of_squares(const SumsOfSquares& args);

// Reads all but lr and found_inf, and writes nothing but out: rows for the parameters, then rows
// for the steps.
struct LambSums {
  const Update& update;
  int64_t* out;
  const float* correction1;
  const float* correction2;
  double beta1, beta2, eps, weight_decay;
};
void lamb_sums_of_squares(const LambSums& args);

struct L2Norm {
  const std::vector<TensorRef>& tensors;
  float* out;
};
void l2_norm(const L2Norm& args);

// In place.
struct Clip {
  const std::vector<TensorRef>& tensors;
  const float* norm;
  double max_norm;
};
void clip(const Clip& args);

struct Unscale {
  const std::vector<TensorRef>& grads;
  const float* scale;
  float* found_inf;  // set to 1, never to 0
};
void unscale_and_check(const Unscale& args);

// out = left right, with the bias added to every row, or added to what there is; float32.
struct Product {
  const float* left;   // (rows, depth), or (depth, rows) where it is transposed
  const float* right;  // (depth, columns), or (columns, depth)
  const float* bias;   // (columns,), or null
  float* out;          // (rows, columns)
  int64_t rows, columns, depth;
  bool left_transposed, right_transposed, adds;
};
void product(const Product& args);

// The same of bfloat16 matrices; out is float32. Quick where has_block_products().
struct BFloat16Product {
  const BFloat16* left;
  const BFloat16* right;   // or null, and
  const BFloat16* panels;  // what bfloat16_panels made of it
  const float* bias;
  float* out;
  int64_t rows, columns, depth;
  bool left_transposed, right_transposed, adds;
};
void bfloat16_product(const BFloat16Product& args);

// The right factor as a product reads it, for several.
struct BFloat16Panels {
  const BFloat16* right;
  BFloat16* panels;  // (packed_numel(columns, depth),)
  int64_t columns, depth;
  bool transposed;
};
void bfloat16_panels(const BFloat16Panels& args);
int64_t packed_numel(int64_t columns, int64_t depth);

}  // namespace anychip::cpu
