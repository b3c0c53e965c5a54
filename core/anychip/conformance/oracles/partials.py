"""Oracles of what is summed by blocks: l2_norm_partials; lamb_partials and lamb, which need it.

A partial is a sum of at most ``block`` squares, in any order; a block that the call does not hold
is exactly 0. lamb: You et al. 2019, algorithm 2, with phi the identity: the trust ratio is one
number per tensor, 1 where one of the norms is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded, concatenate, power, sqrt
from anychip.conformance.calls import Arguments, Call, Draw, in_layouts
from anychip.conformance.formats import Array
from anychip.conformance.oracles import update
from anychip.conformance.oracles.oracle import Oracle
from anychip.conformance.oracles.update import LONG, in_lists, scaled


def _partials(
    tensors: Sequence[Rounded],
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Rounded:
    found = []
    for index, tensor in enumerate(tensors):
        start = 0 if offsets is None else offsets[index]
        size = start + tensor.value.size if sizes is None else sizes[index]
        # The whole tensor, 0 but for the shard, cut into rows.
        room = -(-size // block) * block
        after = room - start - tensor.value.size

        def rows(array: Array, start: int = start, after: int = after) -> Array:
            return np.pad(array.reshape(-1), (start, after)).reshape(-1, block)

        whole = tensor.shaped(rows)
        sums = (whole * whole).sum(1)
        held = ((np.arange(room) >= start) & (np.arange(room) < room - after)).reshape(-1, block)
        absent = ~held.any(1)
        worst, spread = np.where(absent, 0.0, sums.worst), np.where(absent, 0.0, sums.spread)
        found.append(Rounded(sums.value, worst, spread))
    return concatenate(found, 0)


def _norm_forward(
    tensors: Sequence[Rounded],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> tuple[Rounded]:
    return (_partials(tensors, offsets, sizes, block),)


def _moved(
    p: Rounded, g: Rounded, m: Rounded, v: Rounded, count: Rounded, attrs: dict[str, float]
) -> tuple[Rounded, Rounded, Rounded]:
    beta1, beta2 = attrs["beta1"], attrs["beta2"]
    first = beta1 * m + (1.0 - beta1) * g
    second = beta2 * v + (1.0 - beta2) * (g * g)
    corrected = first / (1.0 - power(Rounded.constant(beta1), count))
    root = sqrt(second / (1.0 - power(Rounded.constant(beta2), count)))
    return first, second, corrected / (root + attrs["eps"]) + attrs["weight_decay"] * p


def _lamb_partials_forward(*args: Any, **attrs: Any) -> tuple[Rounded]:
    *lists, step, scale, clip = args
    grid = [attrs[name] for name in ("offsets", "sizes", "block")]
    count, given = Rounded.exact(step.value + 1.0), zip(*lists, strict=True)
    steps = [_moved(p, scaled(g, scale, clip), m, v, count, attrs)[2] for p, g, m, v in given]
    both = [_partials(tensors, *grid) for tensors in (lists[0], steps)]
    return (concatenate([row.reshape(1, -1) for row in both], 0),)


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


def _flat(draw: Draw, numels: Sequence[int], scale: float = 1.0, **attrs: Any) -> Arguments:
    attrs = {"offsets": None, "sizes": None, "block": 16, **attrs}
    return ([draw.normal(size, scale=scale) for size in numels],), attrs


def _of_scale(draw: Draw, name: str) -> Arguments:
    return _flat(draw, (1500,), scale=getattr(draw, name))


def _two_dims(draw: Draw) -> Arguments:
    return ([draw.normal(5, 7), draw.normal(33), draw.normal(40, 40)],), _flat(draw, ())[1]


def _special(draw: Draw) -> Arguments:
    args, attrs = _flat(draw, (40, 40))
    args[0][0][3], args[0][1][39] = torch.inf, torch.nan
    return args, attrs


def _norm_calls() -> Iterator[Call]:
    for size in (0, 1, 15, 16, 17, 257, 2048):
        yield Call(str(size), partial(_flat, numels=(size,)))
    for block in (1, 2, 64, 1024):
        yield Call(f"list.block:{block}", partial(_flat, numels=(1030, 7, 2048), block=block))
    # Ranges of blocks: from the middle, from the start, to the end, nothing at all.
    shards: dict[str, Any] = {"offsets": [32, 0, 48, 64, 0], "sizes": [100, 64, 53, 200, 30]}
    yield Call("shards", partial(_flat, numels=(32, 48, 5, 0, 0), **shards))
    for name in ("huge", "tiny"):
        yield Call(name, partial(_of_scale, name=name))
    yield from in_layouts("list", _two_dims)
    yield Call("special", _special, statistical=False)
    yield Call("1500001", partial(_flat, numels=(1_500_001,), block=1024), full=True)
    yield Call("300001.block:262144", partial(_flat, numels=(300_001, 5), block=1 << 18), full=True)


_SAME = "plain first step:255 step:4098 step:65535 late no-decay eps betas".split()
_STEPS: dict[str, dict[str, Any]] = {
    **{label: update._ADAMW[label] for label in _SAME},
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


def _read_only(draw: Draw, grid: dict[str, Any] | None = None, **changes: Any) -> Arguments:
    """The same step, for the operator that only measures it."""
    args, attrs = _step(draw, **changes)
    grid = {"offsets": None, "sizes": None, "block": 16} if grid is None else grid
    return (*args[:4], *args[5:8]), {**attrs, **grid}


def _lamb_calls() -> Iterator[Call]:
    yield from update.step_calls(_step, _STEPS | _WRITES)
    yield Call("long.trust", partial(_step, shapes=LONG, trust=(0.5, 2.0, 3.0)), full=True)


def _lamb_partials_calls() -> Iterator[Call]:
    for label, changes in _STEPS.items():
        yield Call(label, partial(_read_only, **changes))
    offsets = [16, 32, 0, 0, 64, 16, 0]
    sizes = [36, 49, 1, 16, 1064, 205, 1]
    grid = {"offsets": offsets, "sizes": sizes, "block": 16}
    yield Call("shards", partial(_read_only, grid=grid))
    yield Call("own-dtype", lambda draw: _read_only(draw, param=draw.dtype))
    yield from in_layouts("plain", _read_only)
    for block in (1024, 1 << 18):
        long = {"offsets": None, "sizes": None, "block": block}
        yield Call(f"long.block:{block}", partial(_read_only, grid=long, shapes=LONG), full=True)


L2_NORM_PARTIALS = Oracle(
    forward=_norm_forward, calls=_norm_calls, lower_precision=("list.block:1", "2048")
)
LAMB_PARTIALS = Oracle(
    forward=_lamb_partials_forward, calls=_lamb_partials_calls, lower_precision=("plain", "betas")
)
LAMB = Oracle(forward=_lamb_forward, calls=_lamb_calls, lower_precision=("plain", "scale-clip"))
