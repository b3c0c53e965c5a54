"""Oracles of the operators over lists: l2_norm, clip, unscale_and_check, adamw, sgd, lion.

In-place operators: the oracle gives every written tensor as it should be afterwards, in the
schema's order. adamw: Loshchilov and Hutter 2019, algorithm 2, with decoupled weight decay; sgd:
torch.optim.SGD without dampening; lion: Chen et al. 2023, algorithm 2. A step with found_inf leaves
every bit as it was.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.conformance.arithmetic import UNIT, Rounded, joined, parts, power, sqrt, where
from anychip.conformance.formats import Format, ulp
from anychip.conformance.oracles.oracle import Oracle

One = Callable[..., tuple[Rounded, ...]]
_CLIP_EPS = 1e-6


def _l2_forward(tensors: Sequence[Rounded]) -> tuple[Rounded]:
    flat = joined(tensors)
    return (sqrt((flat * flat).sum(0)),)


def _clip_forward(
    tensors: Sequence[Rounded], norm: Rounded, *, max_norm: float
) -> tuple[Rounded, ...]:
    ratio = max_norm / (norm + _CLIP_EPS)
    coefficient = where(ratio.value >= 1.0, 1.0, ratio)
    return tuple(parts(joined(tensors) * coefficient, tensors))


def _unscale_forward(
    grads: Sequence[Rounded], scale: Rounded, found_inf: Rounded
) -> tuple[Rounded, ...]:
    # What counts is what is stored, which the division may have made infinite.
    unscaled = parts(joined(grads) / scale, grads)
    finite = all(bool(np.isfinite(g.value).all()) for g in copies(unscaled, grads, grads))
    return (*unscaled, found_inf if finite else Rounded.exact(1.0))


def in_lists(one: One, *args: Any, **attrs: Any) -> tuple[Rounded, ...]:
    """A step of a rule over lists of tensors, the elements of all at once.

    Args:
        one: new parameter and states, given the old ones and the gradient: flat, of all tensors.
        args: lists of parameters, gradients and each state (an empty one is none), then lr, step,
            scale, clip, found_inf and low_precision.
    """
    params, grads, *states, lr, step, scale, clip, found_inf, low_precision = args
    states, low = [state for state in states if state], list(low_precision or ())
    if found_inf is not None and found_inf.value != 0.0:
        return (*params, *itertools.chain(*states), step, *low)
    count = Rounded.exact(step.value + 1.0)
    p, g, *kept = map(joined, (params, grads, *states))
    made = one(p, scaled(g, scale, clip), *kept, lr=lr, count=count, **attrs)
    news, *moved = (parts(whole, params) for whole in made)
    return (*news, *itertools.chain(*moved), count, *copies(news, params, low))


def _adamw(
    p: Rounded, g: Rounded, m: Rounded, v: Rounded, *, lr: Rounded, count: Rounded, **attrs: float
) -> tuple[Rounded, ...]:
    first, second, update = adam_moved(g, m, v, count, attrs)
    return p * (1.0 - lr * attrs["weight_decay"]) - lr * update, first, second


def adam_moved(
    g: Rounded, m: Rounded, v: Rounded, count: Rounded, attrs: Mapping[str, float]
) -> tuple[Rounded, Rounded, Rounded]:
    """The new averages, and the step that they give."""
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    first = beta1 * m + (1.0 - beta1) * g
    second = beta2 * v + (1.0 - beta2) * (g * g)
    corrected = first / (1.0 - power(Rounded.constant(beta1), count))
    root = sqrt(second / (1.0 - power(Rounded.constant(beta2), count)))
    return first, second, corrected / (root + attrs["eps"])


def scaled(g: Rounded, scale: Rounded | None, clip: Rounded | None) -> Rounded:
    """The gradient without the loss scale, clipped."""
    g = g if scale is None else g / scale
    return g if clip is None else g * clip


def copies(
    news: Sequence[Rounded], params: Sequence[Rounded], low: Sequence[Rounded]
) -> list[Rounded]:
    """Low-precision copies: cast from the stored parameter, one rounding to its type more."""
    found = dict[int, Rounded]()
    for format in {p.format for p in params[: len(low)]}:
        places = [index for index, p in enumerate(params[: len(low)]) if p.format == format]
        own = [news[index] for index in places]
        found |= zip(places, parts(_cast(joined(own), format), own), strict=True)
    return [found[index] for index in range(len(low))]


def _cast(new: Rounded, format: Format) -> Rounded:
    """A parameter as it is stored, which is infinite where its type holds no such number."""
    stored = (new * 1.0).stored(format)
    top = np.array(format.largest)
    overflows = np.abs(stored.value) >= top + ulp(top, format) / 2
    infinite = Rounded.exact(np.copysign(np.inf, stored.value))
    return where(overflows, infinite, stored)


def _sgd(
    p: Rounded, g: Rounded, *buffer: Rounded, lr: Rounded, count: Rounded, **attrs: float
) -> tuple[Rounded, ...]:
    momentum, decay = attrs["momentum"], attrs["weight_decay"]
    if decay and not attrs["decoupled"]:
        g = g + p * decay
    velocities = [velocity * momentum + g for velocity in buffer]
    for velocity in velocities:
        g = g + velocity * momentum if attrs["nesterov"] else velocity
    kept = p * (1.0 - lr * decay) if attrs["decoupled"] else p
    return kept - lr * g, *velocities


def _lion(
    p: Rounded, g: Rounded, m: Rounded, *, lr: Rounded, count: Rounded, **attrs: float
) -> tuple[Rounded, ...]:
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    direction = _sign(beta1 * m + (1.0 - beta1) * g, (g.value == 0.0) & (m.value == 0.0))
    new = p * (1.0 - lr * attrs["weight_decay"]) - lr * direction
    return new, beta2 * m + (1.0 - beta2) * g


def _sign(c: Rounded, is_zero: NDArray[np.bool_]) -> Rounded:
    """sign(c), without an error but where c is not known to differ from 0: there by up to 2."""
    unsure = (np.abs(c.value) <= c.worst * UNIT) & ~is_zero
    size = np.where(unsure, 2.0 / UNIT, 0.0)
    return Rounded(np.sign(c.value), size, size)


L2_NORM = Oracle(forward=_l2_forward)
CLIP = Oracle(forward=_clip_forward)
UNSCALE_AND_CHECK = Oracle(forward=_unscale_forward)
ADAMW = Oracle(forward=partial(in_lists, _adamw))
SGD = Oracle(forward=partial(in_lists, _sgd))
LION = Oracle(forward=partial(in_lists, _lion))
