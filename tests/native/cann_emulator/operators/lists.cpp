// Operators over lists of tensors, element by element of the list. An output may be its input.
#include "operators/operator.h"

using namespace cann;

namespace {

template <class Function>
void each(const Tensors& out, const Function& value) {
  for (size_t i = 0; i < out.size(); ++i) write(out[i], value(i));
}

}  // namespace

OPERATOR(aclnnForeachCopy, kAny, Tensors source, Tensors out) {
  each(out, [&](size_t i) { return source[i]; });
}
OPERATOR(aclnnForeachZeroInplace, kAny, Tensors self) {
  for (const Tensor& tensor : self) tensor.zero_();
}
OPERATOR(aclnnForeachSqrt, kFloats, Tensors self, Tensors out) {
  each(out, [&](size_t i) { return at::sqrt(self[i]); });
}
OPERATOR(aclnnForeachReciprocal, kFloats, Tensors self, Tensors out) {
  each(out, [&](size_t i) { return at::reciprocal(self[i]); });
}
OPERATOR(aclnnForeachNeg, kAny, Tensors self, Tensors out) {
  each(out, [&](size_t i) { return at::neg(self[i]); });
}
OPERATOR(aclnnForeachNorm, kFloats, Tensors self, Scalar order, Tensors out) {
  each(out, [&](size_t i) { return at::linalg_vector_norm(self[i], order); });
}
OPERATOR(aclnnForeachAddScalarV2, kAny, Tensors self, Scalar other, Tensors out) {
  each(out, [&](size_t i) { return at::add(self[i], other); });
}
OPERATOR(aclnnForeachMulScalarV2, kAny, Tensors self, Scalar other, Tensors out) {
  each(out, [&](size_t i) { return at::mul(self[i], other); });
}
OPERATOR(aclnnForeachDivScalarV2, kFloats, Tensors self, Scalar other, Tensors out) {
  each(out, [&](size_t i) { return at::div(self[i], other); });
}
OPERATOR(aclnnForeachAddListV2, kAny, Tensors self, Tensors other, Scalar alpha, Tensors out) {
  each(out, [&](size_t i) { return at::add(self[i], other[i], alpha); });
}
OPERATOR(aclnnForeachSubListV2, kAny, Tensors self, Tensors other, Scalar alpha, Tensors out) {
  each(out, [&](size_t i) { return at::sub(self[i], other[i], alpha); });
}
OPERATOR(aclnnForeachMulList, kAny, Tensors self, Tensors other, Tensors out) {
  each(out, [&](size_t i) { return at::mul(self[i], other[i]); });
}
OPERATOR(aclnnForeachDivList, kFloats, Tensors self, Tensors other, Tensors out) {
  each(out, [&](size_t i) { return at::div(self[i], other[i]); });
}
OPERATOR(aclnnForeachMaximumList, kAny, Tensors self, Tensors other, Tensors out) {
  each(out, [&](size_t i) { return at::maximum(self[i], other[i]); });
}
OPERATOR(aclnnForeachAddScalarList, kAny, Tensors self, Scalars others, Tensors out) {
  each(out, [&](size_t i) { return at::add(self[i], others[i]); });
}
OPERATOR(aclnnForeachMulScalarList, kAny, Tensors self, Scalars others, Tensors out) {
  each(out, [&](size_t i) { return at::mul(self[i], others[i]); });
}
OPERATOR(aclnnForeachDivScalarList, kFloats, Tensors self, Scalars others, Tensors out) {
  each(out, [&](size_t i) { return at::div(self[i], others[i]); });
}
OPERATOR(aclnnForeachLerpScalar, kFloats, Tensors self, Tensors end, Scalar weight, Tensors out) {
  each(out, [&](size_t i) { return at::lerp(self[i], end[i], weight); });
}
OPERATOR(aclnnForeachAddcmulScalarV2, kAny, Tensors self, Tensors a, Tensors b, Scalar value,
         Tensors out) {
  each(out, [&](size_t i) { return at::addcmul(self[i], a[i], b[i], value); });
}
OPERATOR(aclnnForeachAddcdivScalarV2, kFloats, Tensors self, Tensors a, Tensors b, Scalar value,
         Tensors out) {
  each(out, [&](size_t i) { return at::addcdiv(self[i], a[i], b[i], value); });
}

// found becomes 1 where an element is not finite; the tensors are scaled in place in any case. The
// scale is float32, and so is the product: one of float16 would lose a scale above 2^24.
OPERATOR(aclnnForeachNonFiniteCheckAndUnscale, kFloats, Tensors tensors, Tensor found,
         Tensor inverse_scale) {
  for (const Tensor& tensor : tensors) {
    TORCH_CHECK(tensor.scalar_type() == tensors[0].scalar_type(), "a list has one data type");
    if (!at::isfinite(tensor).all().item<bool>()) found.fill_(1);
    write(tensor, tensor.to(at::kFloat) * inverse_scale.reshape({}));
  }
}
