"""Oracles of dropout and bias_dropout_add: the mask is Philox, bit for bit.

A kept element is x / (1 - p).

1 / (1 - p) is one float32 number, the product is rounded once more, then to x's type: two roundings
and no sum. A dropped element is exactly 0, in both directions; of bias_dropout_add it is the
residual, whose gradient is the output's as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, where
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts, shape_label
from anychip.conformance.oracles import philox
from anychip.conformance.oracles.oracle import Oracle


def _scaled(x: Rounded, rng: NDArray[np.int64], p: float) -> Rounded:
    seed, offset = (int(n) for n in rng)
    keep = philox.kept(seed, offset, x.value.size, p).reshape(x.shape)
    scale = 0.0 if p == 1.0 else 1.0 / (1.0 - p)
    return where(keep, x * scale, 0.0)


def _forward(x: Rounded, rng: NDArray[np.int64], *, p: float) -> tuple[Rounded]:
    return (_scaled(x, rng, p),)


def _backward(
    grads: tuple[Rounded], x: Rounded, rng: NDArray[np.int64], *, p: float
) -> tuple[Rounded]:
    return (_scaled(grads[0], rng, p),)


def _add_forward(
    x: Rounded, residual: Rounded, rng: NDArray[np.int64], bias: Rounded | None, *, p: float
) -> tuple[Rounded]:
    return (residual + _scaled(x if bias is None else x + bias, rng, p),)


def _add_backward(
    grads: tuple[Rounded],
    x: Rounded,
    residual: Rounded,
    rng: NDArray[np.int64],
    bias: Rounded | None,
    *,
    p: float,
) -> tuple[Rounded | None, ...]:
    (grad,) = grads
    dx = _scaled(grad, rng, p)
    dbias = None if bias is None else dx.sum(tuple(range(len(dx.shape) - 1)))
    return dx, grad, dbias


def _arguments(
    draw: Draw, shape: tuple[int, ...], p: float, scale: float = 1.0, offset: int = 5
) -> Arguments:
    return (draw.normal(*shape, scale=scale), draw.rng(1234, offset)), {"p": p}


def _of_scale(draw: Draw, name: str) -> Arguments:
    return _arguments(draw, (400,), 0.3, scale=getattr(draw, name))


def _special(draw: Draw) -> Arguments:
    x = draw.normal(64)
    x[10], x[11], x[40] = math.nan, math.inf, -math.inf
    # A dropped NaN is 0: the element is not multiplied by a mask, it is left out.
    return (x, draw.rng(3, 0)), {"p": 0.5}


def _calls() -> Iterator[Call]:
    shapes: tuple[tuple[int, ...], ...] = (
        (0,), (1,), (), (3,), (4,), (5,), (7, 9), (3, 4, 5), (257,), (4099,),
    )  # fmt: skip
    for shape in shapes:
        yield Call(f"{shape_label(shape)}.p:0.1", partial(_arguments, shape=shape, p=0.1))
    for p in (0.0, 0.5, 0.9, 1.0, 2.0**-32, 1.0 - 2.0**-20):
        yield Call(f"33x40.p:{p:.9g}", partial(_arguments, shape=(33, 40), p=p))
    yield from in_layouts("9x31", partial(_arguments, shape=(9, 31), p=0.3))
    for name in ("huge", "subnormal"):
        yield Call(name, partial(_of_scale, name=name))
    yield Call("special", _special, statistical=False, gradient=False)
    make = partial(_arguments, shape=(300_001,), p=0.2, offset=2**32 - 1000)
    yield Call("300001", make, full=True)


def _add_arguments(
    draw: Draw,
    shape: tuple[int, ...],
    p: float,
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
    shapes: tuple[tuple[int, ...], ...] = (
        (0, 3), (1,), (3,), (5,), (7, 9), (3, 4, 5), (257,), (9, 455),
    )  # fmt: skip
    for shape in shapes:
        yield Call(f"{shape_label(shape)}.p:0.1", partial(_add_arguments, shape=shape, p=0.1))
    for p in (0.0, 0.5, 1.0, 1.0 - 2.0**-20):
        yield Call(f"11x40.p:{p:.9g}", partial(_add_arguments, shape=(11, 40), p=p))
    yield from in_layouts("9x31", partial(_add_arguments, shape=(9, 31), p=0.3))
    yield Call("8x33.bias:none", partial(_add_arguments, shape=(8, 33), p=0.3, bias=False))
    make = partial(_add_arguments, shape=(8, 33), p=0.3, residual=torch.float32)
    yield Call("8x33.residual:fp32", make)
    yield Call("8x33.carry", partial(_add_arguments, shape=(8, 33), p=0.3, offset=2**32 - 20))
    yield Call("6x64.cancel", _cancelling, statistical=False)
    yield Call("special", _add_special, statistical=False, gradient=False)


DROPOUT = Oracle(
    forward=_forward, backward=_backward, calls=_calls, lower_precision=("257.p:0.1", "4099.p:0.1")
)
BIAS_DROPOUT_ADD = Oracle(
    forward=_add_forward,
    backward=_add_backward,
    calls=_add_calls,
    lower_precision=("257.p:0.1", "9x455.p:0.1"),
)
