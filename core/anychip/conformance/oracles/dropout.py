"""Oracle of dropout: the mask is Philox, bit for bit; a kept element is x / (1 - p).

1 / (1 - p) is one float32 number, the product is rounded once more, then to x's type: two roundings
and no sum. A dropped element is exactly 0, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import Rounded, where
from anychip.conformance.calls import LAYOUTS, Arguments, Call, Draw, shape_label
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
        yield Call(
            label=f"{shape_label(shape)}.p:0.1", make=partial(_arguments, shape=shape, p=0.1)
        )
    for p in (0.0, 0.5, 0.9, 1.0, 2.0**-32, 1.0 - 2.0**-20):
        yield Call(label=f"33x40.p:{p:.9g}", make=partial(_arguments, shape=(33, 40), p=p))
    for layout in LAYOUTS:
        make = partial(_arguments, shape=(9, 31), p=0.3)
        yield Call(label=f"9x31.{layout}", make=make, layout=layout)
    for name in ("huge", "subnormal"):
        yield Call(
            label=name,
            make=partial(_of_scale, name=name),
        )
    yield Call(label="special", make=_special, statistical=False, gradient=False)
    make = partial(_arguments, shape=(300_001,), p=0.2, offset=2**32 - 1000)
    yield Call(label="300001", make=make, full=True)


DROPOUT = Oracle(
    forward=_forward, backward=_backward, calls=_calls, lower_precision=("257.p:0.1", "4099.p:0.1")
)
