"""What operators on lists of tensors may be called with: norms, scales, rules of optimizers."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.choices import NOT_FINITE, Choices, Classes
from anychip.conformance.oracles import adamw_8bit as coding_8bit

SQUARES = ("huge", "tiny")
"""Scales whose squares fit, and a sum of so many of them."""
FEW_SQUARES = 1 << 15
SPECIAL = ("special",)
FOUND = (1.0, 3.0, 0.5, math.nan, 2.0)
"""What says that a gradient is not finite: also a sum or a mean over ranks."""

_SHAPES: Classes = {
    "few elements": ((3,), (2,), (1, 2), (4,), (5,), (2, 3), (7,), (2, 4), (9,), (5, 2), (11,)),
    "some empty": ((0,), (5,), (2, 0), (4, 3)),
    "one element": ((), (1,), (1, 1)),
    "beside powers of two": ((15,), (33,), (63,), (65,), (129,), (17, 31), (257,)),
    "multiples of 16": ((64,), (16, 12), (128,), (320,), (8, 32), (16,), (48,)),
    "long": ((1027,), (515,), (6, 100), (2, 260), (9000,), (300, 7), (70_001,)),
    "all empty": ((0,), (0, 3)),
}


MANY = 12
"""Tensors of a class's shapes; those behind them have few elements."""
_COUNTS = (7, 9, 16, 33, 12, 8, 20, 48, 10, 24, 6, 14, 18, 28, 11, 36, 13, 15, 30, 17, 22, 26, 19,
           40, 21, 29, 23, 31, 25, 34, 27)  # fmt: skip
_HUNDREDS = (70, 96, 72, 130, 66, 80, 310, 75, 90, 68)
"""What several launches of a kernel share."""


def _shapes(choose: Choices) -> list[tuple[int, ...]]:
    """Shapes of the tensors of a list."""
    counts = {"few": (3, 4, 5), "1": (1,), "2": (2,), "more": _COUNTS, "hundreds": _HUNDREDS}
    count = choose.member("tensors", counts, sparing=True)
    shapes = choose.member("shapes", {name: (shapes,) for name, shapes in _SHAPES.items()})
    first = choose.turn("shapes")
    most = min(count, max(MANY, len(shapes)))  # of shapes that are given, all
    every = [*shapes[first % len(shapes) :], *shapes[: first % len(shapes)]]
    short = [shape for shape in every if math.prod(shape) < 1 << 12]  # the others come once
    found = [*every, *(short * MANY)][:most]
    choose.hides("shapes", not any(map(math.prod, found)))
    return found + [(index % 3,) for index in range(count - len(found))]


def _listed(choose: Choices, draw: Draw, factor: str, **options: Any) -> list[Tensor]:
    shapes = _shapes(choose)
    if options.get("ends") == SQUARES and sum(map(math.prod, shapes)) > FEW_SQUARES:
        options["ends"] = ("root-huge", "root-tiny")
    wide = choose.of("every second tensor in float32", False, True)
    # One tensor alone has what is not finite, every second time the longest.
    turn, sizes = choose.turn("spoilt"), [math.prod(shape) for shape in shapes]
    spoilt = sizes.index(max(sizes)) if turn % 2 else turn // 2 % len(shapes)
    found = []
    for number, shape in enumerate(shapes):
        dtype = torch.float32 if wide and number % 2 else draw.dtype
        values = choose.values(factor, draw, *shape, dtype=dtype, number=number, **options)
        is_clean = number != spoilt and choose.chosen[factor] in NOT_FINITE
        found.append(draw.normal(*shape, dtype=dtype) if is_clean else values)
    return found


def l2_norm(choose: Choices, draw: Draw) -> Arguments:
    return (_listed(choose, draw, "tensors' values", ends=SQUARES),), {}


def sums_of_squares(choose: Choices, draw: Draw) -> Arguments:
    """Exact ones, of the smallest numbers too."""
    ends = ("huge", "subnormal")
    return (_listed(choose, draw, "tensors' values", ends=ends, more=SPECIAL),), {}


def clip(choose: Choices, draw: Draw) -> Arguments:
    norms = (3.0, 1.5, 20.0, 2.0, 10.0), (0.5, 0.01, 1.0), (0.0,), (1e6, 1e3), (math.inf, math.nan)
    norm = draw.scalar(choose.number("norm", *norms))
    most = choose.number("max_norm", (1.0,), (0.25, 0.1, 0.01, 0.5), (8.0, 2.0, 10.0, 5.0, 100.0))
    attrs = {"max_norm": most}
    return (_listed(choose, draw, "tensors' values", ends=SQUARES, more=SPECIAL), norm), attrs


def unscale_and_check(choose: Choices, draw: Draw) -> Arguments:
    grads = _listed(choose, draw, "grads", ends=("large", "root-tiny"), more=SPECIAL)
    scales = (
        (2.0, 16.0, 4.0, 8.0), (1024.0, 65536.0, 128.0, 32768.0), (3.0, 7.0, 10.0, 1.5), (1.0,),
        (2.0**-4, 2.0**-3, 0.5),
    )  # fmt: skip
    scale = draw.scalar(choose.number("scale", *scales))
    found_inf = draw.scalar(choose.number("found_inf", (0.0,), FOUND, hides=FOUND))
    return (grads, scale, found_inf), {}


def _given(
    choose: Choices, draw: Draw, factor: str, *classes: Sequence[float | None],
    hides: Sequence[float] = (),
) -> Tensor | None:  # fmt: skip
    value = choose.number(factor, *classes, hides=hides)
    return None if value is None else draw.scalar(value)


def _step(choose: Choices, draw: Draw, *, averages: int, **rule: Any) -> Arguments:
    """A step of an update rule; the decay and the rates of averages of every rule are alike."""
    shapes, wide = _shapes(choose), torch.float32
    dtypes = {"float32": (wide,), "the own type": (draw.dtype,), "both": (wide, draw.dtype)}
    own = dtypes[choose.of("params in", *dtypes)]
    params = [
        choose.values("params", draw, *s, dtype=own[i % len(own)], more=(), number=i)
        for i, s in enumerate(shapes)
    ]
    mixed = choose.of("every second gradient in float32", False, True)
    grads = [
        choose.values("grads", draw, *s, dtype=wide if mixed and i % 2 else None, more=(), number=i)
        for i, s in enumerate(shapes)
    ]
    past = choose.of("moments", 0.1, 0.0, 1e-6)
    moments = [[draw.normal(*s, dtype=wide) * past for s in shapes] for _ in range(averages)]
    moments[1:] = [[m.square() for m in squares] for squares in moments[1:]]
    scalars = (
        _given(choose, draw, "scale", (None,), (8.0, 3.0, 0.5, 1.0, 2.0), (1024.0, 65536.0, 128.0)),
        _given(choose, draw, "clip", (None,), (0.25, 1.0, 0.7, 0.5, 0.1), (0.0,)),
        _given(choose, draw, "found_inf", (None,), (0.0,), FOUND, hides=FOUND),
    )
    both = torch.bfloat16, torch.float16
    low = choose.of("copies", None, both[:1], both[1:], both)  # both: in turn
    copies = low and [(-p).to(low[i % len(low)], copy=True) for i, p in enumerate(params)]
    lr = draw.scalar(choose.number("lr", (1e-2, 1e-3, 0.1, 0.05), (0.5, 1.0, 2.0), (0.0,)))
    # Counts beside what 8, 12 and 16 bits hold; and some whose next one no short float is.
    steps = (
        (3.0, 2.0, 5.0, 4.0, 7.0, 9.0), (0.0,), (1.0,), (258.0, 2050.0, 1000.0),
        (255.0, 100.0, 10.0, 99.0), (65_535.0, 10_000.0),
    )  # fmt: skip
    step = draw.scalar(choose.number("step", *steps))
    decay = choose.number("weight_decay", (0.1, 0.01, 1e-3, 0.05), (0.0,), (1.0, 0.5, 2.0, 0.2))
    args = (params, grads, *moments, lr, step, *scalars, copies)
    return args, {**rule, "weight_decay": decay}


_LARGE_EPS = (1e-3, 0.01, 0.003, 0.05, 1e-4), (1.0, 0.1, 0.3, 2.0, 0.5)


def _betas(choose: Choices) -> dict[str, Any]:
    one, two = (0.9, 0.8, 0.95, 0.85, 0.7), (0.999, 0.98, 0.9)
    return {
        "beta1": choose.number("beta1", one, (0.0,), (0.5, 0.1, 0.3, 0.05, 0.99)),
        "beta2": choose.number("beta2", two, (0.5, 0.7, 0.0, 0.1), (0.95, 0.99, 0.995)),
    }


def adamw(choose: Choices, draw: Draw) -> Arguments:
    eps = choose.number("eps", (1e-8, 1e-7), *_LARGE_EPS)
    return _step(choose, draw, averages=2, **_betas(choose), eps=eps)


def adamw_8bit(choose: Choices, draw: Draw) -> Arguments:
    return coding_8bit.coded(partial(adamw, choose), draw)


def lion(choose: Choices, draw: Draw) -> Arguments:
    return _step(choose, draw, averages=1, **_betas(choose))


def sgd(choose: Choices, draw: Draw) -> Arguments:
    kinds = {
        "none": ((0.0, False),), "high": ((0.9, False), (0.95, False), (0.8, False)),
        "nesterov": ((0.9, True), (0.5, True), (0.95, True)),
        "low": ((0.5, False), (0.1, False), (0.3, False)),
    }  # fmt: skip
    momentum, nesterov = choose.member("momentum", kinds)
    decoupled = choose.of("decoupled", False, True)
    rule = {"momentum": momentum, "nesterov": nesterov, "decoupled": decoupled}
    args, attrs = _step(choose, draw, averages=1, **rule)
    return (args if momentum else (*args[:2], [], *args[3:])), attrs


def lamb(choose: Choices, draw: Draw) -> Arguments:
    eps = choose.number("eps", (1e-6, 1e-5), *_LARGE_EPS)
    args, attrs = _step(choose, draw, averages=2, **_betas(choose), eps=eps)
    trust = draw.uniform(len(args[0]), low=0.1, high=4.0)
    return (*args, trust if choose.of("trust", False, True) else None), attrs


def lamb_sums_of_squares(choose: Choices, draw: Draw) -> Arguments:
    (*args, _), attrs = lamb(choose, draw)
    return (*args[:4], *args[5:8]), attrs


DRAWN: Mapping[str, Callable[[Choices, Draw], Arguments]] = {
    drawn.__name__: drawn
    for drawn in (l2_norm, sums_of_squares, clip, unscale_and_check, adamw, adamw_8bit, sgd, lion,
                  lamb_sums_of_squares, lamb)
}  # fmt: skip
"""By operator."""
