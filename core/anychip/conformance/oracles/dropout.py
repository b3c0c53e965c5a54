"""Oracles of dropout and bias_dropout_add: the mask is Philox, bit for bit.

A kept element is x / (1 - p).

1 / (1 - p) is one float32 number, the product is rounded once more, then to x's type: two roundings
and no sum. A dropped element is exactly 0, in both directions; of bias_dropout_add it is the
residual, whose gradient is the output's as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, where
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.labels import Labels
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Answer, Gradients, differentiable

Numbers = NDArray[np.int64]


def kept(
    shape: tuple[int, ...],
    rng: Numbers,
    rows: Numbers | None,
    *,
    p: float,
    width: int = 0,
    column: int = 0,
) -> NDArray[np.bool_]:
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


LABELS = Labels({
    # Nine digits of them.
    "p:2.32830644e-10": {"p": 2.0**-32}, "p:0.999999046": {"p": 1.0 - 2.0**-20},
    "bias:none": {"bias": False}, "residual:fp32": {"residual": torch.float32},
    "carry": {"offset": 2**32 - 20},
})  # fmt: skip


def _arguments(
    draw: Draw, shape: tuple[int, ...], p: float = 0.3, scale: float | str = 1.0, offset: int = 5
) -> Arguments:
    return (draw.normal(*shape, scale=scale), draw.rng(1234, offset)), {"p": p}


FAR = torch.tensor([0, -1, 2**31, -(2**40) - 7, 2**58 + 1, -(2**63)])
"""Numbers of rows of which some lie outside of the whole, as far as their words' numbers wrap."""


def _in_whole(
    draw: Draw,
    make: Callable[..., Arguments],
    shape: tuple[int, ...],
    width: int = 0,
    column: int = 0,
    rows: torch.Tensor | None = None,
) -> Arguments:
    """A part of a whole: rows of it in any order, from a column on."""
    args, attrs = make(draw, shape)
    numbers = draw.integers(1000, *shape[:-1]) if rows is None else rows
    return (*args, numbers), {**attrs, "width": width or shape[-1], "column": column}


def _parts(make: Callable[..., Arguments]) -> Iterator[Call]:
    """One row; whole ones; from a column on, also as far as a vector or a block of words."""
    labels, part = Labels({"rows": {}, "rows:far": {"rows": FAR}}), partial(_in_whole, make=make)
    yield from labels(part, "5.rows 6x13.rows 3x4x8.rows 0x4.rows")
    for shape, width, column in (("6x13", 40, 5), ("5x64", 256, 64), ("7x1", 9, 8)):
        yield from labels(partial(part, width=width), f"{shape}.rows.column:{column}")
    yield from labels(part, "6x9.rows:far")


def _special(draw: Draw) -> Arguments:
    x = draw.normal(64)
    x[10], x[11], x[40] = math.nan, math.inf, -math.inf
    # A dropped NaN is 0: the element is not multiplied by a mask, it is left out.
    return (x, draw.rng(3, 0)), {"p": 0.5}


def _calls() -> Iterator[Call]:
    yield from LABELS(_arguments, "0 1 scalar 3 4 5 7x9 3x4x5 257 4099", ends=(".p:0.1",))
    yield from LABELS(_arguments, """33x40.p:0 33x40.p:0.5 33x40.p:0.9 33x40.p:1
        33x40.p:2.32830644e-10 33x40.p:0.999999046""")  # fmt: skip
    yield from LABELS(partial(_arguments, shape=(400,)), "huge subnormal")
    yield Call("special", _special, statistical=False, gradient=False)
    yield from _parts(_arguments)
    yield from LABELS(partial(_arguments, p=0.2, offset=2**32 - 1000), "300001", full=True)


def _add_arguments(
    draw: Draw,
    shape: tuple[int, ...],
    p: float = 0.3,
    bias: bool = True,
    offset: int = 5,
    residual: torch.dtype | None = None,
) -> Arguments:
    x, stream = draw.normal(*shape), draw.normal(*shape, dtype=residual)
    return (x, stream, draw.rng(1234, offset), draw.normal(shape[-1]) if bias else None), {"p": p}


def _cancelling(draw: Draw) -> Arguments:
    # Kept or dropped shows only in the last digits of a large residual, or in all of a small sum.
    bias = draw.normal(64, scale=8.0)
    x = (-bias).expand(6, 64) + draw.normal(6, 64, scale=0.05)
    stream = draw.normal(6, 64) * torch.tensor([16.0, 0.01], dtype=draw.dtype).repeat(32)
    return (x, stream, draw.rng(9, 1), bias), {"p": 0.5}


def _add_special(draw: Draw) -> Arguments:
    (x, rng), attrs = _special(draw)
    return (x, draw.normal(64), rng, None), attrs


def _add_calls() -> Iterator[Call]:
    yield from LABELS(_add_arguments, "0x3 1 3 5 7x9 3x4x5 257 9x455", ends=(".p:0.1",))
    yield from LABELS(_add_arguments, """11x40.p:0 11x40.p:0.5 11x40.p:1 11x40.p:0.999999046
        8x33.bias:none 8x33.residual:fp32 8x33.carry""")  # fmt: skip
    yield from _parts(_add_arguments)
    yield Call("6x64.cancel", _cancelling, statistical=False)
    yield Call("special", _add_special, statistical=False, gradient=False)


DROPOUT = differentiable(_answer, _calls, "257.p:0.1", "4099.p:0.1")
BIAS_DROPOUT_ADD = differentiable(_add, _add_calls, "257.p:0.1", "9x455.p:0.1")
