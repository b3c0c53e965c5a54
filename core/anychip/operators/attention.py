"""Attention: attention, attention_dropout. Layout (batch, seq, heads, head_dim).

Queries and keys may differ in length. Causal is aligned to the last key: query i of Sq sees the
keys up to i + Sk - Sq. A query that sees no key at all has the output 0, the lse -inf, and no
gradient.

Dropout has an operator of its own: ``attention`` keeps a signature that every row for it serves
completely, and what is random has to be told where in the whole a shard lies.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

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
from anychip.operators import philox
from anychip.operators.dropout import check_rng, keep_threshold, need_index
from anychip.operators.extents import Needs, nbytes
from anychip.operators.linear import check_out_dtype

_BATCH, _HEADS = 0, 2


# What all kinds of attention share: which keys are hidden is a mask, what is dropped a factor


def wide_heads(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hk, D) in float32, each key head repeated for its query heads."""
    return x.float().repeat_interleave(heads // x.shape[2], dim=2)


def masked_scores(
    q: Tensor, k: Tensor, hidden: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Scaled scores and how they are normalised.

    Args:
        hidden: (Sq, Sk) bool, which keys a query does not see; None when it sees all.

    Returns:
        (B, H, Sq, Sk) float32 scores, -inf where hidden, and (B, H, Sq) lse over the keys.
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q.float(), wide_heads(k, q.shape[2]))
    scores = scores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return scores, torch.logsumexp(scores, dim=-1)


def _weights(scores: Tensor, lse: Tensor, hidden: Tensor | None) -> Tensor:
    if hidden is not None:
        # A query that sees nothing would have the weights exp(-inf - -inf).
        lse = lse.masked_fill(hidden.all(-1), 0.0)
    return torch.exp(scores - lse.unsqueeze(-1))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None,
    scale: float | None,
    factor: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """y (B, Sq, H, D) in q's dtype, or in out_dtype, and lse (B, H, Sq) float32.

    Args:
        hidden: (Sq, Sk) bool, which keys a query does not see; None when it sees all.
        factor: (B, H, Sq, Sk) float32, multiplied to the normalised weights.
    """
    scores, lse = masked_scores(q, k, hidden, scale)
    weights = _weights(scores, lse, hidden)
    weights = weights if factor is None else weights * factor
    y = torch.einsum("bhqk,bkhd->bqhd", weights, wide_heads(v, q.shape[2]))
    return y.to(out_dtype or q.dtype).contiguous(), lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, hidden: Tensor | None,
    scale: float | None, factor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v in their dtypes; arguments as of :func:`attend`."""
    heads, kv_heads = q.shape[2], k.shape[2]
    slope, scores = grad.float(), masked_scores(q, k, hidden, scale)[0]
    weights = _weights(scores, lse, hidden)
    dweights = torch.einsum("bqhd,bkhd->bhqk", slope, wide_heads(v, heads))
    kept = weights
    if factor is not None:
        kept, dweights = weights * factor, dweights * factor
    # sum_k P dP = sum_d y dy (Dao 2022, appendix B.2): no second pass over the scores.
    delta = (slope * y.float()).sum(-1).transpose(1, 2).unsqueeze(-1)
    dscores = weights * (dweights - delta)
    dscores = dscores * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    dq = torch.einsum("bhqk,bkhd->bqhd", dscores, wide_heads(k, heads))
    dk = torch.einsum("bhqk,bqhd->bkhd", dscores, q.float())
    dv = torch.einsum("bhqk,bqhd->bkhd", kept, slope)
    return dq.to(q.dtype), _sum_groups(dk, kv_heads, k), _sum_groups(dv, kv_heads, v)


def _sum_groups(wide: Tensor, kv_heads: int, like: Tensor) -> Tensor:
    batch, length, heads, dim = wide.shape
    grouped = wide.reshape(batch, length, kv_heads, heads // kv_heads, dim)
    return grouped.sum(3).to(like.dtype)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless the last two dims are heads and head_dims that fit together."""
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k and v must have one shape and agree with q in head_dim; {shapes}")
    if not q.shape[-1]:
        raise ValueError(f"head_dim must be at least 1; {shapes}")
    if not k.shape[-2] or q.shape[-2] % k.shape[-2]:
        raise ValueError(f"the heads of q must be a multiple of the heads of k; {shapes}")


def output_nbytes(q: Tensor, out_dtype: torch.dtype | None) -> int:
    """Bytes of y."""
    return q.numel() * (out_dtype or q.dtype).itemsize


def widened(q: Tensor, out_dtype: torch.dtype | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors; for a float32 result of 16 bits in float32, for a row that has one dtype."""
    return tensors if out_dtype in (None, q.dtype) else tuple(t.float() for t in tensors)


# attention


def hidden_keys(q: Tensor, k: Tensor, causal: bool) -> Tensor | None:
    """(Sq, Sk) bool: True where a query does not see a key; None when every one is seen."""
    if not causal:
        return None
    keys = torch.arange(k.shape[1], device=q.device)
    last = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    return last[:, None] < keys[None, :]


def _attention_backward(
    grad: Tensor, *saved: Tensor, causal: bool, scale: float | None, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, y, lse = saved
    return attend_backward(grad, q, k, v, y, lse, hidden_keys(q, k, causal), scale)


def _attention_fake(
    q: Tensor, k: Tensor, *_: object, out_dtype: torch.dtype | None = None, **__: object
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _dim = q.shape
    y = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    return y, q.new_empty((batch, heads, length), dtype=torch.float32)


def _attention_check(
    q: Tensor, k: Tensor, v: Tensor, *_: Tensor, out_dtype: torch.dtype | None = None, **__: object
) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"q, k and v must be (batch, seq, heads, head_dim); {shapes}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k and v must agree in batch; {shapes}")
    check_heads(q, k, v)
    check_out_dtype(q, out_dtype)


def _sizes(q: Tensor, k: Tensor, *_: Tensor, **__: object) -> dict[str, int]:
    return {
        "seq": q.shape[1], "keys": k.shape[1], "heads": q.shape[2], "kv_heads": k.shape[2],
        "head_dim": q.shape[3],
    }  # fmt: skip


Lengths = tuple[int, int, int, int, int, int]
# batch, queries, keys, heads, key heads, head_dim
_SAMPLES: tuple[tuple[Lengths, bool], ...] = (
    ((2, 5, 5, 4, 4, 8), True), ((1, 17, 17, 4, 2, 16), True), ((2, 9, 9, 2, 1, 8), False),
    ((1, 1, 1, 1, 1, 4), True), ((2, 3, 7, 2, 1, 8), True), ((1, 6, 4, 2, 2, 8), True),
    ((1, 2, 5, 2, 2, 4), False),
)  # fmt: skip


def _drawn(maker: SampleMaker, lengths: Lengths) -> tuple[tuple[Tensor, Tensor, Tensor], str]:
    batch, queries, keys, heads, kv_heads, dim = lengths
    q = maker.normal(batch, queries, heads, dim)
    k, v = (maker.normal(batch, keys, kv_heads, dim) for _ in range(2))
    length = f"{queries}" if queries == keys else f"{queries}of{keys}"
    return (q, k, v), f"{batch}x{length}x{heads}/{kv_heads}x{dim}"


def _attention_samples(maker: SampleMaker) -> Iterator[Sample]:
    for lengths, causal in _SAMPLES:
        args, label = _drawn(maker, lengths)
        attrs = {"causal": causal, "scale": None, "out_dtype": None}
        yield Sample(args, attrs, f"{label},causal={causal}")
    yield Sample(args, {**attrs, "out_dtype": torch.float32}, f"{label},float32")


def _flops(q: Tensor, k: Tensor, causal: bool) -> int:
    batch, queries, heads, dim = q.shape
    keys, pairs = k.shape[1], queries * k.shape[1]
    if causal:
        seeing = min(queries, keys)  # the last of these sees all keys, each one before it one less
        pairs = seeing * keys - seeing * (seeing - 1) // 2
    return 4 * batch * heads * pairs * dim


def _length(q: Tensor, k: Tensor, *_: Tensor, **__: object) -> int:
    return max(k.shape[1], q.shape[3])


attention = OperatorSpec(
    name="attention",
    signature=(
        "(Tensor q, Tensor k, Tensor v, *, bool causal=False, float? scale=None, "
        "ScalarType? out_dtype=None) -> Tensor"),
    equation=(
        "y = softmax(q k^T scale + mask) v; query head h reads key head h // (H / Hk); causal: "
        "query i sees keys up to i + Sk - Sq; y rounded once, to out_dtype; None: q's dtype"),
    source="Vaswani et al. 2017, arXiv:1706.03762, equation 1; Ainslie et al. 2023 (GQA)",
    forward=lambda q, k, v, *, causal, scale, out_dtype: attend(
        q, k, v, hidden_keys(q, k, causal), scale, out_dtype=out_dtype),
    backward=_attention_backward, fake=_attention_fake,
    residuals=(Residual("lse", "(B, H, Sq)", "float32"),), saved=("q", "k", "v", "y", "lse"),
    differentiable=("q", "k", "v"), check=_attention_check, sizes=_sizes, autocast="lower",
    sharding=Sharding(
        lambda *_: [([_BATCH, 0], [_BATCH] * 3), ([_HEADS, 1], [_HEADS] * 3)],
        lambda *_: [([_BATCH] * 3, [_BATCH] * 5 + [0]), ([_HEADS] * 3, [_HEADS] * 5 + [1])]),
    cost=lambda q, k, v, *, causal, out_dtype=None, **_: Cost(
        nbytes(q, k, v) + output_nbytes(q, out_dtype), _flops(q, k, causal)),
    backward_cost=lambda q, k, v, *, causal, out_dtype=None, **_: Cost(
        2 * nbytes(q, k, v) + 2 * output_nbytes(q, out_dtype), _flops(q, k, causal) * 5 // 2),
    samples=_attention_samples, bound=Bound(forward=12, backward=24, length=_length),
)  # fmt: skip


# attention_dropout


Index = Tensor | None
"""Positions in the whole of one dim of a part; None: 0, 1, 2 ... of a dim that is whole."""


def weight_rows(q: Tensor, index: Sequence[Index], *, heads: int = 0, queries: int = 0) -> Tensor:
    """(B, H, Sq) int64: which row of the whole's (B H Sq, Sk) weights each row of these is.

    Args:
        index: of batch, head and query.
        heads, queries: of the whole; 0 where they are q's.
    """
    rows = torch.zeros((), dtype=torch.int64, device=q.device)
    for dim, given, size in zip((0, 2, 1), index, (0, heads, queries), strict=True):
        own = torch.arange(q.shape[dim], device=q.device) if given is None else given
        rows = rows.unsqueeze(-1) * (size or q.shape[dim]) + own
    return rows


def _factor(
    q: Tensor, k: Tensor, rng: Tensor, *index: Index, p: float, keys: int = 0, **sizes: int
) -> Tensor:
    """(B, H, Sq, Sk) float32: 0 for what is dropped, 1 / (1 - p) rounded once for what is kept."""
    if all(given is None for given in index):
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        words = philox.words(rng, math.prod(shape)).reshape(shape)
    else:
        *of_rows, key = index
        rows = weight_rows(q, of_rows, **sizes).unsqueeze(-1) * (keys or k.shape[1])
        own = torch.arange(k.shape[1], device=q.device) if key is None else key
        words = philox.words_at(rng, rows + own)
    scale = torch.tensor(0.0 if p == 1.0 else 1.0 / (1.0 - p), dtype=torch.float32)
    return torch.where(words >= keep_threshold(p), scale.to(q.device), 0.0)


def _dropout_forward(
    q: Tensor, k: Tensor, v: Tensor, rng: Tensor, *index: Index, p: float, causal: bool,
    scale: float | None, **sizes: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    factor = _factor(q, k, rng, *index, p=p, **sizes)
    return attend(q, k, v, hidden_keys(q, k, causal), scale, factor)


def _dropout_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, rng: Tensor,
    *index: Index, p: float, causal: bool, scale: float | None, needs: Needs, **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden, factor = hidden_keys(q, k, causal), _factor(q, k, rng, *index, p=p, **sizes)
    return attend_backward(grad, q, k, v, y, lse, hidden, scale, factor)


def _dropout_check(
    q: Tensor, k: Tensor, v: Tensor, rng: Tensor, *index: Index, p: float, causal: bool,
    scale: float | None, **sizes: int,
) -> None:  # fmt: skip
    _attention_check(q, k, v)
    check_rng(rng, p)
    extents = {"batch": q.shape[0], "head": q.shape[2], "query": q.shape[1], "key": k.shape[1]}
    of_whole = (None, *(sizes[name] for name in ("heads", "queries", "keys")))
    for (name, extent), given, size in zip(extents.items(), index, of_whole, strict=True):
        if given is not None and given.shape != (extent,):
            raise ValueError(
                f"{name}_index must be int64[{extent}], a position for each {name} of "
                f"{'k' if name == 'key' else 'q'}; got shape {tuple(given.shape)}"
            )
        if size is not None and (size < max(extent, 1) if given is not None else size != 0):
            raise ValueError(
                f"{name}_index goes with the size of the whole, at least {extent}; got {size} "
                f"{'without' if given is None else 'with'} {name}_index"
            )


def _dropout_samples(maker: SampleMaker) -> Iterator[Sample]:
    shapes: tuple[tuple[Lengths, bool, float], ...] = (
        ((2, 5, 5, 4, 2, 8), True, 0.25),
        ((1, 3, 7, 2, 2, 8), False, 0.5),
        ((1, 6, 4, 2, 1, 4), True, 0.1),
        ((1, 3, 3, 1, 1, 4), True, 1.0),
    )
    for lengths, causal, p in shapes:
        args, label = _drawn(maker, lengths)
        attrs = {"p": p, "causal": causal, "scale": None, "heads": 0, "queries": 0, "keys": 0}
        rng = maker.rng(seed=99, offset=7)
        yield Sample((*args, rng, *[None] * 4), attrs, f"{label},p={p}")
    args, label = _drawn(maker, (2, 3, 5, 4, 2, 8))
    index = (maker.integers(9, size) for size in (2, 4, 3, 5))
    attrs = {"p": 0.5, "causal": False, "scale": None, "heads": 9, "queries": 9, "keys": 9}
    yield Sample((*args, maker.rng(seed=99, offset=7), *index), attrs, f"{label},index")


_INDEX = ("batch_index", "head_index", "query_index", "key_index")


def _index_places(dim: int, index: tuple[Index, ...]) -> list[Placement]:
    """Of those that are given: the one of ``dim`` is split, as that is."""
    return [0 if i == dim else None for i, given in enumerate(index) if given is not None]


def _dropout_shards(q: Tensor, k: Tensor, v: Tensor, rng: Tensor, *rest: Any) -> Placements:
    index = rest[: len(_INDEX)]
    need_index("attention_dropout", "batch_index, or head_index and heads", *index[:2])
    return [
        ([dim, i], [dim, dim, dim, None, *_index_places(i, index)])
        for i, dim in enumerate((_BATCH, _HEADS))
        if index[i] is not None
    ]


def _dropout_backward_shards(*args: Any) -> Placements:
    index = args[7 : 7 + len(_INDEX)]
    need_index("attention_dropout", "batch_index, or head_index and heads", *index[:2])
    return [
        ([dim] * 3, [dim, dim, dim, dim, dim, i, None, *_index_places(i, index)])
        for i, dim in enumerate((_BATCH, _HEADS))
        if index[i] is not None
    ]


def _drawing(q: Tensor, k: Tensor, causal: bool, flops: int) -> int:
    """Flops of ``attention``'s and of the words, which take about 30 a weight."""
    return _flops(q, k, causal) * (flops * q.shape[3] + 30) // (4 * q.shape[3])


attention_dropout = OperatorSpec(
    name="attention_dropout",
    signature=(
        "(Tensor q, Tensor k, Tensor v, Tensor rng, Tensor? batch_index=None, "
        "Tensor? head_index=None, Tensor? query_index=None, Tensor? key_index=None, *, "
        "float p=0.5, bool causal=False, float? scale=None, int heads=0, int queries=0, "
        "int keys=0) -> Tensor"),
    equation=(
        "y = (D softmax(q k^T scale + mask)) v; D_n = 1 / (1 - p) if u_n >= floor(p 2^32) else 0 "
        "for element n = ((b heads + h) queries + i) keys + j of the whole's (B, H, Sq, Sk), which "
        "the indices say; u_n = word n of Philox(rng)"),
    source=(
        "Vaswani et al. 2017, section 5.4; Dao et al. 2022, arXiv:2205.14135, algorithms 2 and 4; "
        "Salmon et al. 2011 (Philox4x32-10)"),
    forward=_dropout_forward, backward=_dropout_backward, fake=_attention_fake,
    residuals=(Residual("lse", "(B, H, Sq)", "float32"),),
    saved=("q", "k", "v", "y", "lse", "rng", *_INDEX), differentiable=("q", "k", "v"),
    check=_dropout_check, fixed_dtypes=dict.fromkeys(("rng", *_INDEX), "int64"), sizes=_sizes,
    autocast="lower", sharding=Sharding(_dropout_shards, _dropout_backward_shards),
    cost=lambda q, k, v, *_, causal, **__: Cost(nbytes(q, q, k, v), _drawing(q, k, causal, 4)),
    backward_cost=lambda q, k, v, *_, causal, **__: Cost(
        2 * nbytes(q, q, k, v), _drawing(q, k, causal, 10)),
    samples=_dropout_samples, bound=Bound(forward=14, backward=26, length=_length), random=True,
)  # fmt: skip
