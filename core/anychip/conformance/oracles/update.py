"""Oracles of the operators over lists: l2_norm, clip, unscale_and_check, adamw, sgd, lion.

In-place operators: the oracle gives every written tensor as it should be afterwards, in the
schema's order. adamw: Loshchilov and Hutter 2019, algorithm 2, with decoupled weight decay; sgd:
torch.optim.SGD without dampening; lion: Chen et al. 2023, algorithm 2. A step with found_inf leaves
every bit as it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from anychip.conformance.arithmetic import UNIT, Rounded, concatenate, power, sqrt, where
from anychip.conformance.calls import Arguments, Call, Draw
from anychip.conformance.formats import Format, ulp
from anychip.conformance.oracles.oracle import Oracle

One = Callable[..., tuple[Rounded, ...]]
_CLIP_EPS = 1e-6


def _l2_forward(tensors: Sequence[Rounded]) -> tuple[Rounded]:
    flat = concatenate([t.reshape(-1) for t in tensors], 0)
    return (sqrt((flat * flat).sum(0)),)


def _clip_forward(
    tensors: Sequence[Rounded], norm: Rounded, *, max_norm: float
) -> tuple[Rounded, ...]:
    ratio = max_norm / (norm + _CLIP_EPS)
    coefficient = where(ratio.value < 1.0, ratio, 1.0)
    return tuple(t * coefficient for t in tensors)


def _unscale_forward(
    grads: Sequence[Rounded], scale: Rounded, found_inf: Rounded
) -> tuple[Rounded, ...]:
    # What counts is what is stored, which the division may have made infinite.
    stored = [_cast(g / scale, g.format) for g in grads]
    finite = all(bool(np.isfinite(g.value).all()) for g in stored)
    found = found_inf if finite else Rounded.exact(1.0)
    return (*(g / scale for g in grads), found)


def in_lists(one: One, *args: Any, **attrs: Any) -> tuple[Rounded, ...]:
    """A step of a rule over lists of tensors.

    Args:
        one: new parameter and states of one tensor, given the old ones and its gradient.
        args: lists of parameters, gradients and each state (an empty one is none), then lr, step,
            scale, clip, found_inf and low_precision.
    """
    params, grads, *states, lr, step, scale, clip, found_inf, low_precision = args
    states, low = [state for state in states if state], list(low_precision or ())
    if found_inf is not None and found_inf.value != 0.0:
        return (*params, *itertools.chain(*states), step, *low)
    count = Rounded.exact(step.value + 1.0)
    made = [
        one(p, scaled(g, scale, clip), *kept, lr=lr, count=count, **attrs)
        for p, g, *kept in zip(params, grads, *states, strict=True)
    ]
    news, *moved = zip(*made, strict=True)
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
    return [_cast(new, p.format) for new, p, _ in zip(news, params, low, strict=False)]


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


# Scalars and empty tensors among others; beside vector widths; more elements than one chunk.
SHAPES: tuple[tuple[int, ...], ...] = ((4, 5), (17,), (), (0, 3), (1000,), (3, 7, 9), (1,))


LONG: tuple[tuple[int, ...], ...] = ((300_001,), (3,), (131_072,))
"""Longer than what an implementation does at a time, with and without a rest."""


def normals(
    draw: Draw,
    scale: float | str = 1.0,
    dtype: torch.dtype | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> list[Any]:
    return [draw.normal(*shape, scale=scale, dtype=dtype) for shape in shapes]


def _spotlights(draw: Draw) -> list[Any]:
    """Tensors that are 0 but for one element, at another place each; none may be forgotten."""
    tensors = [torch.zeros(67, dtype=draw.dtype) for _ in range(67)]
    for index, tensor in enumerate(tensors):
        tensor[index] = 1.0 + index
    return tensors


def _flat(draw: Draw, sizes: Sequence[int], scales: Sequence[float] | None = None) -> Arguments:
    pairs = zip(sizes, scales or [1.0] * len(sizes), strict=True)
    return ([draw.normal(size) * scale for size, scale in pairs],), {}


def _listed(draw: Draw, *args: Any, **options: Any) -> Arguments:
    return (normals(draw, *args, **options),), {}


def _one_spotlight(draw: Draw, index: int) -> Arguments:
    return ([_spotlights(draw)[index]],), {}


def _l2_calls() -> Iterator[Call]:
    for size in (1, 2, 7, 8, 15, 16, 17, 33, 100, 257, 4099):
        yield Call(str(size), partial(_flat, sizes=(size,)))
    yield Call("list", _listed)
    yield Call("ends", partial(_flat, sizes=(9, 3), scales=(1.0, 64.0)))
    yield Call("zeros", partial(_flat, sizes=(9,), scales=(0.0,)))
    for index in (0, 1, 33, 66):
        yield Call(f"spotlight:{index}", partial(_one_spotlight, index=index))
    yield Call("spotlights", lambda draw: ((_spotlights(draw),), {}))
    for name in ("huge", "tiny"):
        yield Call(name, partial(_listed, scale=name))
    yield Call("inf", partial(_flat, sizes=(9, 3), scales=(1.0, math.inf)))
    yield Call("nan", partial(_flat, sizes=(9, 3), scales=(math.nan, 1.0)))
    yield Call("300000", partial(_flat, sizes=(300_000,)), full=True)


def _clipped(draw: Draw, norm: float, max_norm: float = 1.0) -> Arguments:
    return (normals(draw), draw.scalar(norm)), {"max_norm": max_norm}


def _clip_calls() -> Iterator[Call]:
    for norm in (0.0, 0.5, 3.0, 4.0, 1e6, math.inf):
        yield Call(f"norm:{norm:g}", partial(_clipped, norm=norm))
    # At a norm of this size the 1e-6 of the definition decides.
    yield Call("norm:1e-05", partial(_clipped, norm=1e-5, max_norm=1e-6))
    yield Call(
        "spotlights",
        lambda draw: ((_spotlights(draw), draw.scalar(10.0)), {"max_norm": 1.0}),
        statistical=False,
    )


def _unscaled(
    draw: Draw, scale: float, bad: float | None = None, place: int = 0, found: float = 0.0
) -> Arguments:
    grads = normals(draw)
    if bad is not None:
        flat = [grads[0].view(-1), grads[4].view(-1), grads[6].view(-1)][place]
        flat[-1] = bad
    return (grads, draw.scalar(scale), draw.scalar(found)), {}


def _unscale_calls() -> Iterator[Call]:
    for scale in (1.0, 1024.0, 65536.0, 3.0):
        yield Call(f"scale:{scale:g}", partial(_unscaled, scale=scale))
    for name in ("nan", "inf", "-inf"):
        for place, where_ in enumerate(("first", "middle", "last")):
            make = partial(_unscaled, scale=1024.0, bad=float(name), place=place)
            yield Call(f"{name}.{where_}", make, statistical=False)
    # Once set it stays, although this call finds nothing.
    yield Call("found-before", partial(_unscaled, scale=2.0, found=1.0))


ADAMW_ATTRS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def _step(
    draw: Draw,
    *,
    step: float = 3.0,
    scale: float | None = None,
    clip: float | None = None,
    found_inf: float | None = None,
    low: torch.dtype | None = None,
    zero_moments: bool = False,
    lr: float = 1e-2,
    params: float = 1.0,
    param: torch.dtype = torch.float32,
    grad_scale: float = 1.0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    **changes: float,
) -> Arguments:
    wide, past = torch.float32, 0.0 if zero_moments else grad_scale
    weights = normals(draw, params, param, shapes)
    grads = normals(draw, grad_scale * (scale or 1.0), shapes=shapes)
    moments = normals(draw, 0.1 * past, wide, shapes)
    squares = [m.square() for m in normals(draw, past, wide, shapes)]
    scalars = (None if v is None else draw.scalar(v) for v in (scale, clip, found_inf))
    lower = None if low is None else [p.to(low) for p in weights]
    fixed = (draw.scalar(lr), draw.scalar(step))
    return (weights, grads, moments, squares, *fixed, *scalars, lower), {**ADAMW_ATTRS, **changes}


ADAMW_STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    # The first step, from moments of 0: bias correction is all, and a wrong count is a factor.
    "first": {"step": 0.0, "zero_moments": True},
    "second": {"step": 1.0},
    # Beside what a count of 8, 12 or 16 bits holds; one that no short float has.
    "step:255": {"step": 255.0},
    "step:4098": {"step": 4098.0},
    "step:65535": {"step": 65_535.0},
    "late": {"step": 100_000.0},
    "no-decay": {"weight_decay": 0.0},
    # Decoupled decay: with a large one, coupling it to the gradient shows.
    "decay": {"weight_decay": 5.0, "lr": 0.05},
    # eps outside of the root, and of the size of the root.
    "eps": {"eps": 0.5},
    "betas": {"beta1": 0.0, "beta2": 0.5},
    # A number of 0 is a number, and not one that is missing.
    "beta2:0": {"beta1": 0.5, "beta2": 0.0, "eps": 0.0},
    "rate:0": {"lr": 0.0},
    "scale": {"scale": 1024.0},
    "scale-clip": {"scale": 512.0, "clip": 0.25, "found_inf": 0.0},
    "found-inf": {"scale": 1024.0, "found_inf": 1.0, "low": torch.bfloat16},
    "low-bf16": {"low": torch.bfloat16},
    "low-fp16": {"low": torch.float16, "clip": 0.5},
    "small": {"grad_scale": 2.0**-12},
}


def step_calls(
    step: Callable[..., Arguments], table: Mapping[str, Mapping[str, Any]]
) -> Iterator[Call]:
    """Those of a table, and those that every rule has."""
    for label, changes in table.items():
        yield Call(label, partial(step, **changes))
    yield Call("own-dtype", lambda draw: step(draw, param=draw.dtype))
    long = partial(step, shapes=LONG, scale=64.0, clip=0.5, low=torch.bfloat16)
    yield Call("long", long, full=True)


SGD_ATTRS: dict[str, Any] = {
    "momentum": 0.9, "nesterov": False, "weight_decay": 0.1, "decoupled": False,
}  # fmt: skip
_SGD: dict[str, dict[str, Any]] = {
    "plain": {"weight_decay": 0.0, "momentum": 0.0},
    "momentum": {"weight_decay": 0.0},
    "nesterov": {"nesterov": True},
    "rate:0": {"lr": 0.0},
    # A large decay tells one of the gradient from one of the parameter, with and without momentum.
    "decay": {"weight_decay": 3.0, "lr": 0.1},
    "decay-plain": {"weight_decay": 3.0, "lr": 0.1, "momentum": 0.0},
    "decoupled": {"weight_decay": 3.0, "lr": 0.1, "decoupled": True},
    "scale": {"scale": 1024.0},
    "scale-clip": {"scale": 512.0, "clip": 0.3, "found_inf": 0.0, "nesterov": True},
    "found-inf": {"scale": 1024.0, "found_inf": 1.0, "low": torch.bfloat16},
    "low-bf16": {"low": torch.bfloat16, "momentum": 0.0},
    "low-fp16": {"low": torch.float16, "clip": 0.5},
}
LION_ATTRS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
_LION: dict[str, dict[str, Any]] = {
    "plain": {},
    # The direction is of an average that forgets faster than the one that is kept.
    "betas": {"beta1": 0.3, "beta2": 0.95},
    "first": {"step": 0.0, "zero_moments": True},
    "rate:0": {"lr": 0.0},
    "no-decay": {"weight_decay": 0.0},
    "decay": {"weight_decay": 3.0, "lr": 0.1},
    "zero-gradient": {"grad_scale": 0.0, "weight_decay": 0.0},
    "scale": {"scale": 1024.0},
    "scale-clip": {"scale": 512.0, "clip": 0.3, "found_inf": 0.0},
    "found-inf": {"scale": 1024.0, "found_inf": 1.0, "low": torch.bfloat16},
    "low-bf16": {"low": torch.bfloat16},
    "low-fp16": {"low": torch.float16, "clip": 0.5},
}


def _short_step(
    draw: Draw, attrs: dict[str, Any], *, grad_scale: float = 1.0, **changes: Any
) -> Arguments:
    """A step of a rule that keeps one average, or none without momentum."""
    options = {key: changes.pop(key) for key in list(changes) if key not in attrs}
    args, _ = _step(draw, grad_scale=grad_scale, **options)
    attrs = {**attrs, **changes}
    return (*args[:2], args[2] if attrs.get("momentum", 1.0) else [], *args[4:]), attrs


L2_NORM = Oracle(forward=_l2_forward, calls=_l2_calls, lower_precision=("2", "17", "100"))
CLIP = Oracle(forward=_clip_forward, calls=_clip_calls, lower_precision=("norm:3",))
UNSCALE_AND_CHECK = Oracle(
    forward=_unscale_forward, calls=_unscale_calls, lower_precision=("scale:3",)
)
ADAMW = Oracle(
    forward=partial(in_lists, _adamw),
    calls=partial(step_calls, _step, ADAMW_STEPS),
    lower_precision=("plain", "late", "scale-clip"),
)
SGD = Oracle(
    forward=partial(in_lists, _sgd),
    calls=partial(step_calls, partial(_short_step, attrs=SGD_ATTRS), _SGD),
    lower_precision=("scale-clip", "nesterov"),
)
LION = Oracle(
    forward=partial(in_lists, _lion),
    calls=partial(step_calls, partial(_short_step, attrs=LION_ATTRS), _LION),
    lower_precision=("plain", "scale-clip"),
)
