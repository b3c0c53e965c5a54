// Sums, means, norms, extremes, softmax, losses. An empty list of dimensions stands for all.
#include "operators/operator.h"

using namespace cann;

namespace {

at::OptionalIntArrayRef dimensions(const OptionalInts& dims) {
  return dims && !dims->empty() ? at::OptionalIntArrayRef(*dims) : at::OptionalIntArrayRef();
}

}  // namespace

OPERATOR(aclnnReduceSum, kAny, Tensor self, OptionalInts dims, bool keep, DType dtype, Tensor out) {
  write(out, at::sum(self, dimensions(dims), keep, scalar_type(dtype)));
}
OPERATOR(aclnnMean, kAny, Tensor self, OptionalInts dims, bool keep, DType dtype, Tensor out) {
  write(out, at::mean(self, dimensions(dims), keep, scalar_type(dtype)));
}
// With `is_noop` an empty list of dimensions reduces none.
OPERATOR(aclnnMeanV2, kFloats, Tensor self, OptionalInts dims, bool keep, bool is_noop,
         Tensor out) {
  const bool is_identity = is_noop && (!dims || dims->empty());
  write(out, is_identity ? self : at::mean(self, dimensions(dims), keep));
}
OPERATOR(aclnnLinalgVectorNorm, kFloats, Tensor self, Scalar order, OptionalInts dims, bool keep,
         DType dtype, Tensor out) {
  write(out, at::linalg_vector_norm(self, order, dimensions(dims), keep, scalar_type(dtype)));
}
OPERATOR(aclnnAmax, kAny, Tensor self, OptionalInts dims, bool keep, Tensor out) {
  write(out, at::amax(self, dims.value_or(Ints{}), keep));
}
OPERATOR(aclnnAmin, kAny, Tensor self, OptionalInts dims, bool keep, Tensor out) {
  write(out, at::amin(self, dims.value_or(Ints{}), keep));
}
OPERATOR(aclnnAminmax, kAny, Tensor self, OptionalInts dims, bool keep, Tensor least,
         Tensor largest) {
  write(least, at::amin(self, dims.value_or(Ints{}), keep));
  write(largest, at::amax(self, dims.value_or(Ints{}), keep));
}
OPERATOR(aclnnMax, kAny, Tensor self, Tensor out) { write(out, at::max(self)); }
OPERATOR(aclnnMin, kAny, Tensor self, Tensor out) { write(out, at::min(self)); }
OPERATOR(aclnnMaxDim, kAny, Tensor self, Int dim, bool keep, Tensor values, Tensor indices) {
  const auto [largest, places] = at::max(self, dim, keep);
  write(values, largest);
  write(indices, places);
}
OPERATOR(aclnnArgMax, kAny, Tensor self, Int dim, bool keep, Tensor out) {
  write(out, at::argmax(self, dim, keep));
}
OPERATOR(aclnnAll, kAny, Tensor self, OptionalInts dims, bool keep, Tensor out) {
  write(out, at::all(self, dimensions(dims), keep));
}
OPERATOR(aclnnAny, kAny, Tensor self, OptionalInts dims, bool keep, Tensor out) {
  write(out, at::any(self, dimensions(dims), keep));
}
OPERATOR(aclnnEqual, kAny, Tensor self, Tensor other, Tensor out) {
  out.fill_(at::equal(self, other));
}
OPERATOR(aclnnCumsum, kAny, Tensor self, Int dim, DType dtype, Tensor out) {
  write(out, at::cumsum(self, dim, scalar_type(dtype)));
}
OPERATOR(aclnnVarCorrection, kFloats, Tensor self, OptionalInts dims, Int correction, bool keep,
         Tensor out) {
  write(out, at::var(self, dimensions(dims), Scalar(correction), keep));
}
OPERATOR(aclnnVarMean, kFloats, Tensor self, OptionalInts dims, Int correction, bool keep,
         Tensor variance, Tensor mean) {
  const auto [v, m] = at::var_mean(self, dimensions(dims), Scalar(correction), keep);
  write(variance, v);
  write(mean, m);
}
OPERATOR(aclnnStdMeanCorrection, kFloats, Tensor self, OptionalInts dims, Int correction, bool keep,
         Tensor deviation, Tensor mean) {
  const auto [d, m] = at::std_mean(self, dimensions(dims), Scalar(correction), keep);
  write(deviation, d);
  write(mean, m);
}
OPERATOR(aclnnNorm, kFloats, Tensor self, Scalar order, Ints dims, bool keep, Tensor out) {
  write(out, at::norm(self, order, dims, keep));
}
OPERATOR(aclnnStd, kFloats, Tensor self, OptionalInts dims, Int correction, bool keep, Tensor out) {
  write(out, at::std(self, dimensions(dims), Scalar(correction), keep));
}

OPERATOR(aclnnSoftmax, kAny, Tensor self, Int dim, Tensor out) {
  write(out, at::softmax(self, dim, out.scalar_type()));
}
OPERATOR(aclnnSoftmaxBackward, kAny, Tensor grad, Tensor output, Int dim, Tensor out) {
  write(out, at::_softmax_backward_data(grad, output, dim, output.scalar_type()));
}
OPERATOR(aclnnLogSoftmax, kAny, Tensor self, Int dim, Tensor out) {
  write(out, at::log_softmax(self, dim, out.scalar_type()));
}
OPERATOR(aclnnLogSoftmaxBackward, kAny, Tensor grad, Tensor output, Int dim, Tensor out) {
  write(out, at::_log_softmax_backward_data(grad, output, dim, output.scalar_type()));
}

// reduction: 0 none, 1 mean, 2 sum.
OPERATOR(aclnnNLLLoss, kFloats, Tensor self, Tensor target, OptionalTensor weight, Int reduction,
         Int ignored, Tensor out, Tensor total_weight) {
  const auto [loss, total] =
      at::nll_loss_forward(self, target.to(at::kLong), weight, reduction, ignored);
  write(out, loss);
  write(total_weight, total);
}
OPERATOR(aclnnNLLLossBackward, kFloats, Tensor grad, Tensor self, Tensor target,
         OptionalTensor weight, Int reduction, Int ignored, Tensor total_weight, Tensor out) {
  const Tensor total = total_weight.to(self.scalar_type()).reshape({});
  write(out,
        at::nll_loss_backward(grad, self, target.to(at::kLong), weight, reduction, ignored, total));
}
OPERATOR(aclnnMseLoss, kFloats, Tensor self, Tensor target, Int reduction, Tensor out) {
  write(out, at::mse_loss(self, target, reduction));
}
OPERATOR(aclnnMseLossBackward, kFloats, Tensor grad, Tensor self, Tensor target, Int reduction,
         Tensor out) {
  write(out, at::mse_loss_backward(grad, self, target, reduction));
}
OPERATOR(aclnnBinaryCrossEntropy, kFloats, Tensor self, Tensor target, OptionalTensor weight,
         Int reduction, Tensor out) {
  write(out, at::binary_cross_entropy(self, target, weight, reduction));
}
OPERATOR(aclnnBinaryCrossEntropyBackward, kFloats, Tensor grad, Tensor self, Tensor target,
         OptionalTensor weight, Int reduction, Tensor out) {
  write(out, at::binary_cross_entropy_backward(grad, self, target, weight, reduction));
}
OPERATOR(aclnnBinaryCrossEntropyWithLogits, kFloats, Tensor self, Tensor target,
         OptionalTensor weight, OptionalTensor positive, Int reduction, Tensor out) {
  write(out, at::binary_cross_entropy_with_logits(self, target, weight, positive, reduction));
}
// d/dx of weight * (t * positive * softplus(-x) + (1 - t) * softplus(x)).
OPERATOR(aclnnBinaryCrossEntropyWithLogitsBackward, kFloats, Tensor grad, Tensor self,
         Tensor target, OptionalTensor weight, OptionalTensor positive, Int reduction, Tensor out) {
  const Tensor raised = positive ? target * *positive : target;
  Tensor each = (raised + 1 - target) * at::sigmoid(self) - raised;
  if (weight) each = each * *weight;
  if (reduction == 1) each = each / self.numel();
  write(out, each * grad);
}
OPERATOR(aclnnLogSumExp, kFloats, Tensor self, Ints dims, bool keep, Tensor out) {
  write(out, at::logsumexp(self, dims, keep));
}
