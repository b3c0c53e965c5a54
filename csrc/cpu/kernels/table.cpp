// The table of this instruction set, and the conversions that the callers need.
#include "table.h"

#include "loops.h"

#define ANYCHIP_STRING(name) ANYCHIP_STRING_OF(name)
#define ANYCHIP_STRING_OF(name) #name

namespace anychip::cpu::ANYCHIP_ISA {

void to_float(DType dtype, const void* from, float* to, int64_t numel) {
  visit_dtype(dtype, [&](auto t) {
    const auto* source = static_cast<const decltype(t)*>(from);
    for_each_vector(0, numel,
                    [&](int64_t i, auto lanes) { store(to + i, load(source + i, lanes), lanes); });
  });
}

void from_float(DType dtype, const float* from, void* to, int64_t numel) {
  visit_dtype(dtype, [&](auto t) {
    auto* target = static_cast<decltype(t)*>(to);
    for_each_vector(
        0, numel, [&](int64_t i, auto lanes) { store(target + i, load(from + i, lanes), lanes); });
  });
}

void add_to(float* sum, const float* term, int64_t numel) {
  for_each_vector(0, numel, [&](int64_t i, auto lanes) {
    store(sum + i, load(sum + i, lanes) + load(term + i, lanes), lanes);
  });
}

const KernelTable kTable = {
    ANYCHIP_STRING(ANYCHIP_ISA),
    to_float,
    from_float,
    add_to,
    rms_norm_forward,
    rms_norm_backward,
    layer_norm_forward,
    layer_norm_backward,
    dropout,
    gelu_forward,
    gelu_backward,
    swiglu_forward,
    swiglu_backward,
    geglu_forward,
    geglu_backward,
    rope,
    bias_dropout_add,
    bias_dropout_backward,
    bias_gelu_forward,
    bias_gelu_backward,
    cross_entropy_forward,
    cross_entropy_backward,
    sum_rows,
    spread_rows,
    quantize,
    dequantize,
    hadamard,
    find_large,
    adamw,
    adamw_8bit,
    sgd,
    lion,
    lamb,
    add_lamb_squares,
    add_squares,
    multiply,
    divide_and_check,
};

}  // namespace anychip::cpu::ANYCHIP_ISA
