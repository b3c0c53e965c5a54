// Attention with the scores in memory, for small shapes: softmax(scale * (q k^T + pse)) v
// (Vaswani et al. 2017, equation 1), with the masks of aclnnFlashAttentionScore.
#include <algorithm>
#include <limits>

#include "operators/operator.h"

using namespace cann;

namespace {

// How scores are masked, where there is a mask; without one these have no effect, as documented.
// sparse_mode: 0 the mask given, and its band of tokens; 1 the mask alone; 2 causal from the upper
// left corner; 3 causal to the lower right; 4 a band to the lower right.
struct Masking {
  Int sparse_mode;
  Int before;
  Int after;
};
constexpr Int kTriangle = 2048;  // of modes 2 to 4: one mask for all lengths

// Tensors as [batch, heads, length, size].
struct Operands {
  Tensor query, key, value;
  Int groups;  // query heads of one key head
};

Tensor heads_first(const Tensor& x, const Text& layout, Int heads) {
  if (layout == "BNSD") return x;
  if (layout == "BSND") return x.transpose(1, 2);
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

// The triangle where the keys j of queries i lie, moved along its diagonals for what is outside. So
// each number of a short mask is read, and each diagonal of it for long sequences.
Tensor in_triangle(const Tensor& triangle, const Tensor& i, const Tensor& j) {
  const Tensor distance = (j - i).clamp(1 - kTriangle, kTriangle - 1);
  const Tensor along = at::minimum(i, j).remainder(kTriangle - distance.abs());
  const Tensor row = along - distance.clamp_max(0), column = along + distance.clamp_min(0);
  return triangle.flatten().take(row * kTriangle + column);
}

// True where a score is left out; undefined when none is.
Tensor masked(const OptionalTensor& mask, Int queries, Int keys, const Masking& masking) {
  if (!mask) return {};
  const Tensor i = at::arange(queries).unsqueeze(1), j = at::arange(keys).unsqueeze(0);
  const Tensor last = i + (keys - queries), given = mask->to(at::kBool);
  switch (masking.sparse_mode) {
    case 0:
      return given.logical_or(j > i + masking.after).logical_or(j < i - masking.before);
    case 1:
      return given;
    case 2:
      return in_triangle(given, i, j);
    case 3:
      return in_triangle(given, last, j);
    default:  // 4: the triangle again, for what is too far before
      return in_triangle(given, last + masking.after, j)
          .logical_or(in_triangle(given, last - masking.before - 1, j).logical_not());
  }
}

// As the page of npu_fusion_attention has it: [q, k], or four axes with 1 for what is shared.
void look_at_mask(const OptionalTensor& mask, Int sparse_mode, const Ints& sizes) {
  if (!mask) return;
  HAS_NO(sparse_mode < 0 || sparse_mode > 4, "sparse_mode but 0 to 4, got ", sparse_mode);
  const auto dtype = mask->scalar_type();
  EXPECT(dtype == at::kBool || dtype == at::kByte, "atten_mask of bool or uint8, got ", dtype);
  const auto shape = mask->sizes();
  if (sparse_mode >= 2) {
    EXPECT(shape == at::IntArrayRef({kTriangle, kTriangle}),
           "atten_mask of sparse_mode 2 to 4 as [2048, 2048], got ", shape);
    return;
  }
  const size_t axes = shape.size();
  bool fits = axes == 2 || (axes == 4 && sizes.size() == 4);
  for (size_t d = 0; fits && d < axes; ++d) {
    const Int size = sizes[sizes.size() - axes + d];
    fits = shape[d] == size || (axes == 4 && d < 2 && shape[d] == 1);
  }
  EXPECT(fits, "atten_mask [Sq, Skv], or with axes of batch and heads, got ", shape);
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

// `out` is the forward's result: what it gives with its gradient is a row's share of all scores.
Gradients backward(const Operands& x, const Tensor& scores, const Tensor& grad, const Tensor& out,
                   const Tensor& largest, const Tensor& sum, double scale,
                   const OptionalTensor& keep, double keep_rate) {
  const Tensor probabilities = divided(exponentials(scores, largest), sum);
  const Tensor kept = keep ? probabilities * *keep / keep_rate : probabilities;
  Tensor upstream = at::matmul(grad, x.value.transpose(2, 3));
  if (keep) upstream = upstream * *keep / keep_rate;
  const Tensor of_scores = probabilities * (upstream - (grad * out).sum(-1, true)) * scale;
  return {at::matmul(of_scores, x.key),
          joined(at::matmul(of_scores.transpose(2, 3), x.query), x.groups),
          joined(at::matmul(kept.transpose(2, 3), grad), x.groups), of_scores};
}

OptionalTensor kept_bits(const OptionalTensor& mask, const Tensor& scores) {
  if (!mask) return std::nullopt;
  return unpacked_bits(*mask, scores.numel()).reshape(scores.sizes()).to(at::kFloat);
}

// `size` is that of a head on the axis of heads.
void look_at_heads(const Tensor& query, const Tensor& key, Int axis, Int size, Int heads) {
  EXPECT(size > 0 && query.size(axis) == heads * size && key.size(axis) % size == 0 &&
             heads % (key.size(axis) / size) == 0,
         "head_num as query has, a multiple of the heads of key, got ", heads);
}

// What is wrong at the call, whatever the tensors hold.
void look(const Tensor& query, const Tensor& key, const OptionalTensor& padding,
          const OptionalTensor& mask, const Text& layout, Int heads, Int sparse_mode) {
  HAS_NO(padding, "padding_mask, nor has CANN");
  EXPECT(layout == "BNSD" || layout == "BSND" || layout == "BSH" || layout == "SBH",
         "layout BNSD, BSND, BSH or SBH, got ", layout);
  const bool has_axis = layout == "BNSD" || layout == "BSND";  // of heads
  EXPECT(query.dim() == (has_axis ? 4 : 3), "as many axes as the layout has, got ", query.sizes());
  look_at_heads(query, key, layout == "BNSD" ? 1 : 2,
                has_axis ? 1 : query.size(2) / std::max<Int>(heads, 1), heads);
  const Int axis = layout == "BNSD" ? 2 : layout == "SBH" ? 0 : 1, batch = layout == "SBH" ? 1 : 0;
  look_at_mask(mask, sparse_mode, {query.size(batch), heads, query.size(axis), key.size(axis)});
}

// The ranges of sequences packed one after another, from where each ends. Ends of 0 at the end
// stand for sequences that are not there.
struct Range {
  Int query, queries, key, keys;
};
std::vector<Range> ranges(const Ints& query_ends, const Ints& key_ends) {
  std::vector<Range> all;
  Int query = 0, key = 0;
  for (size_t i = 0; i < query_ends.size() && query_ends[i] >= query; ++i) {
    if (query_ends[i] > query) {
      all.push_back({query, query_ends[i] - query, key, key_ends[i] - key});
    }
    query = query_ends[i];
    key = key_ends[i];
  }
  return all;
}
// 0 where the ends are none of so many tokens.
Int longest(const Ints& ends, Int tokens) {
  Int most = 0, last = 0;
  for (const Int end : ends) {
    if (end == 0) continue;
    if (end < last || end > tokens) return 0;
    most = std::max(most, end - last);
    last = end;
  }
  return most;
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

// A mask of the longest sequence is cut to the one at hand; that of modes 2 to 4 fits all.
OptionalTensor mask_of(const OptionalTensor& mask, const Range& r, Int sparse_mode) {
  if (!mask || sparse_mode >= 2) return mask;
  return mask->narrow(-2, 0, r.queries).narrow(-1, 0, r.keys);
}

void look_at_packed(const Text& layout, const OptionalTensor& pse, const OptionalTensor& dropped,
                    const OptionalTensor& padding, const OptionalTensor& mask, const Tensor& query,
                    const Tensor& key, const Ints& query_ends, const Ints& key_ends, Int heads,
                    Int sparse_mode) {
  EXPECT(layout == "TND", "layout TND, got ", layout);
  HAS_NO(pse || dropped || padding, "pse, dropout or padding_mask of packed sequences");
  EXPECT(query_ends.size() == key_ends.size(), "as many sequences of queries as of keys");
  EXPECT(
      !query_ends.empty() && longest(query_ends, query.size(0)) && longest(key_ends, key.size(0)),
      "rising ends within the tokens");
  look_at_heads(query, key, 1, 1, heads);
  look_at_mask(mask, sparse_mode,
               {longest(query_ends, query.size(0)), longest(key_ends, key.size(0))});
}

// softmax_max and softmax_sum of packed sequences are documented as [heads, tokens, 8]. torch_npu
// allocates as many numbers as [tokens, heads, 8].
Tensor by_heads(const Tensor& statistics, const Tensor& query) {
  return statistics.view({query.size(1), query.size(0), -1});
}
Tensor statistics_of(const Tensor& by_heads, const Range& r) {
  return by_heads.narrow(1, r.query, r.queries).narrow(2, 0, 1).unsqueeze(0);
}

}  // namespace

CHECKED(aclnnFlashAttentionScore, kFloats, Tensor query, Tensor key, Tensor value,
        OptionalTensor pse, OptionalTensor dropout, OptionalTensor padding, OptionalTensor mask,
        OptionalInts, double scale, double keep_rate, Int before, Int after, Int heads, Text layout,
        Int, Int sparse_mode, Tensor softmax_max, Tensor softmax_sum, OptionalTensor, Tensor out) {
  look(query, key, padding, mask, layout, heads, sparse_mode);
  WORK_BELOW;
  const Operands x = operands(query, key, value, layout, heads);
  const Tensor s = scores(x, pse, scale, mask, {sparse_mode, before, after});
  const Forward result = forward(x, s, kept_bits(dropout, s), keep_rate);
  write(softmax_max, result.largest.expand(softmax_max.sizes()));
  write(softmax_sum, result.sum.expand(softmax_sum.sizes()));
  write(out, heads_back(result.out, layout));
}

CHECKED(aclnnFlashAttentionScoreGrad, kFloats, Tensor query, Tensor key, Tensor value, Tensor grad,
        OptionalTensor pse, OptionalTensor dropout, OptionalTensor padding, OptionalTensor mask,
        Tensor softmax_max, Tensor softmax_sum, OptionalTensor, Tensor out, OptionalInts,
        double scale, double keep_rate, Int before, Int after, Int heads, Text layout, Int,
        Int sparse_mode, Tensor grad_query, Tensor grad_key, Tensor grad_value,
        OptionalTensor grad_pse) {
  look(query, key, padding, mask, layout, heads, sparse_mode);
  WORK_BELOW;
  const Operands x = operands(query, key, value, layout, heads);
  const Tensor s = scores(x, pse, scale, mask, {sparse_mode, before, after});
  const Tensor upstream = heads_first(grad, layout, heads).to(at::kFloat);
  const Gradients result = backward(x, s, upstream, heads_first(out, layout, heads).to(at::kFloat),
                                    softmax_max.narrow(3, 0, 1), softmax_sum.narrow(3, 0, 1), scale,
                                    kept_bits(dropout, s), keep_rate);
  write(grad_query, heads_back(result.query, layout));
  write(grad_key, heads_back(result.key, layout));
  write(grad_value, heads_back(result.value, layout));
  if (grad_pse) write(*grad_pse, result.pse.sum_to_size(grad_pse->sizes()));
}

CHECKED(aclnnFlashAttentionVarLenScore, kFloats, Tensor query, Tensor key, Tensor value,
        OptionalTensor pse, OptionalTensor dropout, OptionalTensor padding, OptionalTensor mask,
        OptionalInts, Ints query_ends, Ints key_ends, double scale, double keep_rate, Int before,
        Int after, Int heads, Text layout, Int, Int sparse_mode, Tensor softmax_max,
        Tensor softmax_sum, OptionalTensor, Tensor out) {
  look_at_packed(layout, pse, dropout, padding, mask, query, key, query_ends, key_ends, heads,
                 sparse_mode);
  WORK_BELOW;
  for (const Range& r : ranges(query_ends, key_ends)) {
    const Operands x = packed_operands(query, key, value, r);
    const OptionalTensor cut = mask_of(mask, r, sparse_mode);
    const Tensor s = scores(x, pse, scale, cut, {sparse_mode, before, after});
    const Forward result = forward(x, s, dropout, keep_rate);
    out.narrow(0, r.query, r.queries).copy_(packed_again(result.out));
    by_heads(softmax_max, query).narrow(1, r.query, r.queries).copy_(result.largest.squeeze(0));
    by_heads(softmax_sum, query).narrow(1, r.query, r.queries).copy_(result.sum.squeeze(0));
  }
}

CHECKED(aclnnFlashAttentionUnpaddingScoreGrad, kFloats, Tensor query, Tensor key, Tensor value,
        Tensor grad, OptionalTensor pse, OptionalTensor dropout, OptionalTensor padding,
        OptionalTensor mask, Tensor softmax_max, Tensor softmax_sum, OptionalTensor, Tensor out,
        OptionalInts, Ints query_ends, Ints key_ends, double scale, double keep_rate, Int before,
        Int after, Int heads, Text layout, Int, Int sparse_mode, Tensor grad_query, Tensor grad_key,
        Tensor grad_value, OptionalTensor) {
  look_at_packed(layout, pse, dropout, padding, mask, query, key, query_ends, key_ends, heads,
                 sparse_mode);
  WORK_BELOW;
  for (const Range& r : ranges(query_ends, key_ends)) {
    const Operands x = packed_operands(query, key, value, r);
    const OptionalTensor cut = mask_of(mask, r, sparse_mode);
    const Tensor s = scores(x, pse, scale, cut, {sparse_mode, before, after});
    const Gradients result =
        backward(x, s, sequence(grad, r.query, r.queries).to(at::kFloat),
                 sequence(out, r.query, r.queries).to(at::kFloat),
                 statistics_of(by_heads(softmax_max, query), r),
                 statistics_of(by_heads(softmax_sum, query), r), scale, dropout, keep_rate);
    grad_query.narrow(0, r.query, r.queries).copy_(packed_again(result.query));
    grad_key.narrow(0, r.key, r.keys).copy_(packed_again(result.key));
    grad_value.narrow(0, r.key, r.keys).copy_(packed_again(result.value));
  }
}
