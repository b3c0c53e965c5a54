"""Oracles of hadamard and top_k.

hadamard: the product with the matrix of signs, n terms per entry in any order, and the factor
1 / sqrt(n). It is symmetric: the gradient is the transform of the gradient. top_k: a selection, so
that values and indices are exact; the gradient goes back to where a value came from.
"""

import math
from typing import Any

import numpy as np

from anychip.conformance.arithmetic import Rounded, matmul
from anychip.conformance.formats import Array
from anychip.conformance.oracles.oracle import Answer, differentiable


def _signs(length: int) -> Rounded:
    """(-1)^(number of bits that row and column have in common)."""
    index = np.arange(length)
    common = index[:, None] & index
    bits = sum((common >> place & 1 for place in range(length.bit_length())), 0 * common)
    return Rounded.exact(np.where(bits % 2, -1.0, 1.0))


def _hadamard(x: Rounded, *, block: int | None) -> Answer:
    length = x.shape[-1] if block is None else block

    def transformed(x: Rounded) -> tuple[Rounded]:
        product = matmul(x.reshape(-1, length), _signs(length))
        return ((product * (1.0 / math.sqrt(length))).reshape(*x.shape),)

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
