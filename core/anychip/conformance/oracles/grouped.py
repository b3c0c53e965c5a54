"""Oracle of grouped_linear: y = x w_g^T for the rows of group g; dx = dy w_g, dw_g = dy^T x.

Sums run over K, N and the rows of a group; each has its own length in the bound. Rows of no group
are exactly 0 in both directions, and so is the gradient of a weight whose group is empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, concatenate, matmul
from anychip.conformance.calls import Arguments, Call, Draw, special
from anychip.conformance.labels import Labels, lengths
from anychip.conformance.oracles import linear
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Offsets = NDArray[np.int64]


def _slices(offsets: Offsets) -> Iterator[slice]:
    for start, end in zip([0, *offsets], offsets, strict=False):
        yield slice(int(start), int(end))


def _by_rows(parts: list[Rounded], offsets: Offsets, num_rows: int, width: int) -> Rounded:
    """The groups' rows one after the other, then zeros."""
    rest = num_rows - (int(offsets[-1]) if len(offsets) else 0)
    return concatenate([*parts, Rounded.exact(np.zeros((rest, width)))], 0)


def _answer(x: Rounded, weight: Rounded, offsets: Offsets, **_: Any) -> Answer:
    groups = list(enumerate(_slices(offsets)))
    parts = [matmul(x[rows], weight[group].transpose(1, 0)) for group, rows in groups]

    def backward(dy: Rounded) -> Gradients:
        dx = [matmul(dy[rows], weight[group]) for group, rows in groups]
        dweight = [matmul(dy[rows].transpose(1, 0), x[rows])[None] for _, rows in groups]
        none = Rounded.exact(np.zeros((0, *weight.shape[1:])))
        return _by_rows(dx, offsets, *x.shape), concatenate([*dweight, none], 0)

    return (_by_rows(parts, offsets, x.shape[0], weight.shape[1]),), backward


# Lengths of the groups, rows of no group, K, N: one of everything; empty groups first, last and
# beside each other; one group; nothing but rows of none; no rows; beside tiles; long sums.
_SIZES = """1.rest:0.1-1 3+5.rest:0.8-5 4+0+3.rest:2.33-17 0+0+6+0.rest:0.16-7 7.rest:3.12-9
    0+0.rest:4.8-4 0+0.rest:0.8-4 none.rest:3.8-4 15+17+1.rest:0.64-65 2+3.rest:0.1000-6
    600+1.rest:0.24-10 2+2.rest:1.12-700"""
_FULL = "100+0+156+256.rest:0.256-512 1000+3.rest:21.64-64"


_LABELS = Labels(
    {"int32": {"dtype": torch.int32}, **linear.LABELS.words},
    {r"(none|\d+(?:[+]\d+)*)": lengths, **linear.LABELS.forms},
)


def _grouped(
    draw: Draw,
    lengths: tuple[int, ...],
    rest: int,
    inputs: int,
    outputs: int,
    *,
    scale: float | str = 1.0,
    dtype: torch.dtype = torch.int64,
    **attrs: Any,
) -> Arguments:
    offsets = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    x = draw.normal(sum(lengths) + rest, inputs, scale=scale)
    return (x, draw.normal(len(lengths), outputs, inputs), offsets.to(dtype)), attrs


def _apart(draw: Draw) -> Arguments:
    # Group g multiplies by the number g + 1: a wrong weight is a wrong integer.
    (x, weight, offsets), attrs = _grouped(draw, (2, 0, 3, 4), 2, 5, 5)
    weight[:] = torch.eye(5) * torch.arange(1, 5)[:, None, None]
    return (x.round(), weight, offsets), attrs


def _calls() -> Iterator[Call]:
    yield from _LABELS(_grouped, _SIZES)
    yield from _LABELS(_grouped, _FULL, full=True)
    wide = partial(_grouped, lengths=(3, 4), rest=1, inputs=40, outputs=12)
    yield from _LABELS(wide, "huge tiny")
    yield from _LABELS(_grouped, "3+5.rest:1.8-5.int32 4+0+3.rest:2.33-17.int32")
    large = "3+0+6.rest:2.20-11 2+3.rest:0.1000-6 600+1.rest:0.24-10"
    yield from _LABELS(_grouped, large, ends=(".to-float32",))
    # Aligned in all directions, for which a path of lower precision may be taken.
    yield from _LABELS(_grouped, "32+32.rest:0.512-64")
    yield Call("apart", _apart, statistical=False)
    # What is not finite stays in its group; in the rows of no group it is not seen at all.
    make = partial(_grouped, lengths=(3, 4, 2), rest=2, inputs=24, outputs=5)
    spoilt = ((0, (4, 11), math.nan), (1, (2, 1, 1), math.inf), (0, (10, 0), math.nan))
    yield special("nan", make, *spoilt)


GROUPED_LINEAR = differentiable(
    _answer, _calls, "15+17+1.rest:0.64-65", "2+3.rest:0.1000-6", "600+1.rest:0.24-10",
    "32+32.rest:0.512-64", "2+3.rest:0.1000-6.to-float32", "600+1.rest:0.24-10.to-float32",
)  # fmt: skip
