"""Oracles of exact sums: sums_of_squares; lamb_sums_of_squares and lamb, which need it.

A sum is a whole number of 2^-298, added up in Python's integers; its digits are exact. LAMB's step
is rounded: each digit may be what it is anywhere between the bounds of its sum. lamb: You et al.
2019, algorithm 2, with phi the identity: the trust ratio is one number per tensor, 1 where one of
the norms is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import UNIT, Rounded, concatenate, sqrt
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.oracles import update
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.update import LONG, in_lists, scaled

_BASE, _DIGITS, _LOWEST = 32, 19, -298


def _row(tensor: Rounded, error: float = 0.0) -> Rounded:
    """(1, 21) digits of a sum of squares, numbers of inf and of NaN; the sum within ``error``."""
    values = tensor.value.reshape(-1)
    finite = values[np.isfinite(values)]
    total = sum(int(value) ** 2 for value in (finite * 2.0 ** (-_LOWEST // 2)).tolist())
    around = int(error * 2.0**-_LOWEST)
    ends = max(total - around, 0), total + around
    row, sizes = [], []
    for place in range(0, _BASE * _DIGITS, _BASE):
        row.append((total >> place) % (1 << _BASE))
        low, high = (end >> place for end in ends)
        # Past a carry the digit may be any.
        sizes.append(high - low if low >> _BASE == high >> _BASE else 1 << _BASE)
    row += [int(np.isinf(values).sum()), int(np.isnan(values).sum())]
    size = np.array([[*sizes, 0, 0]], dtype=np.float64) / UNIT
    return Rounded(np.array([row], dtype=np.float64), size, size)


def _sums_forward(tensors: Sequence[Rounded]) -> tuple[Rounded]:
    return (concatenate([_row(tensor) for tensor in tensors], 0),)


def _moved(
    p: Rounded, g: Rounded, m: Rounded, v: Rounded, count: Rounded, attrs: dict[str, float]
) -> tuple[Rounded, Rounded, Rounded]:
    first, second, step = update.adam_moved(g, m, v, count, attrs)
    return first, second, step + attrs["weight_decay"] * p


def _lamb_sums_forward(*args: Any, **attrs: Any) -> tuple[Rounded]:
    *lists, step, scale, clip = args
    count, given = Rounded.exact(step.value + 1.0), zip(*lists, strict=True)
    weights, steps = [], []
    for p, g, m, v in given:
        moved = _moved(p, scaled(g, scale, clip), m, v, count, attrs)[2]
        square = (moved * moved).reshape(-1).sum(0)
        weights.append(_row(p))
        steps.append(_row(moved, float(square.worst * UNIT + square.value * 2.0**-48)))
    rows = [concatenate(part, 0).reshape(1, len(part), -1) for part in (weights, steps)]
    return (concatenate(rows, 0),)


def _trust(p: Rounded, u: Rounded) -> Rounded:
    weight, step = (sqrt((t * t).reshape(-1).sum(0)) for t in (p, u))
    if weight.value == 0.0 or step.value == 0.0:
        return Rounded.exact(1.0)
    return weight / step


def _lamb_forward(*args: Any, **attrs: float) -> tuple[Rounded, ...]:
    *most, trust = args
    ratios = itertools.count()

    def one(
        p: Rounded, g: Rounded, m: Rounded, v: Rounded, *, lr: Rounded, count: Rounded, **_: float
    ) -> tuple[Rounded, ...]:
        first, second, u = _moved(p, g, m, v, count, attrs)
        ratio = _trust(p, u) if trust is None else trust[next(ratios)]
        return p - lr * ratio * u, first, second

    return in_lists(one, *most, **attrs)


# Calls


def _flat(draw: Draw, numels: Sequence[int], scale: float = 1.0) -> Arguments:
    return ([draw.normal(size, scale=scale) for size in numels],), {}


def _of_scale(draw: Draw, name: str) -> Arguments:
    return _flat(draw, (1500,), scale=getattr(draw, name))


def _two_dims(draw: Draw) -> Arguments:
    return ([draw.normal(5, 7), draw.normal(33), draw.normal(40, 40)],), {}


def _special(draw: Draw) -> Arguments:
    args, attrs = _flat(draw, (40, 40, 5000))
    args[0][0][3], args[0][1][39], args[0][2][4999] = torch.inf, torch.nan, -torch.inf
    args[0][2][17] = torch.inf
    return args, attrs


def _far_apart(draw: Draw, exponents: int) -> Arguments:
    """Numbers of so many exponents, in any order: what kernels keep in several sums, or in none."""
    x = draw.normal(9000, dtype=torch.float32)
    x *= torch.exp2(-(torch.arange(9000) * 7919 % (exponents + 1)).float())
    return ([x.to(draw.dtype)],), {}


def _one_large(draw: Draw) -> Arguments:
    """A number beside which the others vanish in float32, and in float64 too."""
    x = draw.normal(3000, scale=2.0**-10)
    x[1700] = 2.0**14
    return ([x, x * 0.0],), {}


def _sums_calls() -> Iterator[Call]:
    exact = partial(Call, statistical=False)
    for size in (0, 1, 15, 16, 17, 257, 4096, 4097, 20_000):
        yield exact(str(size), partial(_flat, numels=(size,)))
    yield exact("list", partial(_flat, numels=(1030, 7, 2048, 0)))
    for exponents in (12, 19, 20, 30, 42, 120):
        yield exact(f"exponents:{exponents}", partial(_far_apart, exponents=exponents))
    for name in ("huge", "tiny", "subnormal"):
        yield exact(name, partial(_of_scale, name=name))
    yield exact("one-large", _one_large)
    yield exact("special", _special)
    yield exact("1500001", partial(_flat, numels=(1_500_001,)), full=True)


_SAME = "plain first step:255 step:4098 step:65535 late no-decay eps betas".split()
_STEPS: dict[str, dict[str, Any]] = {
    **{label: update.ADAMW_STEPS[label] for label in _SAME},
    "decay": {"weight_decay": 5.0},
    # A parameter of 0 has no norm, and a step of 0 has none either.
    "zero-params": {"params": 0.0},
    "zero-steps": {"grad_scale": 0.0, "weight_decay": 0.0},
    "large-params": {"params": 64.0},
    "scale": {"scale": 1024.0},
    "scale-clip": {"scale": 512.0, "clip": 0.25, "found_inf": 0.0},
}
_WRITES: dict[str, dict[str, Any]] = {
    "trust": {"trust": [0.5, 1.0, 2.0, 3.0, 0.25, 1.5, 7.0]},
    "found-inf": {"scale": 1024.0, "found_inf": 1.0, "low": torch.bfloat16},
    "low-bf16": {"low": torch.bfloat16},
    "low-fp16": {"low": torch.float16, "clip": 0.5},
}


def _step(draw: Draw, *, trust: Sequence[float] | None = None, **changes: Any) -> Arguments:
    args, attrs = update._step(draw, **{"eps": 1e-6, **changes})
    return (*args, None if trust is None else torch.tensor(trust)), attrs


def _read_only(draw: Draw, **changes: Any) -> Arguments:
    """The same step, for the operator that only measures it."""
    args, attrs = _step(draw, **changes)
    return (*args[:4], *args[5:8]), attrs


def _lamb_calls() -> Iterator[Call]:
    yield from update.step_calls(_step, _STEPS | _WRITES)
    yield Call("long.trust", partial(_step, shapes=LONG, trust=(0.5, 2.0, 3.0)), full=True)


def _lamb_sums_calls() -> Iterator[Call]:
    exact = partial(Call, statistical=False)
    for label, changes in _STEPS.items():
        yield exact(label, partial(_read_only, **changes))
    yield exact("own-dtype", lambda draw: _read_only(draw, param=draw.dtype))
    yield exact("long", partial(_read_only, shapes=LONG), full=True)


SUMS_OF_SQUARES = Oracle(forward=_sums_forward, calls=_sums_calls, lower_precision=("list", "4096"))
LAMB_SUMS_OF_SQUARES = Oracle(
    forward=_lamb_sums_forward, calls=_lamb_sums_calls, lower_precision=("plain", "betas")
)
LAMB = Oracle(forward=_lamb_forward, calls=_lamb_calls, lower_precision=("plain", "scale-clip"))
