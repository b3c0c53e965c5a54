// Element by element: arithmetic, comparison, powers, activations.
#include "operators/operator.h"

using namespace cann;

#define UNARY(name, function) \
  OPERATOR(name, kAny, Tensor self, Tensor out) { write(out, function(self)); }
#define UNARY_IN_PLACE(name, method) \
  OPERATOR(name, kAny, Tensor self) { self.method(); }
// The second argument is what the page says: the forward's input, or its result.
#define BACKWARD(name, types, function)                          \
  OPERATOR(name, types, Tensor grad, Tensor saved, Tensor out) { \
    write(out, function(grad, saved));                           \
  }
#define IN_PLACE(name, Other, method) \
  OPERATOR(name, kAny, Tensor self, Other other) { self.method(other); }
#define BINARY(name, function) \
  OPERATOR(name, kAny, Tensor self, Tensor other, Tensor out) { write(out, function(self, other)); }
#define BINARY_SCALAR(name, function) \
  OPERATOR(name, kAny, Tensor self, Scalar other, Tensor out) { write(out, function(self, other)); }

UNARY(aclnnAbs, at::abs)
UNARY(aclnnNeg, at::neg)
UNARY(aclnnSign, at::sign)
UNARY(aclnnCeil, at::ceil)
UNARY(aclnnFloor, at::floor)
UNARY(aclnnRound, at::round)
UNARY(aclnnSqrt, at::sqrt)
UNARY(aclnnRsqrt, at::rsqrt)
UNARY(aclnnReciprocal, at::reciprocal)
UNARY(aclnnExp, at::exp)
UNARY(aclnnLog, at::log)
UNARY(aclnnLog2, at::log2)
UNARY(aclnnSin, at::sin)
UNARY(aclnnCos, at::cos)
UNARY(aclnnErf, at::erf)
UNARY(aclnnTanh, at::tanh)
UNARY(aclnnSigmoid, at::sigmoid)
UNARY(aclnnSilu, at::silu)
UNARY(aclnnRelu, at::relu)
UNARY(aclnnIsFinite, at::isfinite)
UNARY(aclnnBitwiseNot, at::bitwise_not)
UNARY(aclnnLogicalNot, at::logical_not)
UNARY(aclnnIsNegInf, at::isneginf)
UNARY(aclnnIsPosInf, at::isposinf)
UNARY(aclnnExpm1, at::expm1)
UNARY(aclnnLog1p, at::log1p)
UNARY(aclnnTrunc, at::trunc)
UNARY(aclnnTan, at::tan)
UNARY(aclnnAtan, at::atan)
UNARY(aclnnErfc, at::erfc)
UNARY(aclnnSignbit, at::signbit)

UNARY_IN_PLACE(aclnnInplaceFloor, floor_)
UNARY_IN_PLACE(aclnnInplaceSqrt, sqrt_)
UNARY_IN_PLACE(aclnnInplaceRsqrt, rsqrt_)
UNARY_IN_PLACE(aclnnInplaceReciprocal, reciprocal_)
UNARY_IN_PLACE(aclnnInplaceExp, exp_)
UNARY_IN_PLACE(aclnnInplaceLog, log_)
UNARY_IN_PLACE(aclnnInplaceTanh, tanh_)
UNARY_IN_PLACE(aclnnInplaceSigmoid, sigmoid_)
UNARY_IN_PLACE(aclnnInplaceRelu, relu_)

#define SCALED(name, Other, function)                                        \
  OPERATOR(name, kAny, Tensor self, Other other, Scalar alpha, Tensor out) { \
    write(out, function(self, other, alpha));                                \
  }
#define SCALED_IN_PLACE(name, Other, method) \
  OPERATOR(name, kAny, Tensor self, Other other, Scalar alpha) { self.method(other, alpha); }

SCALED(aclnnAdd, Tensor, at::add)
SCALED(aclnnAdds, Scalar, at::add)
SCALED(aclnnSub, Tensor, at::sub)
SCALED(aclnnSubs, Scalar, at::sub)
SCALED(aclnnRsubs, Scalar, at::rsub)
SCALED_IN_PLACE(aclnnInplaceAdd, Tensor, add_)
SCALED_IN_PLACE(aclnnInplaceAdds, Scalar, add_)
SCALED_IN_PLACE(aclnnInplaceSub, Tensor, sub_)
SCALED_IN_PLACE(aclnnInplaceSubs, Scalar, sub_)

BINARY(aclnnMul, at::mul)
BINARY(aclnnDiv, at::div)
BINARY(aclnnMaximum, at::maximum)
BINARY(aclnnMinimum, at::minimum)
BINARY(aclnnFloorDivide, at::floor_divide)
BINARY(aclnnPowTensorTensor, at::pow)
BINARY(aclnnEqTensor, at::eq)
BINARY(aclnnNeTensor, at::ne)
BINARY(aclnnGtTensor, at::gt)
BINARY(aclnnGeTensor, at::ge)
BINARY(aclnnLtTensor, at::lt)
BINARY(aclnnLeTensor, at::le)
BINARY(aclnnBitwiseAndTensor, at::bitwise_and)
BINARY(aclnnBitwiseOrTensor, at::bitwise_or)
BINARY(aclnnLogicalAnd, at::logical_and)
BINARY(aclnnLogicalOr, at::logical_or)

BINARY(aclnnClampMinTensor, at::clamp_min)
BINARY(aclnnClampMaxTensor, at::clamp_max)
BINARY(aclnnRemainderTensorTensor, at::remainder)
BINARY(aclnnFmodTensor, at::fmod)

BINARY_SCALAR(aclnnFmodScalar, at::fmod)
BINARY_SCALAR(aclnnClampMin, at::clamp_min)
BINARY_SCALAR(aclnnClampMax, at::clamp_max)
BINARY_SCALAR(aclnnMuls, at::mul)
BINARY_SCALAR(aclnnDivs, at::div)
BINARY_SCALAR(aclnnEqScalar, at::eq)
BINARY_SCALAR(aclnnNeScalar, at::ne)
BINARY_SCALAR(aclnnGtScalar, at::gt)
BINARY_SCALAR(aclnnGeScalar, at::ge)
BINARY_SCALAR(aclnnLtScalar, at::lt)
BINARY_SCALAR(aclnnLeScalar, at::le)
BINARY_SCALAR(aclnnPowTensorScalar, at::pow)
BINARY_SCALAR(aclnnRemainderTensorScalar, at::remainder)

IN_PLACE(aclnnInplaceMul, Tensor, mul_)
IN_PLACE(aclnnInplaceMuls, Scalar, mul_)
IN_PLACE(aclnnInplaceDiv, Tensor, div_)
IN_PLACE(aclnnInplaceDivs, Scalar, div_)
IN_PLACE(aclnnInplacePowTensorScalar, Scalar, pow_)
IN_PLACE(aclnnInplaceRemainderTensorTensor, Tensor, remainder_)
IN_PLACE(aclnnInplaceRemainderTensorScalar, Scalar, remainder_)
IN_PLACE(aclnnInplaceFmodTensor, Tensor, fmod_)
IN_PLACE(aclnnInplaceFmodScalar, Scalar, fmod_)
IN_PLACE(aclnnInplaceClampMax, Scalar, clamp_max_)
IN_PLACE(aclnnInplaceClampMinTensor, Tensor, clamp_min_)
IN_PLACE(aclnnInplaceClampMaxTensor, Tensor, clamp_max_)
OPERATOR(aclnnPowScalarTensor, kAny, Scalar self, Tensor exponent, Tensor out) {
  write(out, at::pow(self, exponent));
}
OPERATOR(aclnnFloorDivides, kAny, Tensor self, Scalar other, Tensor out) {
  write(out, at::floor_divide(self, at::scalar_tensor(other)));
}
// mode: 0 rounds nothing, 1 to zero, 2 down.
CHECKED(aclnnDivMods, kAny, Tensor self, Scalar other, Int mode, Tensor out) {
  EXPECT(mode >= 0 && mode <= 2, "mode 0 to 2, got ", mode);
  WORK_BELOW;
  if (mode == 0) return write(out, at::div(self, other));
  write(out, at::div(self, other, mode == 1 ? "trunc" : "floor"));
}
OPERATOR(aclnnClamp, kAny, Tensor self, OptionalScalar low, OptionalScalar high, Tensor out) {
  write(out, at::clamp(self, low, high));
}
OPERATOR(aclnnClampTensor, kAny, Tensor self, OptionalTensor low, OptionalTensor high, Tensor out) {
  write(out, at::clamp(self, low, high));
}
OPERATOR(aclnnRemainderScalarTensor, kAny, Scalar self, Tensor other, Tensor out) {
  write(out, at::remainder(self, other));
}
OPERATOR(aclnnAddcmul, kAny, Tensor self, Tensor a, Tensor b, Scalar value, Tensor out) {
  write(out, at::addcmul(self, a, b, value));
}
OPERATOR(aclnnAddcdiv, kAny, Tensor self, Tensor a, Tensor b, Scalar value, Tensor out) {
  write(out, at::addcdiv(self, a, b, value));
}
OPERATOR(aclnnInplaceAddcmul, kAny, Tensor self, Tensor a, Tensor b, Scalar value) {
  self.addcmul_(a, b, value);
}
OPERATOR(aclnnInplaceAddcdiv, kAny, Tensor self, Tensor a, Tensor b, Scalar value) {
  self.addcdiv_(a, b, value);
}
OPERATOR(aclnnLerps, kFloats, Tensor self, Tensor end, Scalar weight, Tensor out) {
  write(out, at::lerp(self, end, weight));
}
OPERATOR(aclnnInplaceLerps, kFloats, Tensor self, Tensor end, Scalar weight) {
  self.lerp_(end, weight);
}
OPERATOR(aclnnInplaceLerp, kFloats, Tensor self, Tensor end, Tensor weight) {
  self.lerp_(end, weight);
}
OPERATOR(aclnnSWhere, kAny, Tensor condition, Tensor self, Tensor other, Tensor out) {
  write(out, at::where(condition, self, other));
}

// The public pages of aclnnGelu and of the operator GeluGrad give the approximation by tanh, so
// this is what torch's gelu is on the 910B, whatever its argument says. (The page of
// aclnnGeluBackward shows both forms.) With torch_npu.npu.use_compatible_impl(True) it takes
// aclnnGeluV2.
OPERATOR(aclnnGelu, kFloats, Tensor self, Tensor out) { write(out, at::gelu(self, "tanh")); }
OPERATOR(aclnnGeluBackward, kFloats, Tensor grad, Tensor self, Tensor out) {
  write(out, at::gelu_backward(grad, self, "tanh"));
}
// approximate: 0 by the error function, 1 by tanh.
OPERATOR(aclnnGeluV2, kFloats, Tensor self, Int approximate, Tensor out) {
  write(out, at::gelu(self, approximate != 0 ? "tanh" : "none"));
}
OPERATOR(aclnnGeluBackwardV2, kFloats, Tensor grad, Tensor self, Text approximate, Tensor out) {
  write(out, at::gelu_backward(grad, self, approximate));
}
BACKWARD(aclnnSiluBackward, kFloats, at::silu_backward)
OPERATOR(aclnnThresholdBackward, kAny, Tensor grad, Tensor self, Scalar threshold, Tensor out) {
  write(out, at::threshold_backward(grad, self, threshold));
}
OPERATOR(aclnnSoftplus, kFloats, Tensor self, Scalar beta, Scalar threshold, Tensor out) {
  write(out, at::softplus(self, beta, threshold));
}
OPERATOR(aclnnSoftplusBackward, kFloats, Tensor grad, Tensor self, Scalar beta, Scalar threshold,
         Tensor out) {
  write(out, at::softplus_backward(grad, self, beta, threshold));
}
BACKWARD(aclnnTanhBackward, kFloats, at::tanh_backward)
BACKWARD(aclnnSigmoidBackward, kFloats, at::sigmoid_backward)

BINARY(aclnnBitwiseXorTensor, at::bitwise_xor)
BINARY(aclnnLeftShift, at::bitwise_left_shift)
BINARY(aclnnRightShift, at::bitwise_right_shift)
BINARY_SCALAR(aclnnBitwiseAndScalar, at::bitwise_and)
BINARY_SCALAR(aclnnBitwiseOrScalar, at::bitwise_or)
BINARY_SCALAR(aclnnBitwiseXorScalar, at::bitwise_xor)
BINARY_SCALAR(aclnnLeftShifts, at::bitwise_left_shift)
