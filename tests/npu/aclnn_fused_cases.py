"""What is called for rows of torch_npu's own functions that no row of the backend reaches.

The others are asked by the conformance suite. What a case is: :mod:`tests.npu.aclnn_case`.
"""

import torch

from tests.npu.aclnn_case import FLOATS, Case, Function, torch_npu


def attention(layout: str, causal: bool) -> tuple[Function, Function]:
    """npu_fusion_attention of [2, heads, 6, 8] in a layout, and the reference of both."""

    def laid_out(x: torch.Tensor) -> torch.Tensor:
        batch, _, length, _ = x.shape
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


def fused() -> list[Case]:
    """Attention in the layouts that torch asks for, gates, and a token's quantisation."""
    queries, keys = (2, 4, 6, 8), (2, 2, 6, 8)
    attentions = [
        Case(
            "FlashAttentionScore", call, (queries, keys, keys), reference,
            "FlashAttentionScoreGrad", units=24,
        )
        for layout in ("BNSD", "BSH", "SBH")
        for causal in (True, False)
        for call, reference in [attention(layout, causal)]
    ]  # fmt: skip
    return [
        *attentions,
        Case("FastGelu", lambda x: torch_npu().npu_fast_gelu(x), ((3, 32),),
             lambda x: x * torch.sigmoid(1.702 * x), "FastGeluBackward"),
        Case("MoeGatingTopKSoftmax",
             lambda x: tuple(torch_npu().npu_moe_gating_top_k_softmax(x, None, 2)), ((4, 6),),
             lambda x: (*x.softmax(-1).topk(2), torch.arange(8).reshape(2, 4).t())),
        Case("DynamicQuantV2", lambda x: tuple(torch_npu().npu_dynamic_quant(x)),
             ((3, 8),), quantised, dtypes=FLOATS[1:]),
    ]  # fmt: skip


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, and what 1 stands for."""
    # In float32, as the page says, so that both round the same quotient.
    unit = x.float().abs().amax(-1) / 127
    return (x.float() / unit[:, None]).round().to(torch.int8), unit.double()
