// Matrix products. The last argument says which lower precision the cube unit may take; the
// emulator always takes the tensors' own.
#include "operators/operator.h"

using namespace cann;

OPERATOR(aclnnMm, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::mm(self, other));
}
OPERATOR(aclnnMatmul, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::matmul(self, other));
}
OPERATOR(aclnnBatchMatMul, kFloats, Tensor self, Tensor other, Tensor out, int8_t) {
  write(out, at::bmm(self, other));
}
OPERATOR(aclnnAddmm, kFloats, Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha,
         Tensor out, int8_t) {
  write(out, at::addmm(self, a, b, beta, alpha));
}
OPERATOR(aclnnBaddbmm, kFloats, Tensor self, Tensor a, Tensor b, Scalar beta, Scalar alpha,
         Tensor out, int8_t) {
  write(out, at::baddbmm(self, a, b, beta, alpha));
}
