"""Oracles of linear and embedding.

linear: y = x w^T + b; dx = dy w, dw = dy^T x, db = sum dy. Sums run over K, N and the rows; each
has its own length in the bound. embedding: a copy, exact; its gradient adds up the rows of an
index, and a row that is used once is a copy too, without any rounding.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, matmul, root
from anychip.conformance.formats import Array
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable


def _rows(x: Rounded) -> Rounded:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def answer(x: Rounded, weight: Rounded, bias: Rounded | None, **_: Any) -> Answer:
    rows = _rows(x)
    y = matmul(rows, weight.transpose(1, 0))
    y = y if bias is None else _from(bias, y, rows.shape[1])

    def backward(dy: Rounded) -> Gradients:
        grad = _rows(dy)
        dx = matmul(grad, weight).reshape(*x.shape)
        return dx, matmul(grad.transpose(1, 0), rows), None if bias is None else grad.sum(0)

    return (y.reshape(*x.shape[:-1], weight.shape[0]),), backward


def _from(bias: Rounded, product: Rounded, count: int) -> Rounded:
    """The sum may begin with the bias, which every one of its roundings then sees."""
    y, size = product + bias, np.where(np.isfinite(bias.value), np.abs(bias.value), 0.0)
    return Rounded(y.value, y.worst + count * size, lambda: root(y.spread, np.sqrt(count) * size))


def _embedding(indices: NDArray[np.int64], weight: Rounded) -> Answer:
    return (weight[indices],), lambda dy: (_added_up(_rows(dy), indices.reshape(-1), weight.shape),)


def _added_up(grad: Rounded, flat: NDArray[np.int64], shape: tuple[int, ...]) -> Rounded:
    """Every row of a gradient, added to the row of its index."""

    def added(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        total = np.zeros(shape)
        np.add.at(total, flat, np.broadcast_to(rows, grad.shape))
        return total

    # n terms take n - 1 roundings here, so that one term is exact.
    roundings = np.maximum(np.bincount(flat, minlength=shape[0]) - 1, 0)[:, None]
    value = added(grad.value)
    worst = added(grad.worst) + roundings * added(np.abs(grad.value))

    def spread() -> Array:
        own = roundings * (value**2 + added(grad.value**2))
        return np.sqrt(added(grad.spread**2) + own)

    return Rounded(value, worst, spread)


LINEAR = differentiable(answer)
EMBEDDING = differentiable(_embedding)
