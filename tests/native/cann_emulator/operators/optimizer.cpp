// AdamW (Loshchilov and Hutter 2019, algorithm 2), and the scale of a float16 loss.
#include <cmath>

#include "operators/operator.h"

using namespace cann;

// `step` counts the updates done before this one. All tensors are updated in place.
OPERATOR(aclnnApplyAdamWV2, kFloats, Tensor parameter, Tensor mean, Tensor square,
         OptionalTensor largest_square, Tensor grad, Tensor step, float rate, float beta1,
         float beta2, float decay, float epsilon, bool is_amsgrad, bool is_maximized) {
  const Tensor g = is_maximized ? at::neg(grad) : grad;
  const double count = step.item<double>() + 1;
  parameter.mul_(1 - rate * decay);
  mean.mul_(beta1).add_(g, 1 - beta1);
  square.mul_(beta2).addcmul_(g, g, 1 - beta2);
  Tensor second = square;
  if (is_amsgrad) {
    write(*largest_square, at::maximum(*largest_square, square));
    second = *largest_square;
  }
  const double correction1 = 1 - std::pow(static_cast<double>(beta1), count);
  const double correction2 = 1 - std::pow(static_cast<double>(beta2), count);
  parameter.addcdiv_(mean, (second.sqrt() / std::sqrt(correction2)).add_(epsilon),
                     -rate / correction1);
}

// A scale that would overflow stays.
OPERATOR(aclnnAmpUpdateScale, kFloats, Tensor scale, Tensor tracker, Tensor found, double growth,
         double backoff, Int interval, Tensor new_scale, Tensor new_tracker) {
  const bool is_found = found.item<float>() != 0;
  const bool grows = !is_found && tracker.item<int>() + 1 == interval;
  const Tensor scaled = scale * (is_found ? backoff : growth);
  const bool is_kept = !is_found && (!grows || !at::isfinite(scaled).item<bool>());
  write(new_tracker, is_found || grows ? at::zeros_like(tracker) : tracker + 1);
  write(new_scale, is_kept ? scale : scaled);
}
