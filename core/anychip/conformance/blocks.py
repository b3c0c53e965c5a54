"""Attention over keys that lie in blocks, as on the ranks of a ring: is it the attention of all?

Queries and keys are cut alike, of packed sequences each. What the blocks of keys give a block of
queries is joined by lse in float32, and each block's gradients are computed from the y and lse of
all keys and added up (Liu et al. 2023, arXiv:2310.01889; Dao et al. 2022, section 3.1). Once by the
operator, once by the oracle in numbers that carry their bounds: a block's results are stored in the
tensors' type. The oracle leaves out blocks without queries or keys, which add nothing.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded, concatenate, exp, log
from anychip.conformance.oracles.attention import attend, format_of, hidden_keys

BLOCKS = 4


class Block(NamedTuple):
    """Rows of every sequence, and where those of each sequence end."""

    rows: Tensor
    ends: Tensor


def _edges(length: int) -> list[int]:
    """Where a sequence is cut."""
    edges: list[int] = np.linspace(0, length, BLOCKS + 1).round().astype(int).tolist()
    return edges


def _blocks(ends: Tensor) -> list[Block]:
    """The blocks of packed sequences, on the device of their ends."""
    starts = ends[:-1].tolist()
    pairs = [(n, _edges(length)) for n, length in zip(starts, ends.diff().tolist(), strict=True)]
    made = []
    for number in range(BLOCKS):
        spans = [(start + c[number], start + c[number + 1]) for start, c in pairs]
        rows = [row for first, last in spans for row in range(first, last)]
        own = list(itertools.accumulate((last - first for first, last in spans), initial=0))
        made.append(
            Block(torch.tensor(rows, dtype=torch.int64).to(ends.device), ends.new_tensor(own))
        )
    return made


def _seen(blocks: Sequence[Any], number: int, causal: bool) -> Iterator[tuple[Any, bool]]:
    """The blocks of keys that this block of queries sees, and whether only up to the same place."""
    for other, keys in enumerate(blocks[: number + 1] if causal else blocks):
        yield keys, causal and other == number


def by_operator(
    operator: Any, given: Sequence[Tensor], ends: Tensor | None, *, causal: bool, **attrs: Any
) -> tuple[Tensor, ...]:
    """Of q, k, v and y's gradient: y in its dtype, and q's, k's and v's gradients in float32.

    Blocks' results are put together on the host, of which every device can give them.

    Args:
        ends: of packed sequences; None for (B, S, H, D), which are all of one length.
    """
    q, k, v, grad = given
    dim = 1 if ends is None else 0
    whole = torch.tensor([0, q.shape[1]], device=q.device)
    y = torch.zeros(q.shape, dtype=attrs["out_dtype"] or q.dtype)
    sums = [torch.zeros(t.shape) for t in (q, k, v)]
    blocks = _blocks(whole if ends is None else ends)
    for number, own in enumerate(blocks):
        row = list(_seen(blocks, number, causal))
        own_q, own_grad = (t.index_select(dim, own.rows) for t in (q, grad))
        calls = []
        for keys, diagonal in row:
            tensors = [own_q, *(t.index_select(dim, keys.rows) for t in (k, v))]
            packed = [] if ends is None else [own.ends, keys.ends]
            calls.append((tensors, packed, {"causal": diagonal, **attrs}))
        parts = [operator.forward(*tensors, *packed, **named) for tensors, packed, named in calls]
        lse = torch.stack([part[1] for part in parts]).logsumexp(0)
        weighted = (_per_head(torch.exp(part - lse)) * block.float() for block, part in parts)
        own_y = reduce(add, weighted).to(y.dtype)
        y.index_copy_(dim, own.rows.cpu(), own_y.cpu())
        for (keys, _), (tensors, packed, named) in zip(row, calls, strict=True):
            found = operator.backward(own_grad, *tensors, own_y, lse, *packed, **named)
            places = (own.rows, keys.rows, keys.rows)
            for total, part, place in zip(sums, found, places, strict=True):
                total.index_add_(dim, place.cpu(), part.float().cpu())
    return (y, *sums)


def _per_head(x: Tensor) -> Tensor:
    """(B, H, S), or (H, T), as factors of (B, S, H, D), or (T, H, D)."""
    return x.transpose(-1, -2).unsqueeze(-1)


def by_oracle(
    given: Sequence[Rounded], ends: Sequence[int] | None, **attrs: Any
) -> tuple[Rounded, ...]:
    """What :func:`by_operator` has to give."""
    if ends is None:
        return _of_sequence(given, **attrs)
    spans = list(itertools.pairwise(ends))
    found = [_of_sequence([t[None, a:b] for t in given], **attrs) for a, b in spans if a < b]
    padding = [Rounded.exact(np.zeros((1, *t[ends[-1] :].shape))) for t in (given[3], *given[:3])]
    columns = zip(*found, padding, strict=True)
    return tuple(concatenate(column, 1)[0] for column in columns)


def _of_sequence(
    given: Sequence[Rounded], *, causal: bool, scale: float | None, out_dtype: torch.dtype | None
) -> tuple[Rounded, ...]:
    q, k, v, grad = given
    format = format_of(q, out_dtype)
    ys, dqs = [], []
    parts_of: dict[int, list[tuple[Rounded, Rounded]]] = {}
    blocks = [slice(a, b) for a, b in itertools.pairwise(_edges(q.shape[1])) if a < b]
    for number, own in enumerate(blocks):
        row = list(_seen(blocks, number, causal))
        cut = [(q[:, own], k[:, keys], v[:, keys]) for keys, _ in row]
        hidden = [hidden_keys(*t[:2], diagonal) for t, (_, diagonal) in zip(cut, row, strict=True)]
        parts = [attend(*t, h, scale) for t, h in zip(cut, hidden, strict=True)]
        y, lse = _joined([(block.stored(format), part) for (block, part), _ in parts])
        whole = y.stored(format), lse
        found = [of_block(grad[:, own], whole=whole) for _, of_block in parts]
        stored = [[x.stored(q.format) for x in three if x is not None] for three in found]
        ys.append(y)
        dqs.append(_sum(three[0] for three in stored))
        for (keys, _), (_, dk, dv) in zip(row, stored, strict=True):
            parts_of.setdefault(keys.start, []).append((dk, dv))
    columns = [list(zip(*parts_of[start], strict=True)) for start in sorted(parts_of)]
    dk, dv = (concatenate([_sum(column[i]) for column in columns], 1) for i in range(2))
    return concatenate(ys, 1), concatenate(dqs, 1), dk, dv


def _joined(parts: Sequence[tuple[Rounded, Rounded]]) -> tuple[Rounded, Rounded]:
    """y and lse of the keys of several blocks."""
    top = Rounded.exact(np.max([lse.value for _, lse in parts], axis=0))
    lse = log(_sum(exp(lse - top) for _, lse in parts)) + top
    factors = (exp(part - lse).transpose(0, 2, 1)[..., None] for _, part in parts)
    return _sum(factor * y for factor, (y, _) in zip(factors, parts, strict=True)), lse


def _sum(terms: Iterable[Rounded]) -> Rounded:
    return reduce(add, terms)
