// Operators over lists of tensors, element by element of the list. An output may be its input.
#include "operators/operator.h"

using namespace cann;

namespace {

template <class Function>
void each(const Tensors& out, const Function& value) {
  for (size_t i = 0; i < out.size(); ++i) write(out[i], value(i));
}

}  // namespace

#define EACH(name, types, value, ...)                                           \
  OPERATOR(name, types, Tensors self __VA_OPT__(, ) __VA_ARGS__, Tensors out) { \
    each(out, [&](size_t i) { return value; });                                 \
  }

EACH(aclnnForeachCopy, kAny, self[i])
EACH(aclnnForeachSqrt, kFloats, at::sqrt(self[i]))
EACH(aclnnForeachReciprocal, kFloats, at::reciprocal(self[i]))
EACH(aclnnForeachNeg, kAny, at::neg(self[i]))
EACH(aclnnForeachNorm, kFloats, at::linalg_vector_norm(self[i], order), Scalar order)
EACH(aclnnForeachAddScalarV2, kAny, at::add(self[i], other), Scalar other)
EACH(aclnnForeachMulScalarV2, kAny, at::mul(self[i], other), Scalar other)
EACH(aclnnForeachDivScalarV2, kFloats, at::div(self[i], other), Scalar other)
EACH(aclnnForeachMulList, kAny, at::mul(self[i], other[i]), Tensors other)
EACH(aclnnForeachDivList, kFloats, at::div(self[i], other[i]), Tensors other)
EACH(aclnnForeachMaximumList, kAny, at::maximum(self[i], other[i]), Tensors other)
EACH(aclnnForeachAddScalarList, kAny, at::add(self[i], others[i]), Scalars others)
EACH(aclnnForeachMulScalarList, kAny, at::mul(self[i], others[i]), Scalars others)
EACH(aclnnForeachDivScalarList, kFloats, at::div(self[i], others[i]), Scalars others)
EACH(aclnnForeachAddListV2, kAny, at::add(self[i], other[i], a), Tensors other, Scalar a)
EACH(aclnnForeachSubListV2, kAny, at::sub(self[i], other[i], a), Tensors other, Scalar a)
EACH(aclnnForeachLerpScalar, kFloats, at::lerp(self[i], end[i], w), Tensors end, Scalar w)
EACH(aclnnForeachAddcmulScalarV2, kAny, at::addcmul(self[i], a[i], b[i], w), Tensors a, Tensors b,
     Scalar w)
EACH(aclnnForeachAddcdivScalarV2, kFloats, at::addcdiv(self[i], a[i], b[i], w), Tensors a,
     Tensors b, Scalar w)

OPERATOR(aclnnForeachZeroInplace, kAny, Tensors self) {
  for (const Tensor& tensor : self) tensor.zero_();
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
