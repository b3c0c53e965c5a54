"""Attention over keys that lie in blocks, as on the ranks of a ring: is it the attention of all?

Queries and keys are cut alike. What the blocks of keys give a block of queries is joined by lse in
float32, and each block's gradients are computed from the y and lse of all keys and added up (Liu et
al. 2023, arXiv:2310.01889; Dao et al. 2022, section 3.1). Once by the operator, once by the oracle
in numbers that carry their bounds: a block's results are stored in the tensors' type.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from anychip.conformance.arithmetic import Rounded, concatenate, exp, log
from anychip.conformance.oracles.attention import attend, attend_backward, hidden_keys

BLOCKS = 4


class Pair(NamedTuple):
    """A block of queries and a block of keys that they see, all of it or up to the same place."""

    queries: slice
    keys: slice
    causal: bool


def rows(length: int, causal: bool) -> Iterator[list[Pair]]:
    """For each block of queries, the blocks of keys that it sees."""
    edges = np.linspace(0, length, BLOCKS + 1).round().astype(int).tolist()
    blocks = [slice(first, last) for first, last in itertools.pairwise(edges)]
    for number, queries in enumerate(blocks):
        seen = blocks[: number + 1] if causal else blocks
        yield [Pair(queries, keys, causal and keys == queries) for keys in seen]


def by_operator(
    operator: Any, given: Sequence[Tensor], *, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Of q, k, v and y's gradient: y in q's dtype, and q's, k's and v's gradients in float32."""
    q, k, v, grad = given
    y, sums = torch.empty_like(q), [torch.zeros_like(t, dtype=torch.float32) for t in (q, k, v)]
    for row in rows(q.shape[1], causal):
        own = row[0].queries
        cut = [(q[:, own], k[:, p.keys], v[:, p.keys]) for p in row]
        attrs = [{"causal": p.causal, "scale": scale} for p in row]
        parts = [operator.forward(*t, **a) for t, a in zip(cut, attrs, strict=True)]
        lse = torch.stack([part[1] for part in parts]).logsumexp(0)
        weighted = (_per_head(torch.exp(part - lse)) * block.float() for block, part in parts)
        y[:, own] = reduce(add, weighted).to(y.dtype)
        for pair, tensors, named in zip(row, cut, attrs, strict=True):
            found = operator.backward(grad[:, own], *tensors, y[:, own], lse, **named)
            for total, part, place in zip(sums, found, (own, pair.keys, pair.keys), strict=True):
                total[:, place] += part
    return (y, *sums)


def _per_head(x: Tensor) -> Tensor:
    """(B, H, S) as factors of (B, S, H, D)."""
    return x.transpose(1, 2).unsqueeze(-1)


def by_oracle(
    given: Sequence[Rounded], *, causal: bool, scale: float | None
) -> tuple[Rounded, ...]:
    """What :func:`by_operator` has to give."""
    q, k, v, grad = given
    ys, dqs = [], []
    parts_of: dict[int, list[tuple[Rounded, Rounded]]] = {}
    for row in rows(q.shape[1], causal):
        own = row[0].queries
        cut = [(q[:, own], k[:, p.keys], v[:, p.keys]) for p in row]
        hidden = [hidden_keys(t[0], t[1], p.causal) for t, p in zip(cut, row, strict=True)]
        parts = [attend(*t, h, scale) for t, h in zip(cut, hidden, strict=True)]
        y, lse = _joined([(block.stored(q.format), part) for block, part in parts])
        found = [
            attend_backward(grad[:, own], *t, h, scale, whole=(y.stored(q.format), lse))
            for t, h in zip(cut, hidden, strict=True)
        ]
        stored = [[x.stored(q.format) for x in three] for three in found]
        ys.append(y)
        dqs.append(_sum(three[0] for three in stored))
        for pair, (_, dk, dv) in zip(row, stored, strict=True):
            parts_of.setdefault(pair.keys.start, []).append((dk, dv))
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
