// What anychip's references call besides: bits of integers, placing by index, and a few more.
#include "operators/operator.h"

using namespace cann;

#define BITS(name, function) \
  OPERATOR(name, kAny, Tensor self, Tensor other, Tensor out) { write(out, function(self, other)); }
#define BITS_SCALAR(name, function) \
  OPERATOR(name, kAny, Tensor self, Scalar other, Tensor out) { write(out, function(self, other)); }

BITS(aclnnBitwiseXorTensor, at::bitwise_xor)
BITS(aclnnLeftShift, at::bitwise_left_shift)
BITS(aclnnRightShift, at::bitwise_right_shift)
BITS_SCALAR(aclnnBitwiseAndScalar, at::bitwise_and)
BITS_SCALAR(aclnnBitwiseOrScalar, at::bitwise_or)
BITS_SCALAR(aclnnBitwiseXorScalar, at::bitwise_xor)
BITS_SCALAR(aclnnLeftShifts, at::bitwise_left_shift)

namespace {

// 0 puts, 1 adds, 2 multiplies.
void scatter(Tensor target, Int dim, const Tensor& index, const Tensor& source, Int reduction) {
  if (reduction == 0) {
    target.scatter_(dim, index, source);
  } else {
    target.scatter_(dim, index, source, reduction == 1 ? "add" : "multiply");
  }
}

}  // namespace

OPERATOR(aclnnScatter, kAny, Tensor self, Int dim, Tensor index, Tensor source, Int reduction,
         Tensor out) {
  Tensor result = self.clone();
  scatter(result, dim, index, source, reduction);
  write(out, result);
}
OPERATOR(aclnnInplaceScatter, kAny, Tensor self, Int dim, Tensor index, Tensor source,
         Int reduction) {
  scatter(self, dim, index, source, reduction);
}
OPERATOR(aclnnScatterValue, kAny, Tensor self, Int dim, Tensor index, Scalar value, Int reduction,
         Tensor out) {
  Tensor result = self.clone();
  scatter(result, dim, index, at::full_like(index, value, self.options()), reduction);
  write(out, result);
}
OPERATOR(aclnnInplaceScatterValue, kAny, Tensor self, Int dim, Tensor index, Scalar value,
         Int reduction) {
  scatter(self, dim, index, at::full_like(index, value, self.options()), reduction);
}
OPERATOR(aclnnRepeatInterleaveIntWithDim, kAny, Tensor self, Int repeats, Int dim, Int,
         Tensor out) {
  write(out, at::repeat_interleave(self, repeats, dim));
}
OPERATOR(aclnnRsubs, kAny, Tensor self, Scalar other, Scalar alpha, Tensor out) {
  write(out, at::rsub(self, other, alpha));
}
OPERATOR(aclnnLogSumExp, kFloats, Tensor self, Ints dims, bool keep, Tensor out) {
  write(out, at::logsumexp(self, dims, keep));
}
