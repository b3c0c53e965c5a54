// The kernels of one instruction set, as a table of functions over a range of rows or elements.
//
// A range is done by one thread. How a tensor is cut into ranges never changes a result, except for
// the partial sums that a caller combines itself; it cuts those on a fixed grid.
#pragma once

#include "operators.h"

namespace anychip::cpu {

struct Range {
  int64_t begin, end;
};

// The factors of one step of a rule, the same for all elements.
struct AdamWFactors {
  float grad;   // clip / scale
  float decay;  // 1 - lr * weight_decay
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float update;        // lr / (1 - beta1^t)
  float inverse_root;  // 1 / sqrt(1 - beta2^t)
  float eps;
};
struct GradFactors {
  float scale;  // divides; 1 without a scale
  float clip;   // multiplies
};
struct SgdFactors {
  GradFactors grad;
  float lr, decay, weight_decay, momentum;  // decay: 1 - lr * weight_decay
  bool nesterov, decoupled;
};
struct LionFactors {
  GradFactors grad;
  float lr, decay;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
};
struct LambFactors {
  GradFactors grad;
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float correction1, correction2, eps, weight_decay;
};

// Room for a group of blocks, with 128 elements more, where the call needs it.
struct QuantizeScratch {
  float* values;    // of a type that is not float32
  uint32_t* words;  // with rng
  uint8_t* codes;   // of 4 bits
};

// A number of a row, as one that is the smaller the larger its magnitude, and the lower its index.
// Its size is what the magnitude's bits are, of a NaN the largest that there is.
constexpr uint32_t kLargestSize = 0x7fffffff;
constexpr uint64_t place_of(uint32_t size, uint32_t index) {
  return uint64_t{kLargestSize - size} << 32 | index;
}
constexpr uint32_t size_of_place(uint64_t place) {
  return kLargestSize - static_cast<uint32_t>(place >> 32);
}

struct KernelTable {
  const char* name;

  void (*to_float)(DType dtype, const void* from, float* to, int64_t numel);
  void (*from_float)(DType dtype, const float* from, void* to, int64_t numel);
  void (*add_to)(float* sum, const float* term, int64_t numel);

  // Norms: weight and bias as float32; scratch: (hidden,). The backward adds this range's part of
  // dweight and dbias to (hidden,) sums, where wanted.
  void (*rms_norm_forward)(const RmsNormForward&, const float* weight, float* scratch, Range rows);
  void (*rms_norm_backward)(const RmsNormBackward&, const float* weight, float* dweight,
                            Range rows);
  void (*layer_norm_forward)(const LayerNormForward&, const float* weight, const float* bias,
                             float* scratch, Range rows);
  void (*layer_norm_backward)(const LayerNormBackward&, const float* weight, float* dweight,
                              float* dbias, Range rows);

  void (*dropout)(const Dropout&, Range elements);
  void (*gelu_forward)(const GeluForward&, Range elements);
  void (*gelu_backward)(const GeluBackward&, Range elements);
  void (*swiglu_forward)(const SwigluForward&, Range elements);
  void (*swiglu_backward)(const SwigluBackward&, Range elements);
  void (*geglu_forward)(const GegluForward&, Range elements);
  void (*geglu_backward)(const GegluBackward&, Range elements);
  void (*rope)(const Rope&, Range positions);  // of batch * seq

  // Elements of rows that are as wide as `hidden` says: the last one may be shorter. bias as
  // float32; the backward adds to (hidden,) sums, where wanted.
  void (*bias_dropout_add)(const BiasDropoutAdd&, const float* bias, Range elements);
  void (*bias_dropout_backward)(const BiasDropoutBackward&, float* dbias, Range elements);
  void (*bias_gelu_forward)(const BiasGeluForward&, const float* bias, Range elements);
  void (*bias_gelu_backward)(const BiasGeluBackward&, const float* bias, float* dbias,
                             Range elements);

  // Targets are known to be valid. row_loss: (rows,), 0 for ignored rows.
  void (*cross_entropy_forward)(const CrossEntropyForward&, float* row_loss, Range rows);
  // grad_divisor: what the reduction divides grad by.
  void (*cross_entropy_backward)(const CrossEntropyBackward&, double grad_divisor, Range rows);

  void (*sum_rows)(const RowSums&, Range rows);
  void (*spread_rows)(const RowSpread&, Range rows);

  // Groups of whole blocks that begin at an even element; dequantize's scratch is as above.
  void (*quantize)(const Quantize&, const QuantizeScratch&, Range elements);
  void (*dequantize)(const Dequantize&, uint8_t* scratch, Range elements);

  void (*hadamard)(const Hadamard&, float* scratch, Range elements);  // scratch: (elements,)

  // Writes the places of the numbers of at least this size, in the order of x; returns how many.
  int64_t (*find_large)(DType dtype, const void* x, int64_t n, uint32_t smallest, uint64_t* found);

  void (*adamw)(const UpdateTensor&, const AdamWFactors&, Range elements);
  void (*adamw_8bit)(const UpdateTensor&, const AdamWFactors&, Range elements);  // whole blocks
  void (*sgd)(const UpdateTensor&, const SgdFactors&, Range elements);
  void (*lion)(const UpdateTensor&, const LionFactors&, Range elements);
  void (*lamb)(const UpdateTensor&, const LambFactors&, float rate, Range elements);
  // Added to rows of kDigits: Note [Exact sums].
  void (*add_lamb_squares)(const UpdateTensor&, const LambFactors&, Range elements,
                           int64_t* weights, int64_t* steps);
  void (*add_squares)(const TensorRef&, Range elements, int64_t* digits);
  void (*multiply)(const TensorRef&, float factor, Range elements);
  bool (*divide_and_check)(const TensorRef&, float divisor, Range elements);  // all finite?
};

// The table in use; it changes only by set_isa.
const KernelTable& kernels();

}  // namespace anychip::cpu
