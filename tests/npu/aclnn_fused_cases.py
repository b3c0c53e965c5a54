"""What is called for rows of torch_npu's own functions: attention, norms, gates, experts.

What a case is: :mod:`tests.npu.aclnn_case`.
"""

from __future__ import annotations

import torch

from tests.npu.aclnn_case import FLOATS, Case, Function, torch_npu


def attention(layout: str, causal: bool) -> tuple[Function, Function]:
    """npu_fusion_attention of [2, heads, 6, 8] in a layout, and the reference of both."""

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = x.shape
        if layout == "BSND":
            return x.transpose(1, 2)
        if layout == "BSH":
            return x.transpose(1, 2).reshape(batch, length, -1)
        return x.permute(2, 0, 1, 3).reshape(length, batch, -1) if layout == "SBH" else x

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 6, dtype=torch.bool, device=q.device).triu(1) if causal else None
        return torch_npu().npu_fusion_attention(
            laid_out(q), laid_out(k), laid_out(v), q.shape[1], layout,
            atten_mask=mask, scale=8**-0.5, next_tockens=0 if causal else 2147483647
        )[0]  # fmt: skip

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, enable_gqa=True
        )
        return laid_out(out)

    return call, reference


ENDS = (3, 8)


def packed_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of two sequences, packed one after another."""
    mask = torch.ones(2048, 2048, dtype=torch.bool, device=q.device).triu(1)
    return torch_npu().npu_fusion_attention(
        q, k, v, q.shape[1], "TND", atten_mask=mask, scale=8**-0.5, sparse_mode=3,
        actual_seq_qlen=list(ENDS), actual_seq_kvlen=list(ENDS)
    )[0]  # fmt: skip


def packed_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same, sequence by sequence."""
    parts = []
    for start, end in zip((0, *ENDS), ENDS, strict=False):
        one, two, three = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            one, two, three, is_causal=True, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """Zhang and Sennrich 2019, equation 4."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on the halves of the last dimension."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def rotated_neighbours(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary positions on neighbours of the last dimension."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cosine + turned * sine


def fused() -> list[Case]:
    """Rows of torch_npu's own functions."""
    f = torch.nn.functional
    gated, turned = ((3, 32),), ((2, 3, 5, 64),) * 3
    grads = "FlashAttentionScoreGrad"
    queries, keys = (2, 4, 6, 8), (2, 2, 6, 8)
    attentions = [
        Case("FlashAttentionScore", call, (queries, keys, keys), reference, grads, units=24)
        for layout in ("BNSD", "BSND", "BSH", "SBH")
        for causal in (True, False)
        for call, reference in [attention(layout, causal)]
    ]
    return [
        *attentions,
        Case("FlashAttentionVarLenScore", packed_attention,
             ((8, 4, 8), (8, 2, 8), (8, 2, 8)), packed_reference,
             "FlashAttentionUnpaddingScoreGrad", units=24),
        Case("SwiGlu", lambda x: torch_npu().npu_swiglu(x), gated,
             lambda x: f.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], "SwiGluGrad"),
        Case("GeGluV3", lambda x: torch_npu().npu_geglu(x, -1, 1)[0], gated,
             lambda x: x.chunk(2, -1)[0] * f.gelu(x.chunk(2, -1)[1], approximate="tanh"),
             "GeGluV3Backward", units=16),
        Case("FastGelu", lambda x: torch_npu().npu_fast_gelu(x), gated,
             lambda x: x * torch.sigmoid(1.702 * x), "FastGeluBackward"),
        Case("RotaryPositionEmbeddingV2", lambda *t: torch_npu().npu_rotary_mul(*t),
             turned, rotated, "RotaryPositionEmbeddingGrad"),
        Case("RotaryPositionEmbeddingV2",
             lambda *t: torch_npu().npu_rotary_mul(*t, "interleave"),
             turned, rotated_neighbours, "RotaryPositionEmbeddingGrad"),
        Case("CrossEntropyLoss",
             lambda x, t: torch_npu().npu_cross_entropy_loss(x, t, ignore_index=2)[0].reshape(()),
             ((4, 5),), lambda x, t: f.cross_entropy(x, t, ignore_index=2),
             "CrossEntropyLossGrad", extra=(torch.tensor([1, 2, 4, 0]),)),
        Case("ForeachNonFiniteCheckAndUnscale", unscaled, ((3, 5),),
             lambda x: (torch.tensor([0.0]), x / 4), dtypes=FLOATS[:1]),
        Case("ForeachNonFiniteCheckAndUnscale", lambda x: unscaled(x / 0)[0], ((3, 5),),
             lambda x: torch.tensor([1.0]), dtypes=FLOATS[:1]),
    ]  # fmt: skip


def norms() -> list[Case]:
    """Rows of torch_npu's own norms, alone and after a sum."""
    f = torch.nn.functional
    norm = ((3, 16), (16,))
    return [
        Case("RmsNorm", lambda x, g: torch_npu().npu_rms_norm(x, g, 1e-6)[0], norm,
             rms_norm, "RmsNormGrad", units=24),
        Case("AddRmsNorm", lambda x, y, g: torch_npu().npu_add_rms_norm(x, y, g, 1e-6)[2],
             ((3, 16), (3, 16), (16,)), lambda x, y, g: x + y),
        Case("AddRmsNorm", lambda x, y, g: torch_npu().npu_add_rms_norm(x, y, g, 1e-6)[0],
             ((3, 16), (3, 16), (16,)), lambda x, y, g: rms_norm(x + y, g), units=24),
        Case("AddLayerNorm",
             lambda x, y, g, b: torch_npu().npu_add_layer_norm(x, y, g, b, 1e-5, True)[0],
             ((3, 16), (3, 16), (16,), (16,)),
             lambda x, y, g, b: f.layer_norm(x + y, (16,), g, b, 1e-5), units=24),
        Case("AddLayerNorm",
             lambda x, y, g, b: torch_npu().npu_add_layer_norm(x, y, g, b, 1e-5, True)[3],
             ((3, 16), (3, 16), (16,), (16,)), lambda x, y, g, b: x + y),
    ]  # fmt: skip


GROUPS = torch.tensor([2, 2, 6])


def product_of_groups(group_type: int) -> Function:
    """npu_grouped_matmul of the rows (0) or the columns (2) of the first tensor, as one result."""

    def call(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        left = x if group_type == 0 else x.contiguous().t()
        found = torch_npu().npu_grouped_matmul(
            [left], [weight], group_list=ends, split_item=3, group_type=group_type
        )[0]
        # Nothing is said of the product of an empty group.
        return found if group_type == 0 else found[[0, 2]]

    return call


def rows_of_groups(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The first two rows with the first weight, the others with the last one."""
    return torch.cat([x[:2] @ weight[0], x[2:] @ weight[2]])


def columns_of_groups(x: torch.Tensor, weight: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A product of the first two rows, and one of the others."""
    return torch.stack([x[:2].t() @ weight[:2], x[2:].t() @ weight[2:]])


EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
PROBABILITIES = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.25], [0.125, 0.5]])


def permuted_reference(tokens: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Copies of tokens, expert by expert."""
    pairs = [(e, i) for i, row in enumerate(experts.tolist()) for e in row]
    return torch.stack([tokens[i] for _, i in sorted(pairs)])


def there_and_back(
    tokens: torch.Tensor, experts: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """Tokens sent to their experts, and weighted together again."""
    packed, places = torch_npu().npu_moe_token_permute(tokens, experts)
    weights = probabilities.to(tokens.dtype)
    return torch_npu().npu_moe_token_unpermute(packed * 2, places, weights)


def experts() -> list[Case]:
    """Rows of mixtures of experts, products of groups, and a token's quantisation."""
    back = "MoeTokenPermuteGrad"
    return [
        Case("MoeGatingTopKSoftmax",
             lambda x: tuple(torch_npu().npu_moe_gating_top_k_softmax(x, None, 2)), ((4, 6),),
             lambda x: (*x.softmax(-1).topk(2), torch.arange(8).reshape(2, 4).t())),
        Case("MoeTokenPermute",
             lambda x, e: torch_npu().npu_moe_token_permute(x, e)[0], ((4, 6),),
             permuted_reference, back, extra=(EXPERTS,)),
        Case("MoeTokenUnpermute", there_and_back, ((4, 6),),
             lambda x, e, p: 2 * x * p.to(x).sum(1, keepdim=True),
             f"MoeTokenUnpermuteGrad {back}", extra=(EXPERTS, PROBABILITIES)),
        Case("GroupedMatmulV5", product_of_groups(0), ((6, 4), (3, 4, 5)), rows_of_groups,
             extra=(GROUPS,)),
        Case("GroupedMatmulV5", product_of_groups(2), ((6, 4), (6, 5)), columns_of_groups,
             extra=(GROUPS,)),
        Case("DynamicQuantV2", lambda x: tuple(torch_npu().npu_dynamic_quant(x)),
             ((3, 8),), quantised, dtypes=FLOATS[1:]),
    ]  # fmt: skip


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, and what 1 stands for."""
    # In float32, as the page says, so that both round the same quotient.
    unit = x.float().abs().amax(-1) / 127
    return (x.float() / unit[:, None]).round().to(torch.int8), unit.double()


def unscaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether something was not finite, and the tensor divided by 4."""
    copy, found = x.clone(), torch.zeros(1, device=x.device)
    scale = torch.full((1,), 0.25, device=x.device)
    torch._amp_foreach_non_finite_check_and_unscale_([copy], found, scale)
    return found, copy
