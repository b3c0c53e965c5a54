// Attention with the scores in memory, for small shapes: softmax(scale * (q k^T + pse)) v
// (Vaswani et al. 2017, equation 1), with the masks of aclnnFlashAttentionScore.
#include <limits>

#include "operators/operator.h"

using namespace cann;

namespace {

// How scores are masked. sparse_mode, as documented: 0 the mask given, and its band of tokens; 1
// the mask alone; 2 causal from the upper left corner; 3 causal to the lower right; 4 a band to the
// lower right.
struct Masking {
  Int sparse_mode;
  Int before;
  Int after;
};

// Tensors as [batch, heads, length, size].
struct Operands {
  Tensor query, key, value;
  Int groups;  // query heads of one key head
};

Tensor heads_first(const Tensor& x, const Text& layout, Int heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  TORCH_CHECK(layout == "BSH" || layout == "SBH", "attention layout BNSD, BSND, BSH, SBH or TND, ",
              "got ", layout);
  const Tensor split = x.unflatten(2, {heads, x.size(2) / heads});
  return layout == "BSH" ? split.transpose(1, 2) : split.permute({1, 2, 0, 3});
}

Tensor heads_back(const Tensor& x, const Text& layout) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
  if (layout == "BSH") return x.transpose(1, 2).flatten(2);
  return x.permute({2, 0, 1, 3}).flatten(2);
}

Operands operands(const Tensor& query, const Tensor& key, const Tensor& value, const Text& layout,
                  Int heads) {
  const Tensor q = heads_first(query, layout, heads);
  // Layouts without an axis of heads leave the count of key heads to the size of a head.
  Int key_heads = key.size(-1) / q.size(3);
  if (layout == "BNSD") key_heads = key.size(1);
  if (layout == "BSND") key_heads = key.size(2);
  const Int groups = heads / key_heads;
  const auto widened = [&](const Tensor& x) {
    return heads_first(x, layout, key_heads).to(at::kFloat).repeat_interleave(groups, 1);
  };
  return {q.to(at::kFloat), widened(key), widened(value), groups};
}

// True where a score is left out; undefined when none is.
Tensor masked(const OptionalTensor& mask, Int queries, Int keys, const Masking& masking) {
  const Tensor i = at::arange(queries).unsqueeze(1);
  const Tensor j = at::arange(keys).unsqueeze(0);
  const Int shift = keys - queries;
  const auto outside = [&](const Tensor& at, Int before, Int after) {
    return (j > at + after).logical_or(j < at - before);
  };
  switch (masking.sparse_mode) {
    case 0:
      if (!mask) return {};
      return mask->to(at::kBool).logical_or(outside(i, masking.before, masking.after));
    case 1:
      TORCH_CHECK(mask, "sparse_mode 1 needs atten_mask");
      return mask->to(at::kBool);
    case 2:
      return j > i;
    case 3:
      return j > i + shift;
    case 4:
      return outside(i + shift, masking.before, masking.after);
    default:
      TORCH_CHECK(false, "the emulator has sparse_mode 0 to 4, got ", masking.sparse_mode);
  }
}

Tensor scores(const Operands& x, const OptionalTensor& pse, double scale,
              const OptionalTensor& mask, const Masking& masking) {
  Tensor product = at::matmul(x.query, x.key.transpose(2, 3));
  if (pse) product = product + pse->to(at::kFloat);
  product = product * scale;
  const Tensor left_out = masked(mask, x.query.size(2), x.key.size(2), masking);
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  return left_out.defined() ? product.masked_fill(left_out, kNone) : product;
}

// exp(scores - largest), and 0 in a row of which everything is masked.
Tensor exponentials(const Tensor& scores, const Tensor& largest) {
  return (scores - largest.masked_fill(at::isinf(largest), 0)).exp();
}
Tensor divided(const Tensor& exponentials, const Tensor& sum) {
  return exponentials / sum.masked_fill(sum == 0, 1);
}

struct Forward {
  Tensor out, largest, sum;
};

// `keep` holds 1 for a probability that dropout leaves, at a rate of keep_rate.
Forward forward(const Operands& x, const Tensor& scores, const OptionalTensor& keep,
                double keep_rate) {
  const Tensor largest = scores.amax(-1, true);
  const Tensor weights = exponentials(scores, largest);
  const Tensor sum = weights.sum(-1, true);
  Tensor probabilities = divided(weights, sum);
  if (keep) probabilities = probabilities * *keep / keep_rate;
  return {at::matmul(probabilities, x.value), largest, sum};
}

struct Gradients {
  Tensor query, key, value, pse;
};

// Query heads of one key head add up.
Tensor joined(const Tensor& grad, Int groups) {
  return groups == 1 ? grad : grad.unflatten(1, {grad.size(1) / groups, groups}).sum(2);
}

Gradients backward(const Operands& x, const Tensor& scores, const Tensor& grad,
                   const Tensor& largest, const Tensor& sum, double scale,
                   const OptionalTensor& keep, double keep_rate) {
  const Tensor probabilities = divided(exponentials(scores, largest), sum);
  const Tensor kept = keep ? probabilities * *keep / keep_rate : probabilities;
  Tensor upstream = at::matmul(grad, x.value.transpose(2, 3));
  if (keep) upstream = upstream * *keep / keep_rate;
  const Tensor of_scores =
      probabilities * (upstream - (upstream * probabilities).sum(-1, true)) * scale;
  return {at::matmul(of_scores, x.key),
          joined(at::matmul(of_scores.transpose(2, 3), x.query), x.groups),
          joined(at::matmul(kept.transpose(2, 3), grad), x.groups), of_scores};
}

OptionalTensor kept_bits(const OptionalTensor& mask, const Tensor& scores) {
  if (!mask) return std::nullopt;
  return unpacked_bits(*mask, scores.numel()).reshape(scores.sizes()).to(at::kFloat);
}

// The ranges of sequences packed one after another, from where each ends.
struct Range {
  Int query, queries, key, keys;
};
std::vector<Range> ranges(const Ints& query_ends, const Ints& key_ends) {
  TORCH_CHECK(query_ends.size() == key_ends.size(), "as many sequences of queries as of keys");
  std::vector<Range> all;
  Int query = 0, key = 0;
  for (size_t i = 0; i < query_ends.size(); ++i) {
    all.push_back({query, query_ends[i] - query, key, key_ends[i] - key});
    query = query_ends[i];
    key = key_ends[i];
  }
  return all;
}

// One packed sequence of [tokens, heads, size] as [1, heads, length, size].
Tensor sequence(const Tensor& packed, Int start, Int length) {
  return packed.narrow(0, start, length).unsqueeze(0).transpose(1, 2);
}
Tensor packed_again(const Tensor& x) { return x.transpose(1, 2).squeeze(0); }

Operands packed_operands(const Tensor& query, const Tensor& key, const Tensor& value,
                         const Range& r) {
  return operands(sequence(query, r.query, r.queries), sequence(key, r.key, r.keys),
                  sequence(value, r.key, r.keys), "BNSD", query.size(1));
}

// A mask for all sequences is cut to the one at hand; modes 2 to 4 do not read it.
OptionalTensor mask_of(const OptionalTensor& mask, const Range& r, Int sparse_mode) {
  if (!mask || sparse_mode >= 2) return std::nullopt;
  return mask->narrow(-2, 0, r.queries).narrow(-1, 0, r.keys);
}

void check_packed(const Text& layout, const OptionalTensor& pse, const OptionalTensor& dropped) {
  TORCH_CHECK(layout == "TND", "packed sequences have layout TND, got ", layout);
  TORCH_CHECK(!pse && !dropped, "the emulator has no pse and no dropout for packed sequences");
}

}  // namespace

OPERATOR(aclnnFlashAttentionScore, kFloats, Tensor query, Tensor key, Tensor value,
         OptionalTensor pse, OptionalTensor dropout, OptionalTensor, OptionalTensor mask,
         OptionalInts, double scale, double keep_rate, Int before, Int after, Int heads,
         Text layout, Int, Int sparse_mode, Tensor softmax_max, Tensor softmax_sum, OptionalTensor,
         Tensor out) {
  const Operands x = operands(query, key, value, layout, heads);
  const Tensor s = scores(x, pse, scale, mask, {sparse_mode, before, after});
  const Forward result = forward(x, s, kept_bits(dropout, s), keep_rate);
  write(softmax_max, result.largest.expand(softmax_max.sizes()));
  write(softmax_sum, result.sum.expand(softmax_sum.sizes()));
  write(out, heads_back(result.out, layout));
}

OPERATOR(aclnnFlashAttentionScoreGrad, kFloats, Tensor query, Tensor key, Tensor value, Tensor grad,
         OptionalTensor pse, OptionalTensor dropout, OptionalTensor, OptionalTensor mask,
         Tensor softmax_max, Tensor softmax_sum, OptionalTensor, OptionalTensor, OptionalInts,
         double scale, double keep_rate, Int before, Int after, Int heads, Text layout, Int,
         Int sparse_mode, Tensor grad_query, Tensor grad_key, Tensor grad_value,
         OptionalTensor grad_pse) {
  const Operands x = operands(query, key, value, layout, heads);
  const Tensor s = scores(x, pse, scale, mask, {sparse_mode, before, after});
  const Tensor upstream = heads_first(grad, layout, heads).to(at::kFloat);
  const Gradients result =
      backward(x, s, upstream, softmax_max.narrow(3, 0, 1), softmax_sum.narrow(3, 0, 1), scale,
               kept_bits(dropout, s), keep_rate);
  write(grad_query, heads_back(result.query, layout));
  write(grad_key, heads_back(result.key, layout));
  write(grad_value, heads_back(result.value, layout));
  if (grad_pse) write(*grad_pse, result.pse.sum_to_size(grad_pse->sizes()));
}

// softmax_max and softmax_sum are [tokens, heads, 8].
OPERATOR(aclnnFlashAttentionVarLenScore, kFloats, Tensor query, Tensor key, Tensor value,
         OptionalTensor pse, OptionalTensor dropout, OptionalTensor, OptionalTensor mask,
         OptionalInts, Ints query_ends, Ints key_ends, double scale, double keep_rate, Int before,
         Int after, Int, Text layout, Int, Int sparse_mode, Tensor softmax_max, Tensor softmax_sum,
         OptionalTensor, Tensor out) {
  check_packed(layout, pse, dropout);
  for (const Range& r : ranges(query_ends, key_ends)) {
    if (r.queries == 0) continue;
    const Operands x = packed_operands(query, key, value, r);
    const OptionalTensor cut = mask_of(mask, r, sparse_mode);
    const Tensor s = scores(x, pse, scale, cut, {sparse_mode, before, after});
    const Forward result = forward(x, s, dropout, keep_rate);
    out.narrow(0, r.query, r.queries).copy_(packed_again(result.out));
    softmax_max.narrow(0, r.query, r.queries).copy_(packed_again(result.largest));
    softmax_sum.narrow(0, r.query, r.queries).copy_(packed_again(result.sum));
  }
}

OPERATOR(aclnnFlashAttentionUnpaddingScoreGrad, kFloats, Tensor query, Tensor key, Tensor value,
         Tensor grad, OptionalTensor pse, OptionalTensor dropout, OptionalTensor,
         OptionalTensor mask, Tensor softmax_max, Tensor softmax_sum, OptionalTensor,
         OptionalTensor, OptionalInts, Ints query_ends, Ints key_ends, double scale,
         double keep_rate, Int before, Int after, Int, Text layout, Int, Int sparse_mode,
         Tensor grad_query, Tensor grad_key, Tensor grad_value, OptionalTensor) {
  check_packed(layout, pse, dropout);
  for (const Range& r : ranges(query_ends, key_ends)) {
    if (r.queries == 0) continue;
    const Operands x = packed_operands(query, key, value, r);
    const OptionalTensor cut = mask_of(mask, r, sparse_mode);
    const Tensor s = scores(x, pse, scale, cut, {sparse_mode, before, after});
    const Gradients result = backward(x, s, sequence(grad, r.query, r.queries).to(at::kFloat),
                                      sequence(softmax_max, r.query, r.queries).narrow(3, 0, 1),
                                      sequence(softmax_sum, r.query, r.queries).narrow(3, 0, 1),
                                      scale, dropout, keep_rate);
    grad_query.narrow(0, r.query, r.queries).copy_(packed_again(result.query));
    grad_key.narrow(0, r.key, r.keys).copy_(packed_again(result.key));
    grad_value.narrow(0, r.key, r.keys).copy_(packed_again(result.value));
  }
}
