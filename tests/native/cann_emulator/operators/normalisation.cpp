// Normalisation, gated activations, rotary positions. Sums are in float32, as CANN documents.
#include "operators/operator.h"

using namespace cann;

namespace {

Ints last_dimensions(int64_t dims, int64_t count) {
  Ints last;
  for (int64_t d = dims - count; d < dims; ++d) last.push_back(d);
  return last;
}

// x * rsqrt(mean(x^2) + eps) over the dimensions of gamma (Zhang and Sennrich 2019, equation 4).
void rms_norm(const Tensor& x, const Tensor& gamma, double epsilon, const Tensor& y,
              const Tensor& rstd) {
  const Ints dims = last_dimensions(x.dim(), gamma.dim());
  const Tensor scale = at::rsqrt(x.pow(2).mean(dims, true) + epsilon);
  write(y, x * scale * widened(gamma));
  write(rstd, scale);
}

// The second operand of a rotation: the halves (mode 0) or neighbours (mode 1), swapped, the first
// with a minus. Its transpose is its negative.
Tensor quarter_turned(const Tensor& x, Int mode) {
  if (mode == 0) {
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
  }
  const Tensor even = x.slice(-1, 0, std::nullopt, 2);
  const Tensor odd = x.slice(-1, 1, std::nullopt, 2);
  return at::stack({-odd, even}, -1).flatten(-2);
}

void look_at_shape(const Tensor& x, const Ints& shape) {
  EXPECT(x.dim() >= static_cast<Int>(shape.size()) &&
             x.sizes().slice(x.dim() - static_cast<Int>(shape.size())) == shape,
         "the last sizes of x as normalized_shape, got ", at::IntArrayRef(shape));
}

// A gated activation takes two halves of x and gives one.
void look_at_groups(const Tensor& x, Int batch, Int channels, Int area, Int groups) {
  EXPECT(x.dim() >= 2 && x.size(0) == batch && x.size(1) == channels &&
             x.numel() == batch * channels * area,
         "N, C and HxW as x has them");
  EXPECT(groups > 0 && channels % groups == 0, "C a multiple of group");
}

void look_at_halves(const Tensor& x, Int dim, const Tensor& half) {
  EXPECT(dim >= -x.dim() && dim < x.dim() && x.size(dim) % 2 == 0, "an axis of an even size, got ",
         dim, " of ", x.sizes());
  Ints sizes = x.sizes().vec();
  sizes[dim < 0 ? dim + x.dim() : dim] /= 2;
  EXPECT(half.sizes() == sizes, "half the sizes of x, got ", half.sizes());
}

void look_at_mode(Int mode) {
  HAS_NO(mode != 0 && mode != 1, "rotary modes but 0 (half) and 1 (interleave), got ", mode);
}

void rotate(const Tensor& x, const Tensor& cosine, const Tensor& sine, Int mode,
            const Tensor& out) {
  const Tensor wide = widened(x);
  write(out, wide * widened(cosine) + quarter_turned(wide, mode) * widened(sine));
}

}  // namespace

CHECKED(aclnnLayerNorm, kFloats, Tensor x, Ints shape, OptionalTensor weight, OptionalTensor bias,
        double epsilon, Tensor out, OptionalTensor mean, OptionalTensor rstd) {
  look_at_shape(x, shape);
  WORK_BELOW;
  const auto [y, m, r] =
      at::native_layer_norm(widened(x), shape, widened(weight), widened(bias), epsilon);
  write(out, y);
  if (mean) write(*mean, m);
  if (rstd) write(*rstd, r);
}
CHECKED(aclnnLayerNormBackward, kFloats, Tensor grad, Tensor x, Ints shape, Tensor mean,
        Tensor rstd, OptionalTensor weight, OptionalTensor bias, Bools wanted,
        OptionalTensor grad_x, OptionalTensor grad_weight, OptionalTensor grad_bias) {
  look_at_shape(x, shape);
  WORK_BELOW;
  write(wanted, {grad_x, grad_weight, grad_bias},
        at::native_layer_norm_backward(widened(grad), widened(x), shape, mean, rstd,
                                       widened(weight), widened(bias), mask_of(wanted)));
}

// Running statistics are updated in place; without training they are what normalises.
OPERATOR(aclnnBatchNorm, kFloats, Tensor x, OptionalTensor weight, OptionalTensor bias,
         OptionalTensor mean, OptionalTensor variance, bool trains, double momentum, double epsilon,
         Tensor out, Tensor saved_mean, Tensor saved_scale) {
  const OptionalTensor running = widened(mean), spread = widened(variance);
  const auto [y, m, r] = at::native_batch_norm(widened(x), widened(weight), widened(bias), running,
                                               spread, trains, momentum, epsilon);
  write(out, y);
  if (!trains) return;
  if (mean) write(*mean, *running);
  if (variance) write(*variance, *spread);
  write(saved_mean, m);
  write(saved_scale, r);
}
OPERATOR(aclnnBatchNormBackward, kFloats, Tensor grad, Tensor x, OptionalTensor weight,
         OptionalTensor mean, OptionalTensor variance, OptionalTensor saved_mean,
         OptionalTensor saved_scale, bool trains, double epsilon, Bools wanted,
         OptionalTensor grad_x, OptionalTensor grad_weight, OptionalTensor grad_bias) {
  write(wanted, {grad_x, grad_weight, grad_bias},
        at::native_batch_norm_backward(widened(grad), widened(x), widened(weight), widened(mean),
                                       widened(variance), widened(saved_mean), widened(saved_scale),
                                       trains, epsilon, mask_of(wanted)));
}
CHECKED(aclnnGroupNorm, kFloats, Tensor x, OptionalTensor weight, OptionalTensor bias, Int batch,
        Int channels, Int area, Int groups, double epsilon, Tensor out, Tensor mean, Tensor rstd) {
  look_at_groups(x, batch, channels, area, groups);
  WORK_BELOW;
  const auto [y, m, r] = at::native_group_norm(widened(x), widened(weight), widened(bias), batch,
                                               channels, area, groups, epsilon);
  write(out, y);
  write(mean, m);
  write(rstd, r);
}
CHECKED(aclnnGroupNormBackward, kFloats, Tensor grad, Tensor x, Tensor mean, Tensor rstd,
        OptionalTensor weight, Int batch, Int channels, Int area, Int groups, Bools wanted,
        OptionalTensor grad_x, OptionalTensor grad_weight, OptionalTensor grad_bias) {
  look_at_groups(x, batch, channels, area, groups);
  EXPECT(mean.numel() == batch * groups, "mean of each group");
  WORK_BELOW;
  write(wanted, {grad_x, grad_weight, grad_bias},
        at::native_group_norm_backward(widened(grad), widened(x), widened(mean), widened(rstd),
                                       widened(weight), batch, channels, area, groups,
                                       mask_of(wanted)));
}

// The sum that is normalised is not rounded before, as the published kernel has it.
OPERATOR(aclnnAddLayerNorm, kFloats, Tensor x1, Tensor x2, Tensor gamma, Tensor beta,
         OptionalTensor bias, double epsilon, bool with_sum, Tensor y, Tensor mean, Tensor rstd,
         Tensor sum) {
  Tensor total = widened(x1) + widened(x2);
  if (bias) total = total + widened(*bias);
  const auto [normal, m, r] =
      at::native_layer_norm(total, {total.size(-1)}, widened(gamma), widened(beta), epsilon);
  write(y, normal);
  write(mean, m);
  write(rstd, r);
  if (with_sum) write(sum, total);
}

OPERATOR(aclnnRmsNorm, kFloats, Tensor x, Tensor gamma, double epsilon, Tensor y, Tensor rstd) {
  rms_norm(widened(x), gamma, epsilon, y, rstd);
}
// sum is x1 + x2 in their dtype, which is what is normalised.
OPERATOR(aclnnAddRmsNorm, kFloats, Tensor x1, Tensor x2, Tensor gamma, double epsilon, Tensor y,
         Tensor rstd, Tensor sum) {
  write(sum, x1 + x2);
  rms_norm(widened(sum), gamma, epsilon, y, rstd);
}
OPERATOR(aclnnRmsNormGrad, kFloats, Tensor grad, Tensor x, Tensor rstd, Tensor gamma, Tensor grad_x,
         Tensor grad_gamma) {
  const Ints dims = last_dimensions(x.dim(), gamma.dim());
  Ints others = last_dimensions(x.dim() - gamma.dim(), x.dim() - gamma.dim());
  Tensor scale = rstd;
  while (scale.dim() < x.dim()) scale = scale.unsqueeze(-1);
  const Tensor normal = widened(x) * scale;
  const Tensor scaled = widened(grad) * widened(gamma);
  write(grad_x, scale * (scaled - normal * (scaled * normal).mean(dims, true)));
  const Tensor product = widened(grad) * normal;
  write(grad_gamma, others.empty() ? product : product.sum(others));
}

CHECKED(aclnnSwiGlu, kFloats, Tensor x, Int dim, Tensor out) {
  look_at_halves(x, dim, out);
  WORK_BELOW;
  const auto halves = widened(x).chunk(2, dim);
  write(out, at::silu(halves[0]) * halves[1]);
}
CHECKED(aclnnSwiGluGrad, kFloats, Tensor grad, Tensor x, Int dim, Tensor out) {
  look_at_halves(x, dim, grad);
  WORK_BELOW;
  const auto halves = widened(x).chunk(2, dim);
  const Tensor wide = widened(grad);
  write(out,
        at::cat({at::silu_backward(wide * halves[1], halves[0]), wide * at::silu(halves[0])}, dim));
}
// out = a * gelu(b), with a the second half when `is_left` says that the first is activated.
CHECKED(aclnnGeGluV3, kFloats, Tensor x, Int dim, Int approximate, bool is_left, Tensor out,
        Tensor gelu) {
  look_at_halves(x, dim, out);
  WORK_BELOW;
  const auto halves = widened(x).chunk(2, dim);
  const Tensor active = at::gelu(halves[is_left ? 0 : 1], approximate != 0 ? "tanh" : "none");
  write(gelu, active);
  write(out, halves[is_left ? 1 : 0] * active);
}
CHECKED(aclnnGeGluV3Backward, kFloats, Tensor grad, Tensor x, Tensor gelu, Int dim, Int approximate,
        bool is_left, Tensor out) {
  look_at_halves(x, dim, grad);
  WORK_BELOW;
  const auto halves = widened(x).chunk(2, dim);
  const Tensor wide = widened(grad);
  const Tensor linear = wide * widened(gelu);
  const Tensor active = at::gelu_backward(wide * halves[is_left ? 1 : 0], halves[is_left ? 0 : 1],
                                          approximate != 0 ? "tanh" : "none");
  write(out, is_left ? at::cat({active, linear}, dim) : at::cat({linear, active}, dim));
}
// x * sigmoid(1.702 x), in CANN's documented form.
OPERATOR(aclnnFastGelu, kFloats, Tensor x, Tensor out) {
  const Tensor wide = widened(x);
  write(out, wide * at::sigmoid(1.702 * wide));
}
OPERATOR(aclnnFastGeluBackward, kFloats, Tensor grad, Tensor x, Tensor out) {
  const Tensor wide = widened(x);
  const Tensor gate = at::sigmoid(1.702 * wide);
  write(out, widened(grad) * gate * (1 + 1.702 * wide * (1 - gate)));
}

CHECKED(aclnnRotaryPositionEmbedding, kFloats, Tensor x, Tensor cosine, Tensor sine, Int mode,
        Tensor out) {
  look_at_mode(mode);
  WORK_BELOW;
  rotate(x, cosine, sine, mode, out);
}
CHECKED(aclnnRotaryPositionEmbeddingV2, kFloats, Tensor x, Tensor cosine, Tensor sine, Int mode,
        OptionalTensor matrix, Tensor out) {
  look_at_mode(mode);
  HAS_NO(matrix, "rotation by a matrix");
  WORK_BELOW;
  rotate(x, cosine, sine, mode, out);
}
CHECKED(aclnnRotaryPositionEmbeddingGrad, kFloats, Tensor grad, Tensor cosine, Tensor sine,
        OptionalTensor x, Int mode, Tensor grad_x, OptionalTensor grad_cosine,
        OptionalTensor grad_sine) {
  look_at_mode(mode);
  WORK_BELOW;
  const Tensor wide = widened(grad);
  write(grad_x, wide * widened(cosine) - quarter_turned(wide * widened(sine), mode));
  if (!x) return;
  if (grad_cosine) write(*grad_cosine, (wide * widened(*x)).sum_to_size(grad_cosine->sizes()));
  if (grad_sine) {
    write(*grad_sine, (wide * quarter_turned(widened(*x), mode)).sum_to_size(grad_sine->sizes()));
  }
}
