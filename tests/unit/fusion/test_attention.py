"""Modules that call torch's attention: served by the operator, or by torch, never differently."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import anychip


class Product(nn.Module):
    """Attention of what it is given, and another call of torch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return scaled_dot_product_attention(q, k, v, **options).abs()


def tensors(
    queries: int, keys: int, heads: int = 4, kv_heads: int = 4, **options: Any
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = [(2, heads, queries, 8), *[(2, kv_heads, keys, 8)] * 2]
    return [torch.randn(shape, generator=generator).to(**options) for shape in shapes]


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    return (scores.softmax(-1) @ v).abs()


SERVED: dict[str, tuple[list[Tensor], dict[str, Any]]] = {
    "causal": (tensors(7, 7), {"is_causal": True}),
    "full": (tensors(7, 7), {}),
    "scaled": (tensors(5, 5), {"is_causal": True, "scale": 0.7}),
    "grouped": (tensors(6, 6, 4, 2), {"is_causal": True, "enable_gqa": True}),
    "more-keys": (tensors(3, 9), {}),
    "one-query": (tensors(1, 9, 4, 1), {"enable_gqa": True}),
}


@pytest.mark.parametrize(("args", "options"), SERVED.values(), ids=SERVED)
def test_fused_attention_equals_float64(args: list[Tensor], options: dict[str, Any]) -> None:
    module = Product()
    report = anychip.fuse(module)
    got = module(*args, **options)
    want = exact(*args, options.get("is_causal", False), options.get("scale"))
    # Every output is a mean of v; scores of 8 products, sums of 9 keys: 12 roundings and these.
    top = float(args[2].abs().max()) * max(1.0, float(args[0].norm(dim=-1).max()))
    assert float((got - want).abs().max()) <= (12 + 17) * 2.0**-24 * top
    assert report.fallbacks() == ()
    assert [row.operator for row in anychip.provenance().rows()] == ["attention"]


OWN_CODE: dict[str, tuple[list[Tensor], dict[str, Any], str]] = {
    "mask": (tensors(4, 4), {"attn_mask": torch.ones(4, 4).tril().bool()}, "a mask"),
    "dropout": (tensors(4, 4), {"dropout_p": 0.5}, "dropout"),
    "causal-first-keys": (tensors(3, 5), {"is_causal": True}, "causal with other keys"),
    "float64": (tensors(4, 4, dtype=torch.float64), {}, "float64"),
    "three-dims": ([t[0] for t in tensors(4, 4)], {}, "not (batch, heads, seq, head_dim)"),
    "one-batch-of-keys": ([tensors(4, 4)[0], *(t[:1] for t in tensors(4, 4)[1:])], {}, "batch"),
    "wide-values": ([*tensors(4, 4)[:2], torch.ones(2, 4, 4, 3)], {}, "head_dims or lengths"),
}


@pytest.mark.parametrize(("args", "options", "reason"), OWN_CODE.values(), ids=OWN_CODE)
def test_fused_attention_that_the_operator_cannot_serve_is_torchs_and_counted(
    args: list[Tensor], options: dict[str, Any], reason: str
) -> None:
    module = Product()
    torch.manual_seed(9)
    want = module(*args, **options)
    report = anychip.fuse(module)
    torch.manual_seed(9)
    assert torch.equal(module(*args, **options), want)
    (row,) = report.fallbacks()
    assert (row.operator, row.calls) == ("attention", 1)
    assert reason in (row.fallback_reason or "")


def test_fused_attention_with_heads_that_differ_is_torchs_error() -> None:
    module = Product()
    anychip.fuse(module)
    with pytest.raises(RuntimeError, match="size"):
        module(*tensors(4, 4, 4, 2))


def test_fused_attention_under_autocast_has_its_dtype() -> None:
    module, args = Product(), tensors(6, 6)
    args[2] = args[2].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        want = module(*args, is_causal=True)
        report = anychip.fuse(module)
        got = module(*args, is_causal=True)
    assert got.dtype == want.dtype == torch.bfloat16
    # Weights and result are rounded to 8 bits on both sides; the entries are below 4.
    assert torch.allclose(got.float(), want.float(), rtol=0.0, atol=4 * 4 * 2.0**-9)
    assert report.fallbacks() == ()


def test_attention_outside_of_a_fused_module_stays_torchs() -> None:
    anychip.fuse(Product())
    args = tensors(4, 4)
    assert torch.equal(Product()(*args), scaled_dot_product_attention(*args).abs())
    assert anychip.provenance().rows() == ()
