"""Oracle of adamw_8bit: adamw's step of decoded averages, and nearest codes of what they become.

The numbers that codes stand for are listed one by one, in float64, and found again by bisection:
nothing of the operator's arithmetic is used. Where the error of an average, or of its scale, can
carry a quotient over the middle between two numbers, the code on either side is right. Source:
Dettmers et al. 2022, arXiv:2110.02861, section 2; the numbers: :mod:`anychip.operators.adamw_8bit`.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anychip.conformance.arithmetic import UNIT, Rounded, joined, parts
from anychip.conformance.calls import Arguments, Draw
from anychip.conformance.formats import Array
from anychip.conformance.oracles import quantization, update
from anychip.conformance.oracles.oracle import Oracle

BLOCK = 256
_Bytes = NDArray[np.uint8]


class _Form(NamedTuple):
    """The numbers of codes from 0 on, ascending; with a sign, the negative ones are 128 behind."""

    numbers: Array
    signed: bool


def _form(fraction_bits: int, *, signed: bool) -> _Form:
    digits = np.arange(2**fraction_bits) / 2.0**fraction_bits
    low = digits * 2.0**-14
    rest = [(1.0 + digits) * 2.0 ** (exponent - 15) for exponent in range(1, 16)]
    return _Form(np.concatenate([low, *rest]), signed)


_FIRST = _form(3, signed=True)
_SECOND = _form(4, signed=False)


def _decoded(codes: _Bytes, scales: Rounded, form: _Form) -> Rounded:
    sizes = codes.reshape(-1).astype(np.int64)
    if form.signed:
        values = form.numbers[sizes % 128] * np.where(sizes < 128, 1.0, -1.0)
    else:
        values = form.numbers[sizes]
    each = scales.shaped(lambda array: np.repeat(array, BLOCK)[: sizes.size])
    return (Rounded.exact(values) * each).reshape(*codes.shape)


def _nearest(steps: Array, form: _Form) -> Array:
    """Codes; halves to even."""
    middles = (form.numbers[1:] + form.numbers[:-1]) / 2.0
    sizes = np.abs(steps)
    found = np.searchsorted(middles, sizes)
    is_tie = (found < middles.size) & (middles[np.minimum(found, middles.size - 1)] == sizes)
    found = found + (is_tie & (found % 2 == 1))
    if form.signed:
        found = np.where((steps < 0.0) & (found > 0), found + 128, found)
    else:
        found = np.where(steps > 0.0, np.maximum(found, 1), 0)
    return np.asarray(found, dtype=np.float64)


def _coded(tensors: Sequence[Rounded], form: _Form) -> tuple[list[Rounded], list[Rounded]]:
    """Codes and scales of each tensor, whose blocks are its own."""
    blocks = [0, *itertools.accumulate(-(-t.value.size // BLOCK) for t in tensors)]
    spans = zip(blocks, tensors, strict=False)
    places = np.concatenate([BLOCK * first + np.arange(t.value.size) for first, t in spans])

    def in_blocks(flat: Array) -> Array:
        found = np.zeros(BLOCK * blocks[-1])
        found[places] = flat
        return found.reshape(-1, BLOCK)

    rows = joined(tensors).shaped(in_blocks)
    scales = quantization._scales(rows, float(form.numbers[-1]))
    divisor, usable = quantization._divisor(scales)
    steps = rows / divisor
    value = np.where(usable, steps.value, 0.0)
    # A square of 0, of an average of 0, has no error: its code is 0, and not the smallest one.
    has_error = usable & (form.signed | (value != 0.0))
    error = np.where(has_error, steps.worst, 0.0) * UNIT
    low, mid, high = (_nearest(value + shift, form) for shift in (-error, 0.0, error))
    size = np.maximum(np.abs(high - mid), np.abs(mid - low)) / UNIT
    codes = Rounded(mid, size, size).shaped(lambda array: array.reshape(-1)[places])
    return parts(codes, tensors), [scales[a:b] for a, b in itertools.pairwise(blocks)]


def _forward(*args: Any, **attrs: Any) -> tuple[Rounded, ...]:
    params, grads, exp_avgs, exp_avg_scales, exp_avg_sqs, exp_avg_sq_scales, *scalars = args
    _, step, *_, found_inf, low_precision = scalars
    if found_inf is not None and found_inf.value != 0.0:
        firsts, seconds = (
            [Rounded.exact(codes.astype(np.float64)) for codes in given]
            for given in (exp_avgs, exp_avg_sqs)
        )
        states = (*firsts, *exp_avg_scales, *seconds, *exp_avg_sq_scales)
        return (*params, *states, step, *(low_precision or ()))
    firsts, seconds = (
        [_decoded(codes, scales, form) for codes, scales in zip(*given, strict=True)]
        for form, given in (
            (_FIRST, (exp_avgs, exp_avg_scales)),
            (_SECOND, (exp_avg_sqs, exp_avg_sq_scales)),
        )
    )
    results = update.in_lists(update._adamw, params, grads, firsts, seconds, *scalars, **attrs)
    count = len(params)
    states = ()
    for form, start in ((_FIRST, count), (_SECOND, 2 * count)):
        codes, scales = _coded(results[start : start + count], form)
        states += (*codes, *scales)
    return (*results[:count], *states, *results[3 * count :])


# Calls: those of adamw, with averages in codes


def _averages(tensors: Sequence[Tensor], form: _Form) -> tuple[list[Tensor], list[Tensor]]:
    codes, scales = _coded([Rounded.exact(t.double().numpy()) for t in tensors], form)
    return (
        [torch.from_numpy(each.value.astype(np.uint8)) for each in codes],
        [torch.from_numpy(each.value).float() for each in scales],
    )


def coded(make: Callable[[Draw], Arguments], draw: Draw) -> Arguments:
    """The arguments of adamw as adamw_8bit takes them."""
    (params, grads, firsts, seconds, *rest), attrs = make(draw)
    with np.errstate(all="ignore"):
        states = (*_averages(firsts, _FIRST), *_averages(seconds, _SECOND))
    return (params, grads, *states, *rest), attrs


ADAMW_8BIT = Oracle(forward=_forward)
