"""Oracles of hadamard and top_k.

hadamard: the product with the matrix of signs, n terms per entry in any order, and the factor
1 / sqrt(n). It is symmetric: the gradient is the transform of the gradient. top_k: a selection, so
that values and indices are exact; the gradient goes back to where a value came from.
"""

import math
from typing import Any

import numpy as np

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.formats import Array
from anychip.conformance.oracles.oracle import Answer, differentiable


def _signed_sums(x: Array) -> Array:
    """(rows, n) times the n x n signs (-1)^(number of bits that row and column have in common).

    That matrix is the one of two, times itself for each bit: sums and differences, bit by bit.
    """
    found = x
    for bit in range(x.shape[1].bit_length() - 1):
        pairs = found.reshape(-1, 2, 1 << bit)
        found = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
    return found.reshape(x.shape)


def _hadamard(x: Rounded, *, block: int | None) -> Answer:
    length = x.shape[-1] if block is None else block

    def transformed(x: Rounded) -> tuple[Rounded]:
        rows = x.reshape(-1, length)
        bound = rows.sum(1, keepdims=True)  # of a sum with any signs
        value = _signed_sums(rows.value)

        def spread() -> Array:
            return np.sqrt(bound.spread**2 + length * (value**2 - bound.value**2))

        y = Rounded(value, bound.worst, spread) * (1.0 / math.sqrt(length))
        return (y.reshape(*x.shape),)

    return transformed(x), transformed


def _order(x: Array, k: int) -> Any:
    # NaN sorts to the end: of the magnitudes turned round, that is the front.
    size = np.where(np.isnan(x), -math.inf, -np.abs(x))
    key = np.where(np.isnan(x), 0, 1)
    return np.lexsort((size, key), axis=-1)[..., :k]


def _top_k(x: Rounded, *, k: int) -> Answer:
    indices = _order(x.value, k)

    def scattered(array: Array) -> Array:
        whole = np.zeros(x.shape)
        np.put_along_axis(whole, indices, array, -1)
        return whole

    values = x.shaped(lambda array: np.take_along_axis(array, indices, -1))
    return (values, Rounded.exact(indices)), lambda grad, *_: (grad.shaped(scattered),)


HADAMARD = differentiable(_hadamard)
TOP_K = differentiable(_top_k)
