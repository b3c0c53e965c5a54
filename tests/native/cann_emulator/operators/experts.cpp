// Mixture of experts: the gate, and moving tokens to their experts and back. And the quantisation
// of a token.
#include "operators/operator.h"

using namespace cann;

namespace {

// Rows of `packed` at the places, zero where a place is past the end: the token was dropped.
Tensor rows_at(const Tensor& packed, const Tensor& places) {
  const Tensor flat = places.flatten().to(at::kLong);
  const Tensor is_there = flat.lt(packed.size(0));
  const Tensor rows = packed.index_select(0, flat.masked_fill(is_there.logical_not(), 0));
  return rows.to(at::kFloat) * is_there.unsqueeze(1);
}

void look_at_mode(bool is_padded) { HAS_NO(is_padded, "padded mode, nor has CANN"); }

Int experts_of_token(const OptionalTensor& probabilities) {
  return probabilities ? probabilities->size(1) : 1;
}

}  // namespace

// The k largest of softmax(x). rows[i, j] = j * tokens + i. A finished token has no expert: its
// index is their count.
OPERATOR(aclnnMoeGatingTopKSoftmax, kFloats, Tensor x, OptionalTensor finished, Int k, Tensor out,
         Tensor experts, Tensor rows) {
  const auto [values, places] = at::topk(at::softmax(x, -1, at::kFloat), k, -1);
  write(out, values);
  write(experts, finished ? places.masked_fill(finished->unsqueeze(-1), x.size(-1)) : places);
  const Int tokens = x.numel() / x.size(-1);
  write(rows, at::arange(tokens * k).reshape({k, tokens}).t());
}

// Tokens in the order of their experts; places[i * k + j] says where the j-th copy of token i is.
CHECKED(aclnnMoeTokenPermute, kFloats, Tensor tokens, Tensor experts, Int count, bool is_padded,
        Tensor out, Tensor places) {
  look_at_mode(is_padded);
  WORK_BELOW;
  const Int copies = experts.dim() == 1 ? 1 : experts.size(1);
  const Tensor order = at::argsort(experts.flatten(), true, 0, false);
  write(places, at::argsort(order, true, 0, false));
  write(out, tokens.index_select(0, at::floor_divide(order, copies).narrow(0, 0, count)));
}
CHECKED(aclnnMoeTokenPermuteGrad, kFloats, Tensor grad, Tensor places, Int copies, bool is_padded,
        Tensor out) {
  look_at_mode(is_padded);
  WORK_BELOW;
  write(out, rows_at(grad, places).reshape({-1, copies, grad.size(1)}).sum(1));
}
CHECKED(aclnnMoeTokenUnpermute, kFloats, Tensor packed, Tensor places, OptionalTensor probabilities,
        bool is_padded, OptionalInts, Tensor out) {
  look_at_mode(is_padded);
  WORK_BELOW;
  const Int copies = experts_of_token(probabilities);
  const Tensor rows = rows_at(packed, places).reshape({-1, copies, packed.size(1)});
  write(out, (probabilities ? rows * probabilities->unsqueeze(-1) : rows).sum(1));
}
CHECKED(aclnnMoeTokenUnpermuteGrad, kFloats, Tensor packed, Tensor grad, Tensor places,
        OptionalTensor probabilities, bool is_padded, OptionalInts, Tensor grad_packed,
        OptionalTensor grad_probabilities) {
  look_at_mode(is_padded);
  WORK_BELOW;
  const Int copies = experts_of_token(probabilities);
  const Tensor upstream = grad.to(at::kFloat).unsqueeze(1);
  Tensor of_rows = upstream.expand({-1, copies, -1});
  if (probabilities) of_rows = of_rows * probabilities->unsqueeze(-1);
  const Tensor flat = places.flatten().to(at::kLong);
  const Tensor kept = at::nonzero(flat.lt(packed.size(0))).flatten();
  Tensor result = at::zeros(grad_packed.sizes());
  result.index_copy_(0, flat.index_select(0, kept),
                     of_rows.reshape({-1, packed.size(1)}).index_select(0, kept));
  write(grad_packed, result);
  if (probabilities && grad_probabilities) {
    const Tensor rows = rows_at(packed, places).reshape({-1, copies, packed.size(1)});
    write(*grad_probabilities, (rows * upstream).sum(-1));
  }
}

// Each row of x * smooth in 8 bits: its largest absolute value becomes 127.
CHECKED(aclnnDynamicQuantV2, kHalves, Tensor x, OptionalTensor smooth, OptionalTensor groups, DType,
        Tensor out, Tensor scale, OptionalTensor offset) {
  HAS_NO(groups || offset || out.scalar_type() != at::kChar,
         "quantisation but to int8, symmetrically, without groups");
  WORK_BELOW;
  const Tensor wide = x.to(at::kFloat);
  const Tensor smoothed = smooth ? wide * smooth->to(at::kFloat) : wide;
  const Tensor unit = smoothed.abs().amax(-1, true) / 127;
  write(scale, unit);
  write(out, at::round(smoothed / unit.masked_fill(unit == 0, 1)));
}
