// Convolution and pooling. The last argument of a convolution says which lower precision the cube
// unit may take; the emulator always sums in float32.
#include "operators/operator.h"

using namespace cann;

OPERATOR(aclnnConvolution, kFloats, Tensor x, Tensor weight, OptionalTensor bias, Ints stride,
         Ints padding, Ints dilation, bool is_transposed, Ints output_padding, Int groups,
         Tensor out, int8_t) {
  write(out, at::convolution(widened(x), widened(weight), widened(bias), stride, padding, dilation,
                             is_transposed, output_padding, groups));
}
OPERATOR(aclnnConvolutionBackward, kFloats, Tensor grad, Tensor x, Tensor weight, OptionalInts bias,
         Ints stride, Ints padding, Ints dilation, bool is_transposed, Ints output_padding,
         Int groups, Bools wanted, int8_t, OptionalTensor grad_x, OptionalTensor grad_weight,
         OptionalTensor grad_bias) {
  at::OptionalIntArrayRef sizes;
  if (bias) sizes = *bias;
  write(wanted, {grad_x, grad_weight, grad_bias},
        at::convolution_backward(widened(grad), widened(x), widened(weight), sizes, stride, padding,
                                 dilation, is_transposed, output_padding, groups, mask_of(wanted)));
}

namespace {

// CANN's mask has bytes of its own, in a form that is not documented. Here the first ones of each
// channel hold the places of the largest elements, as int32.
Tensor places_in(const Tensor& mask, int64_t outputs) {
  return mask.flatten(-2).narrow(-1, 0, outputs * 4);
}

}  // namespace

CHECKED(aclnnMaxPool2dWithMask, kFloats, Tensor x, Ints kernel, Ints stride, Ints padding,
        Ints dilation, bool is_ceil, Tensor out, Tensor mask) {
  const Int outputs = out.size(-1) * out.size(-2);
  HAS_NO(mask.size(-1) * mask.size(-2) < outputs * 4, "pooling of one element");
  WORK_BELOW;
  const auto [largest, places] =
      at::max_pool2d_with_indices(widened(x), kernel, stride, padding, dilation, is_ceil);
  write(out, largest);
  const Tensor bytes = places.to(at::kInt).flatten(-2).contiguous().view(at::kChar);
  places_in(mask, outputs).copy_(bytes);
}
OPERATOR(aclnnMaxPool2dWithMaskBackward, kFloats, Tensor grad, Tensor x, Tensor mask, Ints kernel,
         Ints stride, Ints padding, Ints dilation, bool is_ceil, Tensor out) {
  const Tensor bytes = places_in(mask, grad.size(-1) * grad.size(-2)).contiguous();
  const Tensor places = bytes.view(at::kInt).to(at::kLong).reshape(grad.sizes());
  write(out, at::max_pool2d_with_indices_backward(widened(grad), widened(x), kernel, stride,
                                                  padding, dilation, is_ceil, places));
}
// A divisor of 0 is none.
OPERATOR(aclnnAvgPool2d, kFloats, Tensor x, Ints kernel, Ints stride, Ints padding, bool is_ceil,
         bool counts_padding, Int divisor, int8_t, Tensor out) {
  const auto given = divisor != 0 ? std::optional(divisor) : std::nullopt;
  write(out, at::avg_pool2d(widened(x), kernel, stride, padding, is_ceil, counts_padding, given));
}
OPERATOR(aclnnAvgPool2dBackward, kFloats, Tensor grad, Tensor x, Ints kernel, Ints stride,
         Ints padding, bool is_ceil, bool counts_padding, Int divisor, int8_t, Tensor out) {
  const auto given = divisor != 0 ? std::optional(divisor) : std::nullopt;
  write(out, at::avg_pool2d_backward(widened(grad), widened(x), kernel, stride, padding, is_ceil,
                                     counts_padding, given));
}
OPERATOR(aclnnAdaptiveAvgPool2d, kFloats, Tensor x, Ints size, Tensor out) {
  write(out, at::_adaptive_avg_pool2d(widened(x), size));
}
OPERATOR(aclnnAdaptiveAvgPool2dBackward, kFloats, Tensor grad, Tensor x, Tensor out) {
  write(out, at::_adaptive_avg_pool2d_backward(widened(grad), widened(x)));
}
