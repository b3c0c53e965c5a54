"""Attention over packed sequences: attention_varlen. Layout (tokens, heads, head_dim).

Queries of sequence b are the rows from ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1``, its keys
those from ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1] - 1``; either may be none. Sequences never
see each other, and each is what :mod:`.attention` says of it: causal is aligned to the last key,
and a query that sees no key has the output 0, the lse -inf and no gradient. Rows from the last
entry on belong to no sequence: they are padding, queries that see nothing and keys that nothing
sees, whatever they hold.

The reference multiplies what is hidden by 0: a NaN or Inf among the values of one sequence reaches
the others there. A row that goes through the sequences one by one does not have that.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Residual, Sample, SampleMaker, Sharding
from anychip.operators.attention import attend, attend_backward, check_heads, output_nbytes
from anychip.operators.extents import nbytes
from anychip.operators.linear import check_out_dtype
from anychip.operators.ragged import refuse_unsorted


def _unpadded(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """(1, T, heads, dim) with zeros in the padding, which may be memory that nobody wrote."""
    padding = torch.arange(x.shape[0], device=x.device) >= cu_seqlens[-1]
    return x.masked_fill(padding[:, None, None], 0.0)[None]


def _places(tokens: int, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Of every row the number of its sequence, from 1 on, and how far it is from its end.

    That of padding is ``len(cu_seqlens)``. Looks at no value on the host.
    """
    position = torch.arange(tokens, device=cu_seqlens.device)
    # Entry 0 is 0, so that the first sequence has the number 1.
    sequence = (position[:, None] >= cu_seqlens[None, :]).sum(-1)
    last = sequence.clamp(max=cu_seqlens.shape[0] - 1)
    return sequence, cu_seqlens.index_select(0, last) - position


def blind_queries(tokens: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool) -> Tensor:
    """(tokens,) bool: the queries that see no key, padding among them.

    Looks at no value on the host.
    """
    sequence, to_end = _places(tokens, cu_seqlens_q)
    keys = torch.diff(cu_seqlens_k, append=cu_seqlens_k[-1:])  # and none of padding
    keys = keys.index_select(0, sequence.clamp(min=1) - 1)
    return keys < (to_end.clamp(min=1) if causal else 1)


def _hidden(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool
) -> Tensor:
    """(Tq, Tk) bool: True where a query does not see a key."""
    own, to_end = _places(q.shape[0], cu_seqlens_q)
    other, from_end = _places(k.shape[0], cu_seqlens_k)
    hidden = (own[:, None] != other[None, :]) | (own == cu_seqlens_q.shape[0])[:, None]
    return hidden | (to_end[:, None] > from_end[None, :]) if causal else hidden


def refuse_no_packing(q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Raises ValueError for entries, on a host, that are not sorted, or not from 0 to the rows."""
    for name, ends, x in (("q", cu_seqlens_q, q), ("k", cu_seqlens_k, k)):
        operator, count = "attention_varlen", x.shape[0]
        refuse_unsorted(operator, f"cu_seqlens_{name}", ends, count, starts_at_zero=True)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *, causal: bool,
    scale: float | None, out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    refuse_no_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    hidden, q = _hidden(q, k, cu_seqlens_q, cu_seqlens_k, causal), _unpadded(q, cu_seqlens_q)
    k, v = (_unpadded(t, cu_seqlens_k) for t in (k, v))
    y, lse = attend(q, k, v, hidden, scale, out_dtype=out_dtype)
    return y[0], lse[0]


def _backward(
    grad: Tensor, *saved: Tensor, causal: bool, scale: float | None, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, y, lse, cu_seqlens_q, cu_seqlens_k = saved
    hidden = _hidden(q, k, cu_seqlens_q, cu_seqlens_k, causal)
    grad, q, y = (_unpadded(t, cu_seqlens_q) for t in (grad, q, y))
    k, v = (_unpadded(t, cu_seqlens_k) for t in (k, v))
    dq, dk, dv = attend_backward(grad, q, k, v, y, lse[None], hidden, scale)
    return dq[0], dk[0], dv[0]


def _fake(
    q: Tensor, *_: Tensor, out_dtype: torch.dtype | None, **__: object
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    return y, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _check(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, *,
    out_dtype: torch.dtype | None, **_: object,
) -> None:  # fmt: skip
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 3:
        raise ValueError(f"q, k and v must be (tokens, heads, head_dim); {shapes}")
    check_heads(q, k, v)
    check_out_dtype(q, out_dtype)
    ends = cu_seqlens_q.shape, cu_seqlens_k.shape
    if ends[0] != ends[1] or len(ends[0]) != 1 or not ends[0][0]:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must be (sequences + 1,), from 0 on; got shapes "
            f"{tuple(ends[0])} and {tuple(ends[1])}"
        )


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for ends, ends_k, tokens, heads, kv_heads, dim, causal in (
        ([0, 3, 8, 12], None, 12, 4, 2, 8, True),
        ([0, 4, 4, 5], None, 7, 2, 1, 8, False),
        ([0, 0, 9, 9], None, 9, 2, 2, 16, True),
        ([0], None, 3, 1, 1, 4, True),
        ([0, 3, 5, 5, 8], [0, 5, 5, 7, 9], 9, 4, 2, 8, True),
        ([0, 3, 5, 5, 8], [0, 5, 5, 7, 9], 9, 2, 2, 8, False),
    ):
        q = maker.normal(tokens, heads, dim)
        k, v = (maker.normal(tokens + (ends_k is not None), kv_heads, dim) for _ in range(2))
        cu_seqlens_q = torch.tensor(ends, dtype=torch.int64, device=q.device)
        cu_seqlens_k = cu_seqlens_q if ends_k is None else cu_seqlens_q.new_tensor(ends_k)
        rows = "of".join("+".join(map(str, e)) for e in (ends, ends_k) if e)
        label = f"{rows}of{tokens}x{heads}/{kv_heads}x{dim},causal={causal}"
        args = (q, k, v, cu_seqlens_q, cu_seqlens_k)
        yield Sample(args, {"causal": causal, "scale": None, "out_dtype": None}, label)
    wide = {"causal": True, "scale": None, "out_dtype": torch.float32}
    yield Sample(args, wide, f"{label},float32")


def _flops(q: Tensor, k: Tensor, cu_seqlens: Tensor, causal: bool) -> int:
    # How many pairs there are is in the values of cu_seqlens, which a cost may not look at. There
    # are at least as many as for sequences of one length.
    tokens, heads, dim = q.shape
    pairs = tokens * k.shape[0] // max(cu_seqlens.shape[0] - 1, 1)
    return 4 * heads * dim * ((pairs + tokens) // 2 if causal else pairs)


attention_varlen = OperatorSpec(
    name="attention_varlen",
    signature=(
        "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, *, "
        "bool causal=False, float? scale=None, ScalarType? out_dtype=None) -> Tensor"),
    equation=(
        "y = softmax(q k^T scale + mask) v of the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1 "
        "of q and cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1 of k and v, for each sequence b; "
        "query head h reads key head h // (H / Hk); y rounded once, to out_dtype; None: q's dtype"),
    source="Vaswani et al. 2017, equation 1; packing: Dao 2023, arXiv:2307.08691, and Krell 2021",
    forward=_forward, backward=_backward, fake=_fake,
    residuals=(Residual("lse", "(H, Tq)", "float32"),),
    saved=("q", "k", "v", "y", "lse", "cu_seqlens_q", "cu_seqlens_k"),
    differentiable=("q", "k", "v"), check=_check,
    fixed_dtypes=dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), ("int64", "int32")),
    indexes={"cu_seqlens_q": "bounds of q[0]", "cu_seqlens_k": "bounds of k[0]"},
    sizes=lambda q, k, v, cu_seqlens_q, cu_seqlens_k, **_: {
        "tokens": q.shape[0], "keys": k.shape[0], "sequences": cu_seqlens_q.shape[0] - 1,
        "heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": q.shape[2]},
    autocast="lower",
    sharding=Sharding(
        lambda *_: [([1, 0], [1, 1, 1, None, None])],
        lambda *_: [([1, 1, 1], [1, 1, 1, 1, 1, 0, None, None])]),
    cost=lambda q, k, v, *ends, causal, out_dtype=None, **_: Cost(
        nbytes(q, k, v, *ends) + output_nbytes(q, out_dtype), _flops(q, k, ends[0], causal)),
    backward_cost=lambda q, k, v, *ends, causal, out_dtype=None, **_: Cost(
        2 * nbytes(q, k, v, *ends) + 2 * output_nbytes(q, out_dtype),
        _flops(q, k, ends[0], causal) * 5 // 2),
    samples=_samples,
    bound=Bound(forward=12, backward=24, length=lambda q, k, *_, **__: max(k.shape[0], q.shape[2])),
)  # fmt: skip
