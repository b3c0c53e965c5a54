"""Attention over packed sequences: attention_varlen. Layout (tokens, heads, head_dim).

Sequence b is the rows from ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``; it may be empty. Rows of
different sequences never see each other. Rows from the last entry on belong to no sequence: they
are padding, with the output 0, the lse -inf and no gradient, and nothing sees them,
whatever they hold.

The reference multiplies what is hidden by 0: a NaN or Inf among the values of one sequence reaches
the others there. A row that goes through the sequences one by one does not have that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import (
    Bound,
    Cost,
    OperatorSpec,
    Placements,
    Residual,
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.operators.attention import attend, attend_backward, check_heads
from anychip.operators.extents import Needs, nbytes
from anychip.operators.ragged import refuse_unsorted


def _unpadded(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(1, T, heads, dim) with zeros in the padding, which may be memory that nobody wrote."""
    padding = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(padding[:, None, None], 0.0)[None]


def _hidden(q: Tensor, cu_seqlens: Tensor, causal: bool) -> Tensor:
    """(T, T) bool: True where a row does not see another one. Looks at no value on the host."""
    position = torch.arange(q.shape[0], device=q.device)
    # Entry 0 is 0, so that the first sequence has the number 1.
    sequence = (position[:, None] >= cu_seqlens[None, :]).sum(-1)
    padding = position >= cu_seqlens[-1]
    hidden = (sequence[:, None] != sequence[None, :]) | padding[:, None]
    return hidden | (position[:, None] < position[None, :]) if causal else hidden


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    refuse_unsorted("attention_varlen", "cu_seqlens", cu_seqlens, q.shape[0], starts_at_zero=True)
    hidden = _hidden(q, cu_seqlens, causal)
    q, k, v = (_unpadded(t, cu_seqlens) for t in (q, k, v))
    y, lse = attend(q, k, v, hidden, scale)
    return y[0], lse[0]


def _backward(
    grad: Tensor, *saved: Tensor, causal: bool, scale: float | None, needs: Needs
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, y, lse, cu_seqlens = saved
    hidden = _hidden(q, cu_seqlens, causal)
    grad, q, k, v, y = (_unpadded(t, cu_seqlens) for t in (grad, q, k, v, y))
    dq, dk, dv = attend_backward(grad, q, k, v, y, lse[None], hidden, scale)
    return dq[0], dk[0], dv[0]


def _fake(q: Tensor, *_: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(q, memory_format=torch.contiguous_format)
    return y, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, causal: bool, scale: float | None
) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"q, k and v must be (tokens, heads, head_dim); {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k and v must agree in tokens; {shapes}")
    check_heads(q, k, v)
    if cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise ValueError(
            f"cu_seqlens must be (sequences + 1,), from 0 on; got shape {tuple(cu_seqlens.shape)}"
        )


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for ends, tokens, heads, kv_heads, dim, causal in (
        ([0, 3, 8, 12], 12, 4, 2, 8, True),
        ([0, 4, 4, 5], 7, 2, 1, 8, False),
        ([0, 0, 9, 9], 9, 2, 2, 16, True),
        ([0], 3, 1, 1, 4, True),
    ):
        q = maker.normal(tokens, heads, dim)
        k, v = (maker.normal(tokens, kv_heads, dim) for _ in range(2))
        cu_seqlens = torch.tensor(ends, dtype=torch.int64, device=q.device)
        label = f"{'+'.join(map(str, ends))}of{tokens}x{heads}/{kv_heads}x{dim},causal={causal}"
        yield Sample((q, k, v, cu_seqlens), {"causal": causal, "scale": None}, label)


def _flops(q: Tensor, cu_seqlens: Tensor, causal: bool) -> int:
    # How many pairs there are is in the values of cu_seqlens, which a cost may not look at. There
    # are at least as many as for sequences of one length.
    tokens, heads, dim = q.shape
    pairs = tokens * tokens // max(cu_seqlens.shape[0] - 1, 1)
    return 4 * heads * dim * ((pairs + tokens) // 2 if causal else pairs)


def _shards(*_: object) -> Placements:
    return [([1, 0], [1, 1, 1, None])]


def _backward_shards(*_: object) -> Placements:
    return [([1, 1, 1], [1, 1, 1, 1, 1, 0, None])]


attention_varlen = OperatorSpec(
    name="attention_varlen",
    signature=(
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, *, bool causal=False, "
        "float? scale=None) -> Tensor"
    ),
    equation=(
        "y = softmax(q k^T scale + mask) v within the rows cu_seqlens[b] to cu_seqlens[b + 1] - 1 "
        "of each sequence b; query head h reads key head h // (H / Hk)"
    ),
    source="Vaswani et al. 2017, equation 1; packing: Dao 2023, arXiv:2307.08691, and Krell 2021",
    forward=_forward,
    backward=_backward,
    fake=_fake,
    residuals=(Residual("lse", "(H, T)", "float32"),),
    saved=("q", "k", "v", "y", "lse", "cu_seqlens"),
    differentiable=("q", "k", "v"),
    check=_check,
    fixed_dtypes={"cu_seqlens": ("int64", "int32")},
    sizes=lambda q, k, v, cu_seqlens, *, causal, scale: {
        "tokens": q.shape[0],
        "sequences": cu_seqlens.shape[0] - 1,
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
    },
    autocast="lower",
    sharding=Sharding(_shards, _backward_shards),
    cost=lambda q, k, v, cu_seqlens, *, causal, scale: Cost(
        nbytes(q, q, k, v, cu_seqlens), _flops(q, cu_seqlens, causal)
    ),
    backward_cost=lambda q, k, v, cu_seqlens, *, causal, scale: Cost(
        2 * nbytes(q, q, k, v, cu_seqlens), _flops(q, cu_seqlens, causal) * 5 // 2
    ),
    samples=_samples,
    bound=Bound(forward=12, backward=24, length=lambda q, *_, **__: max(q.shape[0], q.shape[2])),
)
