"""Oracles of exact sums: sums_of_squares; lamb_sums_of_squares and lamb, which need it.

A sum is a whole number of 2^-298, added up in Python's integers; its digits are exact. LAMB's step
is rounded: each digit may be what it is anywhere between the bounds of its sum. lamb: You et al.
2019, algorithm 2, with phi the identity: the trust ratio is one number per tensor, 1 where one of
the norms is 0.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anychip.conformance.arithmetic import UNIT, Rounded, concatenate, joined, parts, sqrt
from anychip.conformance.oracles import update
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.update import in_lists, scaled

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
    params: Sequence[Rounded] = most[0]
    sizes = [p.value.size for p in params]

    def one(
        p: Rounded, g: Rounded, m: Rounded, v: Rounded, *, lr: Rounded, count: Rounded, **_: float
    ) -> tuple[Rounded, ...]:
        first, second, u = _moved(p, g, m, v, count, attrs)
        ratios = joined([*map(_trust, params, parts(u, params))]) if trust is None else trust
        ratio = ratios.shaped(lambda each: np.repeat(each, sizes))
        return p - lr * ratio * u, first, second

    return in_lists(one, *most, **attrs)


SUMS_OF_SQUARES = Oracle(forward=lambda tensors: (concatenate([*map(_row, tensors)], 0),))
LAMB_SUMS_OF_SQUARES = Oracle(forward=_lamb_sums_forward)
LAMB = Oracle(forward=_lamb_forward)
