// Losses that are one operator in CANN.
#include "operators/operator.h"

using namespace cann;

namespace {

// The weight of each row's label, 0 where the label is ignored.
Tensor label_weights(const Tensor& target, const OptionalTensor& weight, Int ignored) {
  const Tensor keep = target.ne(ignored);
  const Tensor labels = target.masked_fill(keep.logical_not(), 0);
  const Tensor each = weight ? weight->index_select(0, labels) : at::ones({target.size(0)});
  return each * keep.to(at::kFloat);
}

// Public pages say of z-loss that it is not supported yet, and give no formula for smoothing.
void check_plain(double smoothing, double z_scale) {
  TORCH_CHECK(smoothing == 0 && z_scale == 0, "the emulator has no label smoothing and no z-loss");
}

}  // namespace

// reduction: "mean", "sum" or "none".
OPERATOR(aclnnCrossEntropyLoss, kFloats, Tensor self, Tensor target, OptionalTensor weight,
         Text reduction, Int ignored, double smoothing, double z_scale, bool, Tensor loss,
         Tensor log_probability, OptionalTensor, OptionalTensor) {
  check_plain(smoothing, z_scale);
  const Tensor labels = target.to(at::kLong);
  const Tensor weights = label_weights(labels, weight, ignored);
  const Tensor all = at::log_softmax(self, 1, at::kFloat);
  const Tensor safe = labels.masked_fill(labels.eq(ignored), 0).unsqueeze(1);
  const Tensor each = -all.gather(1, safe).squeeze(1) * weights;
  write(log_probability, all);
  if (reduction == "mean") {
    write(loss, each.sum() / weights.sum());
  } else {
    write(loss, reduction == "sum" ? each.sum() : each);
  }
}
OPERATOR(aclnnCrossEntropyLossGrad, kFloats, Tensor grad, Tensor log_probability, Tensor target,
         OptionalTensor weight, OptionalTensor, OptionalTensor, Text reduction, Int ignored,
         double smoothing, double z_scale, Tensor out) {
  check_plain(smoothing, z_scale);
  const Tensor labels = target.to(at::kLong);
  Tensor weights = label_weights(labels, weight, ignored);
  if (reduction == "mean") weights = weights / weights.sum();
  const Tensor upstream = (grad.to(at::kFloat).flatten() * weights).unsqueeze(1);
  const Tensor wide = log_probability.to(at::kFloat);
  const Tensor safe = labels.masked_fill(labels.eq(ignored), 0).unsqueeze(1);
  write(out, (wide.exp() - at::zeros_like(wide).scatter(1, safe, 1)) * upstream);
}
