// Declares this instruction set's kernels; table.cpp puts them into its KernelTable.
#pragma once

#include "../kernel_table.h"

namespace anychip::cpu::ANYCHIP_ISA {

void to_float(DType dtype, const void* from, float* to, int64_t numel);
void from_float(DType dtype, const float* from, void* to, int64_t numel);
void add_to(float* sum, const float* term, int64_t numel);
void rms_norm_forward(const RmsNormForward& args, const float* weight, float* scratch, Range rows);
void rms_norm_backward(const RmsNormBackward& args, const float* weight, float* dweight,
                       Range rows);
void layer_norm_forward(const LayerNormForward& args, const float* weight, const float* bias,
                        float* scratch, Range rows);
void layer_norm_backward(const LayerNormBackward& args, const float* weight, float* dweight,
                         float* dbias, Range rows);
void dropout(const Dropout& args, Range elements);
void gelu_forward(const GeluForward& args, Range elements);
void gelu_backward(const GeluBackward& args, Range elements);
void swiglu_forward(const SwigluForward& args, Range elements);
void swiglu_backward(const SwigluBackward& args, Range elements);
void geglu_forward(const GegluForward& args, Range elements);
void geglu_backward(const GegluBackward& args, Range elements);
void rope(const Rope& args, Range positions);
void bias_dropout_add(const BiasDropoutAdd& args, const float* bias, Range elements);
void bias_dropout_backward(const BiasDropoutBackward& args, float* dbias, Range elements);
void bias_gelu_forward(const BiasGeluForward& args, const float* bias, Range elements);
void bias_gelu_backward(const BiasGeluBackward& args, const float* bias, float* dbias,
                        Range elements);
void cross_entropy_forward(const CrossEntropyForward& args, float* row_loss, Range rows);
void cross_entropy_backward(const CrossEntropyBackward& args, double grad_divisor, Range rows);
void sum_rows(const RowSums& args, Range rows);
void spread_rows(const RowSpread& args, Range rows);
void quantize(const Quantize& args, const QuantizeScratch& scratch, Range elements);
void dequantize(const Dequantize& args, uint8_t* scratch, Range elements);
void hadamard(const Hadamard& args, float* scratch, Range elements);
int64_t find_large(DType dtype, const void* x, int64_t n, uint32_t smallest, uint64_t* found);
void adamw(const UpdateTensor& tensor, const AdamWFactors& factors, Range elements);
void adamw_8bit(const UpdateTensor& tensor, const AdamWFactors& factors, Range elements);
void sgd(const UpdateTensor& tensor, const SgdFactors& factors, Range elements);
void lion(const UpdateTensor& tensor, const LionFactors& factors, Range elements);
void lamb(const UpdateTensor& tensor, const LambFactors& factors, float rate, Range elements);
void add_lamb_squares(const UpdateTensor& tensor, const LambFactors& factors, Range elements,
                      int64_t* weights, int64_t* steps);
void add_squares(const TensorRef& tensor, Range elements, int64_t* digits);
void multiply(const TensorRef& tensor, float factor, Range elements);
bool divide_and_check(const TensorRef& tensor, float divisor, Range elements);

extern const KernelTable kTable;

}  // namespace anychip::cpu::ANYCHIP_ISA
