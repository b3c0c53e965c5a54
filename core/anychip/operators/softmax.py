"""Softmax over the last dim with what attention scores need: a scale, a mask, a bias, causality.

A key that is hidden, by the mask, by causality or by a score of -inf, has the weight 0. A row
without a visible key is all zeros, forward and backward: it is not NaN, as it is in torch.
"""

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
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.operators.extents import empty_like, nbytes

Needs = tuple[bool, bool]


def _scores(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool
) -> Tensor:
    """float32 scores; -inf where a key is hidden."""
    scores = x.float() * scale
    if bias is not None:
        scores = scores + bias.float()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if causal:
        queries, keys = x.shape[-2:]
        query = torch.arange(queries, device=x.device)[:, None]
        key = torch.arange(keys, device=x.device)
        scores = scores.masked_fill(key > query + (keys - queries), -math.inf)
    return scores


def _forward(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    scores = _scores(x, mask, bias, scale, causal)
    # Filled before and after, so that no NaN is there to be differentiated.
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(hidden, 0.0), -1)
    return weights.masked_fill(hidden, 0.0).to(x.dtype).contiguous()


def _backward(
    grad: Tensor, y: Tensor, bias: Tensor | None, *, scale: float, causal: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    wide, slope = y.float(), grad.float()
    dscores = wide * (slope - (slope * wide).sum(-1, keepdim=True))
    dbias = None
    if needs[1] and bias is not None:
        dbias = dscores.sum_to_size(bias.shape).to(bias.dtype)
    return ((dscores * scale).to(y.dtype) if needs[0] else None), dbias


def _check(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> None:
    if x.dim() < (2 if causal else 1):
        shape = "(..., queries, keys)" if causal else "(..., keys)"
        raise ValueError(f"x must be {shape} for causal={causal}, got {tuple(x.shape)}")
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is not None and not _broadcasts(tensor, x):
            raise ValueError(
                f"{name} must be broadcastable to x {tuple(x.shape)}, got {tuple(tensor.shape)}"
            )


def _broadcasts(tensor: Tensor, x: Tensor) -> bool:
    if tensor.dim() > x.dim():
        return False
    sizes = zip(reversed(tensor.shape), reversed(x.shape), strict=False)
    # No `in`: a compiler does not find a number among symbols.
    return all(mine == 1 or mine == whole for mine, whole in sizes)


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    def attrs(scale: float = 1.0, causal: bool = False) -> dict[str, float | bool]:
        return {"scale": scale, "causal": causal}

    yield Sample((maker.normal(2, 3, 5, 5),), attrs(0.25, True), "2x3x5x5,causal")
    yield Sample((maker.normal(7, 33, scale=3.0),), attrs(), "7x33")
    mask = maker.integers(3, 2, 1, 4, 9) > 0
    mask[1, 0, 2] = False
    yield Sample((maker.normal(2, 3, 4, 9), mask), attrs(0.5), "2x3x4x9,mask,hidden row")
    # More queries than keys: the first two see nothing.
    x, bias = maker.normal(2, 6, 4), maker.normal(6, 4)
    yield Sample((x, None, bias), attrs(0.5, True), "2x6x4,bias,causal")
    x, mask, bias = maker.normal(3, 4, 17), maker.integers(3, 17) > 0, maker.normal(3, 1, 17)
    yield Sample((x, mask, bias), attrs(-0.7, True), "3x4x17,mask,bias,causal")


def _shards(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float, causal: bool
) -> Placements:
    # Causality depends on a query's place, which a shard of the queries does not know.
    dims = range(x.dim() - (2 if causal else 1))
    given = [t for t in (mask, bias) if t is not None]
    return [([d], [d, *(_aligned(t, x, d) for t in given)]) for d in dims]


def _aligned(tensor: Tensor, x: Tensor, dim: int) -> Placement:
    """Where a broadcast tensor is cut when x is cut along ``dim``."""
    own = dim - (x.dim() - tensor.dim())
    return own if own >= 0 and tensor.shape[own] != 1 else None


def _backward_shards(
    grad: Tensor, y: Tensor, bias: Tensor | None, scale: float, causal: bool, needs: list[bool]
) -> Placements:
    allowed: list[tuple[list[Placement], list[Placement]]] = []
    for d in range(y.dim() - 1):
        if bias is None:
            allowed.append(([d, None], [d, d]))
            continue
        # Where the bias is one for all shards, its gradient is a sum over them.
        cut = _aligned(bias, y, d)
        summed: Placement = "partial" if cut is None else cut
        allowed.append(([d, summed if needs[1] else None], [d, d, cut]))
    return allowed


softmax = OperatorSpec(
    name="softmax",
    signature=(
        "(Tensor x, Tensor? mask=None, Tensor? bias=None, *, float scale=1.0, bool causal=False) "
        "-> Tensor"),
    equation=(
        "s = x scale + bias where visible; y = exp(s) / sum exp(s) over the visible keys; 0 "
        "elsewhere, and in a row without one; causal: query i of S sees keys up to i + (K - S)"),
    source="Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1; Milakov and Gimelshein 2018",
    forward=_forward, backward=_backward, fake=lambda x, *_, **__: empty_like(x),
    saved=("y", "bias"), differentiable=("x", "bias"), shaped_like={"x": "y"}, check=_check,
    fixed_dtypes={"mask": "bool"},
    sizes=lambda x, mask, bias, *, scale, causal: {
        "keys": x.shape[-1], "rows": x.numel() // x.shape[-1] if x.shape[-1] else 0},
    sharding=Sharding(_shards, _backward_shards),
    cost=lambda x, mask, bias, *, scale, causal: Cost(
        2 * nbytes(x) + nbytes(mask, bias), 8 * x.numel()),
    backward_cost=lambda x, mask, bias, *, scale, causal: Cost(
        3 * nbytes(x) + nbytes(bias), (5 if bias is None else 6) * x.numel()),
    samples=_samples, bound=Bound(forward=14, backward=20, length=lambda x, *_, **__: x.shape[-1]),
)  # fmt: skip
