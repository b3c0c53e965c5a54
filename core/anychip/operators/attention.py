"""Attention and its rotary positions: attention, rope. Layout (batch, seq, heads, head_dim)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import (
    Bound,
    Cost,
    OperatorSpec,
    Placement,
    Placements,
    Residual,
    Sample,
    SampleMaker,
    Sharding,
)

_BATCH, _HEADS = 0, 2


def _nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


# attention


def _scale(q: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None) -> Tensor:
    """(B, H, S, S) float32 scaled scores; -inf above the diagonal when causal."""
    groups = q.shape[2] // k.shape[2]
    wide_k = k.float().repeat_interleave(groups, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), wide_k) * _scale(q, scale)
    if causal:
        position = torch.arange(q.shape[1], device=q.device)
        scores = scores.masked_fill(position[:, None] < position[None, :], -math.inf)
    return scores


def _attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, causal, scale)
    lse = torch.logsumexp(scores, dim=-1)
    groups = q.shape[2] // k.shape[2]
    wide_v = v.float().repeat_interleave(groups, dim=2)
    y = torch.einsum("bhqk,bkhd->bqhd", torch.exp(scores - lse.unsqueeze(-1)), wide_v)
    return y.to(q.dtype).contiguous(), lse


def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    batch, length, kv_heads, dim = k.shape
    groups = q.shape[2] // kv_heads
    wide_k = k.float().repeat_interleave(groups, dim=2)
    wide_v = v.float().repeat_interleave(groups, dim=2)
    slope = grad.float()
    weights = torch.exp(_scores(q, k, causal, scale) - lse.unsqueeze(-1))
    # sum_k P dP = sum_d y dy (Dao 2022, appendix B.2): no second pass over the scores.
    delta = (slope * y.float()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dweights = torch.einsum("bqhd,bkhd->bhqk", slope, wide_v)
    dscores = weights * (dweights - delta) * _scale(q, scale)
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, wide_k)
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.float())
    dv = torch.einsum("bhqk,bqhd->bkhd", weights, slope)
    grouped = (batch, length, kv_heads, groups, dim)
    return (
        dq.to(q.dtype),
        dk.reshape(grouped).sum(3).to(k.dtype),
        dv.reshape(grouped).sum(3).to(v.dtype),
    )


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    return y, q.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_check(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be (batch, seq, heads, head_dim); {shapes}")
    if k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"k and v must have one shape and agree with q in batch, seq and head_dim; {shapes}"
        )
    if not q.shape[3]:
        raise ValueError(f"head_dim must be at least 1; {shapes}")
    if not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(f"the heads of q must be a multiple of the heads of k; {shapes}")


def _attention_samples(maker: SampleMaker) -> Iterator[Sample]:
    for batch, length, heads, kv_heads, dim, causal in (
        (2, 5, 4, 4, 8, True),
        (1, 17, 4, 2, 16, True),
        (2, 9, 2, 1, 8, False),
        (1, 1, 1, 1, 4, True),
    ):
        q = maker.normal(batch, length, heads, dim)
        k, v = (maker.normal(batch, length, kv_heads, dim) for _ in range(2))
        label = f"{batch}x{length}x{heads}/{kv_heads}x{dim},causal={causal}"
        yield Sample((q, k, v), {"causal": causal, "scale": None}, label)


def _attention_flops(q: Tensor, causal: bool) -> int:
    batch, length, heads, dim = q.shape
    return 4 * batch * heads * length * length * dim // (2 if causal else 1)


def _attention_shards(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> Placements:
    return [([_BATCH, 0], [_BATCH, _BATCH, _BATCH]), ([_HEADS, 1], [_HEADS, _HEADS, _HEADS])]


def _attention_backward_shards(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    needs: list[bool],
) -> Placements:
    return [([_BATCH] * 3, [_BATCH] * 5 + [0]), ([_HEADS] * 3, [_HEADS] * 5 + [1])]


attention = OperatorSpec(
    name="attention",
    signature=("(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None) -> Tensor"),
    equation="y = softmax(q k^T scale + mask) v; query head h reads key head h // (H / Hk)",
    source="Vaswani et al. 2017, arXiv:1706.03762, equation 1; Ainslie et al. 2023 (GQA)",
    forward=_attention_forward,
    backward=_attention_backward,
    fake=_attention_fake,
    residuals=(Residual("lse", "(B, H, S)", "float32"),),
    saved=("q", "k", "v", "y", "lse"),
    differentiable=("q", "k", "v"),
    check=_attention_check,
    sizes=lambda q, k, v, *, causal, scale: {
        "seq": q.shape[1],
        "heads": q.shape[2],
        "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
    },
    autocast="lower",
    sharding=Sharding(_attention_shards, _attention_backward_shards),
    cost=lambda q, k, v, *, causal, scale: Cost(_nbytes(q, q, k, v), _attention_flops(q, causal)),
    backward_cost=lambda q, k, v, *, causal, scale: Cost(
        2 * _nbytes(q, q, k, v), _attention_flops(q, causal) * 5 // 2
    ),
    aten=frozenset({"bmm", "logsumexp", "exp", "masked_fill", "repeat_interleave"}),
    samples=_attention_samples,
    bound=Bound(forward=12, backward=24, length=lambda q, *_, **__: max(q.shape[1], q.shape[3])),
)


# rope


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    wide = x.float()
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        return torch.stack(pairs, dim=-1).flatten(-2).to(x.dtype).contiguous()
    first, second = wide.chunk(2, dim=-1)
    halves = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(halves, dim=-1).to(x.dtype).contiguous()


def _rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    needs: tuple[bool, bool],
) -> tuple[Tensor, Tensor]:
    # A rotation's transpose is the rotation by the negative angle.
    return _rotate(dq, cos, -sin, interleaved), _rotate(dk, cos, -sin, interleaved)


def _rope_fake(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    like = torch.contiguous_format
    return torch.empty_like(q, memory_format=like), torch.empty_like(k, memory_format=like)


def _rope_check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must be (batch, seq, heads, head_dim) and differ in heads only; {shapes}"
        )
    if q.shape[3] % 2:
        raise ValueError(f"head_dim must be even, got {q.shape[3]}")
    table = (q.shape[1], q.shape[3] // 2)
    if tuple(cos.shape) != table or tuple(sin.shape) != table:
        raise ValueError(
            f"cos and sin must be (seq, head_dim / 2) = {table}; got {tuple(cos.shape)} and "
            f"{tuple(sin.shape)}"
        )


def _rope_samples(maker: SampleMaker) -> Iterator[Sample]:
    for batch, length, heads, kv_heads, dim in (
        (2, 5, 4, 2, 8),
        (1, 17, 1, 1, 2),
        (2, 3, 2, 2, 64),
    ):
        angles = maker.normal(length, dim // 2, dtype=torch.float32)
        q, k = maker.normal(batch, length, heads, dim), maker.normal(batch, length, kv_heads, dim)
        for interleaved in (False, True):
            label = f"{batch}x{length}x{heads}/{kv_heads}x{dim},interleaved={interleaved}"
            args = (q, k, angles.cos(), angles.sin())
            yield Sample(args, {"interleaved": interleaved}, label)


def _rope_shards(*_: object) -> Placements:
    rows: list[tuple[list[Placement], list[Placement]]] = []
    for dim in (_BATCH, _HEADS):
        rows.append(([dim, dim], [dim, dim, None, None]))
    return [*rows, ([1, 1], [1, 1, 0, 0])]


rope = OperatorSpec(
    name="rope",
    signature=(
        "(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False)"
        " -> (Tensor, Tensor)"
    ),
    equation="(y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair (x1, x2) of q and k",
    source="Su et al. 2021, arXiv:2104.09864, equation 34; half layout as in GPT-NeoX and Llama",
    forward=_rope_forward,
    backward=_rope_backward,
    fake=_rope_fake,
    saved=("cos", "sin"),
    differentiable=("q", "k"),
    check=_rope_check,
    fixed_dtypes={"cos": "float32", "sin": "float32"},
    sizes=lambda q, k, cos, sin, *, interleaved: {"seq": q.shape[1], "head_dim": q.shape[3]},
    sharding=Sharding(_rope_shards, _rope_shards),
    cost=lambda q, k, cos, sin, *, interleaved: Cost(
        2 * _nbytes(q, k) + _nbytes(cos, sin), 3 * (q.numel() + k.numel())
    ),
    backward_cost=lambda q, k, cos, sin, *, interleaved: Cost(
        2 * _nbytes(q, k) + _nbytes(cos, sin), 3 * (q.numel() + k.numel())
    ),
    aten=frozenset({"mul", "add", "sub", "cat", "stack"}),
    samples=_rope_samples,
    bound=Bound(forward=3, backward=3, length=lambda *_, **__: 1),
)
