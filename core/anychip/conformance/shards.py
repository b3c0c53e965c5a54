"""Shards of a random operator, each drawn alone with its place in the whole, and put together.

A dim is cut into two parts that lie between each other and in no order, but for the columns of
rows, which are cut into ranges. What is drawn is such that only dropped elements are 0, so that
results are masks: of ones, and of attention to one-hot values, where all weights are equal.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip import ops

P = 0.4
Both = tuple[Tensor, Tensor]
"""What is left of a part, forward and backward."""


class Drawn(NamedTuple):
    """A random operator over a whole tensor.

    Attributes:
        shape: of the whole's mask.
        draw: ``draw(places, rng, dtype)`` of the part that has these places of every dim; None:
            all of them, which is not said to the operator.
        cuts: which dims are cut at a time.
    """

    shape: tuple[int, ...]
    draw: Callable[[Sequence[Tensor | None], Tensor, torch.dtype], Both]
    cuts: tuple[tuple[int, ...], ...]


def put_together(drawn: Drawn, cut: Sequence[int], rng: Tensor, dtype: torch.dtype) -> Both:
    """Both directions of the whole, each part of it drawn alone."""
    forward, backward = (torch.zeros(drawn.shape) for _ in range(2))
    parts = [_halves(n) if dim in cut else [None] for dim, n in enumerate(drawn.shape)]
    for places in itertools.product(*parts):
        given = [None if place is None else place.to(rng.device) for place in places]
        filled = (_all(n) if p is None else p for p, n in zip(places, drawn.shape, strict=True))
        where = torch.meshgrid(*filled, indexing="ij")
        for whole, part in zip((forward, backward), drawn.draw(given, rng, dtype), strict=True):
            whole[where] = part.detach().cpu().float()
    return forward, backward


def _all(size: int) -> Tensor:
    return torch.arange(size)


def _halves(size: int) -> list[Tensor | None]:
    if size == _COLUMNS:
        return [_all(size)[:5], _all(size)[5:]]
    return [_all(size)[::2].flip(0), _all(size)[1::2]]


_ROWS, _COLUMNS, _HEAD_DIM = 7, 13, 8


def _rows(
    call: Callable[..., Tensor], places: Sequence[Tensor | None], rng: Tensor, dtype: torch.dtype
) -> Both:
    """``call(x, rng, rows, place)`` of ones. Columns that are cut are so of rows with numbers."""
    rows, columns = places
    if rows is None and columns is not None:
        rows = _all(_ROWS).to(rng.device)
    column, end = (0, _COLUMNS) if columns is None else (int(columns[0]), int(columns[-1]) + 1)
    place = {} if rows is None else {"width": _COLUMNS, "column": column}
    shape = (_ROWS if rows is None else len(rows), end - column)
    x = torch.ones(shape, dtype=dtype, device=rng.device, requires_grad=True)
    y = call(x, rng, rows, place)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    return y, dx


def _bias_dropout_add(x: Tensor, rng: Tensor, rows: Tensor | None, place: dict[str, int]) -> Tensor:
    return ops.bias_dropout_add(x, torch.zeros_like(x), rng, None, rows, p=P, **place)


def _dropout_add_norm(
    norm: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    rng: Tensor,
    rows: Tensor | None,
    _: dict[str, int],
) -> Tensor:
    return norm(x, torch.zeros_like(x), torch.ones_like(x[0]), rng, rows=rows, p=P)[1]


def _attention(places: Sequence[Tensor | None], rng: Tensor, dtype: torch.dtype) -> Both:
    wholes = ATTENTION.shape
    batch, heads, queries, keys = (
        n if place is None else len(place) for place, n in zip(places, wholes, strict=True)
    )
    names = ("heads", "queries", "keys")
    given = zip(names, places[1:], wholes[1:], strict=True)
    sizes: dict[str, Any] = {name: size for name, place, size in given if place is not None}
    one_hot = torch.eye(_HEAD_DIM, dtype=dtype, device=rng.device)[:, None]
    v = one_hot[:keys].expand(batch, keys, heads, _HEAD_DIM).clone().requires_grad_()
    q, k = v.new_zeros(batch, queries, heads, _HEAD_DIM), torch.zeros_like(v)
    y = ops.attention_dropout(q, k, v, rng, *places, p=P, **sizes)
    (dv,) = torch.autograd.grad(y, v, one_hot[:queries].expand_as(y))
    return y.permute(0, 2, 1, 3)[..., :keys], dv.permute(0, 2, 3, 1)[:, :, :queries]


ATTENTION = Drawn((2, 4, 6, 7), _attention, ((), (0,), (1,), (2,), (3,), (0, 1, 2, 3)))
_BY_ROWS = partial(Drawn, (_ROWS, _COLUMNS))


def _norm(norm: Callable[..., tuple[Tensor, Tensor]]) -> Drawn:
    return _BY_ROWS(partial(_rows, partial(_dropout_add_norm, norm)), ((), (0,)))


RANDOM: Mapping[str, Drawn] = {
    "dropout": _BY_ROWS(
        partial(_rows, lambda x, rng, rows, place: ops.dropout(x, rng, rows, p=P, **place)),
        ((), (0,), (1,), (0, 1)),
    ),
    "bias_dropout_add": _BY_ROWS(partial(_rows, _bias_dropout_add), ((), (0,), (1,), (0, 1))),
    "dropout_add_rms_norm": _norm(ops.dropout_add_rms_norm),
    "dropout_add_layer_norm": _norm(ops.dropout_add_layer_norm),
    "attention_dropout": ATTENTION,
}
