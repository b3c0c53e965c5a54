"""Rotary positions: rope. Layout (batch, seq, heads, head_dim)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Placements, Sample, SampleMaker, Sharding
from anychip.operators.extents import empty_like, nbytes

_BATCH, _HEADS = 0, 2


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    rotary_dim = 2 * cos.shape[-1]
    wide, rest = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pairs, dim=-1).flatten(-2)
    else:
        first, second = wide.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), rest), dim=-1).contiguous()


def _rope_forward(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rope_check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}"
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must be (batch, seq, heads, head_dim) and differ in heads only; {shapes}"
        )
    if q.shape[3] % 2:
        raise ValueError(f"head_dim must be even, got {q.shape[3]}")
    whole = (q.shape[1], q.shape[3] // 2)
    fits = cos.dim() == 2 and cos.shape == sin.shape and cos.shape[0] == whole[0]
    if not fits or cos.shape[1] > whole[1]:
        raise ValueError(
            f"cos and sin must be (seq, head_dim / 2) = {whole}, or narrower to rotate the first "
            f"dims only; got {tuple(cos.shape)} and {tuple(sin.shape)}"
        )


def _rope_samples(maker: SampleMaker) -> Iterator[Sample]:
    for batch, length, heads, kv_heads, dim, rotary_dim in (
        (2, 5, 4, 2, 8, 8), (1, 17, 1, 1, 2, 2), (2, 3, 2, 2, 64, 64), (2, 4, 3, 1, 10, 6),
    ):  # fmt: skip
        angles = maker.normal(length, rotary_dim // 2, dtype=torch.float32)
        q, k = maker.normal(batch, length, heads, dim), maker.normal(batch, length, kv_heads, dim)
        for interleaved in (False, True):
            part = "" if rotary_dim == dim else f":{rotary_dim}"
            label = f"{batch}x{length}x{heads}/{kv_heads}x{dim}{part},interleaved={interleaved}"
            args = (q, k, angles.cos(), angles.sin())
            yield Sample(args, {"interleaved": interleaved}, label)


def _rope_shards(*_: object) -> Placements:
    rows: Placements = [([dim, dim], [dim, dim, None, None]) for dim in (_BATCH, _HEADS)]
    return [*rows, ([1, 1], [1, 1, 0, 0])]


rope = OperatorSpec(
    name="rope",
    signature=(
        "(Tensor q, Tensor k, Tensor cos, Tensor sin, *, bool interleaved=False)"
        " -> (Tensor, Tensor)"),
    equation=(
        "(y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin) for each pair (x1, x2) of the first "
        "2 cos.shape[1] dims of q and k; the other dims are copied"),
    source="Su et al. 2021, arXiv:2104.09864, equation 34; half layout as in GPT-NeoX and Llama",
    forward=_rope_forward,
    # A rotation's transpose is the rotation by the negative angle.
    backward=lambda dq, dk, cos, sin, *, interleaved, needs: _rope_forward(
        dq, dk, cos, -sin, interleaved=interleaved
    ),
    fake=lambda q, k, *_, **__: (empty_like(q), empty_like(k)), saved=("cos", "sin"),
    differentiable=("q", "k"), shaped_like={"q": "grad0", "k": "grad1"}, check=_rope_check,
    fixed_dtypes={"cos": "float32", "sin": "float32"},
    sizes=lambda q, k, cos, sin, *, interleaved: {
        "seq": q.shape[1], "head_dim": q.shape[3], "rotary_dim": 2 * cos.shape[1]},
    sharding=Sharding(_rope_shards, _rope_shards),
    cost=lambda q, k, cos, sin, *, interleaved: Cost(
        2 * nbytes(q, k) + nbytes(cos, sin), 3 * (q.numel() + k.numel())),
    backward_cost=lambda q, k, cos, sin, *, interleaved: Cost(
        2 * nbytes(q, k) + nbytes(cos, sin), 3 * (q.numel() + k.numel())),
    samples=_rope_samples, bound=Bound(forward=3, backward=3, length=lambda *_, **__: 1),
)  # fmt: skip
