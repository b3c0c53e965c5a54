// Losses that are one operator in CANN.
#include "operators/operator.h"

using namespace cann;

namespace {

// The weight of each row's label, 0 where the label is ignored. A negative `ignored` ignores none.
// A label that is no class ends in an error of the device.
Tensor label_weights(const Tensor& target, const OptionalTensor& weight, Int ignored) {
  const Tensor each = weight ? weight->index_select(0, target) : at::ones({target.size(0)});
  return ignored < 0 ? each : each * target.ne(ignored).to(at::kFloat);
}

// The arguments of z-loss have no effect in CANN, as documented. No formula of smoothing is.
void look(const Tensor& self, const Tensor& target, const OptionalTensor& weight,
          const Text& reduction, Int ignored, double smoothing) {
  HAS_NO(smoothing != 0, "label smoothing");
  const auto labels = target.scalar_type();
  EXPECT(labels == at::kLong || labels == at::kInt, "target of int32 or int64, got ", labels);
  EXPECT(!weight || weight->scalar_type() == at::kFloat, "weight of float32");
  EXPECT(target.size(0) == self.size(0) && (!weight || weight->size(0) == self.size(1)),
         "a target for each row, a weight for each class");
  EXPECT(ignored < self.size(1), "ignore_index below the count of classes");
  EXPECT(reduction == "mean" || reduction == "sum" || reduction == "none",
         "reduction mean, sum or none, got ", reduction);
}

}  // namespace

// reduction: "mean", "sum" or "none".
CHECKED(aclnnCrossEntropyLoss, kFloats, Tensor self, Tensor target, OptionalTensor weight,
        Text reduction, Int ignored, double smoothing, double, bool, Tensor loss,
        Tensor log_probability, OptionalTensor, OptionalTensor) {
  look(self, target, weight, reduction, ignored, smoothing);
  WORK_BELOW;
  const Tensor labels = target.to(at::kLong);
  const Tensor weights = label_weights(labels, weight, ignored);
  const Tensor all = at::log_softmax(self, 1, at::kFloat);
  const Tensor each = -all.gather(1, labels.unsqueeze(1)).squeeze(1) * weights;
  write(log_probability, all);
  if (reduction == "mean") {
    write(loss, each.sum() / weights.sum());
  } else {
    write(loss, reduction == "sum" ? each.sum() : each);
  }
}
CHECKED(aclnnCrossEntropyLossGrad, kFloats, Tensor grad, Tensor log_probability, Tensor target,
        OptionalTensor weight, OptionalTensor, OptionalTensor, Text reduction, Int ignored,
        double smoothing, double, Tensor out) {
  look(log_probability, target, weight, reduction, ignored, smoothing);
  WORK_BELOW;
  const Tensor labels = target.to(at::kLong);
  Tensor weights = label_weights(labels, weight, ignored);
  if (reduction == "mean") weights = weights / weights.sum();
  const Tensor upstream = (grad.to(at::kFloat).flatten() * weights).unsqueeze(1);
  const Tensor wide = log_probability.to(at::kFloat);
  const Tensor is_label = at::zeros_like(wide).scatter(1, labels.unsqueeze(1), 1);
  write(out, (wide.exp() - is_label) * upstream);
}
