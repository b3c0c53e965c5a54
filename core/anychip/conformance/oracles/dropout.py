"""Oracles of dropout and bias_dropout_add: the mask is Philox, bit for bit.

A kept element is x / (1 - p).

1 / (1 - p) is one float32 number, the product is rounded once more, then to x's type: two roundings
and no sum. A dropped element is exactly 0, in both directions; of bias_dropout_add it is the
residual, whose gradient is the output's as it is.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, where
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Numbers = NDArray[np.int64]


def kept(
    shape: tuple[int, ...], rng: Numbers, rows: Numbers | None, *, p: float, width: int = 0,
    column: int = 0,
) -> NDArray[np.bool_]:  # fmt: skip
    """Which elements of this shape are kept, where rows are those of a whole that is so wide."""
    which: Any = math.prod(shape)
    if rows is not None:
        with np.errstate(over="ignore"):
            which = rows[..., None] * np.int64(width) + np.arange(column, column + shape[-1])
    seed, offset = (int(n) for n in rng)
    return philox.kept(seed, offset, which, p).reshape(shape)


def _scaled(x: Rounded, rng: Numbers, rows: Numbers | None, *, p: float, **place: int) -> Rounded:
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return where(kept(x.shape, rng, rows, p=p, **place), x * scale, 0.0)


def _answer(x: Rounded, rng: Numbers, rows: Numbers | None, **attrs: Any) -> Answer:
    return (_scaled(x, rng, rows, **attrs),), lambda grad: (_scaled(grad, rng, rows, **attrs),)


def _add(
    x: Rounded, residual: Rounded, rng: Numbers, bias: Rounded | None, *rows: Any, **attrs: Any
) -> Answer:
    def backward(grad: Rounded) -> Gradients:
        dx = _scaled(grad, rng, *rows, **attrs)
        return dx, grad, None if bias is None else dx.sum(tuple(range(len(dx.shape) - 1)))

    return (residual + _scaled(x if bias is None else x + bias, rng, *rows, **attrs),), backward


DROPOUT = differentiable(_answer)
BIAS_DROPOUT_ADD = differentiable(_add)
