"""Oracle of grouped_linear: y = x w_g^T for the rows of group g; dx = dy w_g, dw_g = dy^T x.

Sums run over K, N and the rows of a group; each has its own length in the bound. Rows of no group
are exactly 0 in both directions, and so is the gradient of a weight whose group is empty.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, concatenate, matmul
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


GROUPED_LINEAR = differentiable(_answer)
