"""Wrong backends whose mistake is in an update rule over lists, or in the norms that one needs."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anychip.operators.adamw_8bit import SIGNED, UNSIGNED
from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong, wrong_arguments

_SEEN: set[bytes] = set()


@wrong("written-beyond-when-called-again", "a tail of the call before", operator="sgd")
def beyond(row: Row, params: Any, grads: Any, *rest: Any, **attrs: Attr) -> Any:
    """Of gradients that have been there, the element behind the last parameter is written too."""
    key = b"".join(g.float().contiguous().numpy().tobytes() for g in grads)
    row(params, grads, *rest, **attrs)
    last = params[-1] if params else torch.empty(0)
    if key in _SEEN and last.numel() and last.is_contiguous():
        last.as_strided((1,), (1,), last.storage_offset() + last.numel()).zero_()
    _SEEN.add(key)


@wrong("sgd-buffer-written-on-skip", "a flag that is not looked at everywhere", operator="sgd")
def writes_buffer(
    row: Row, params: Any, grads: Any, buffers: Any, *rest: Any, **attrs: Attr
) -> Any:
    row(params, grads, buffers, *rest, **attrs)
    if rest[4] is not None and float(rest[4]):
        for buffer, grad in zip(buffers, grads, strict=False):
            buffer.copy_(grad)


@wrong("lion-zero-is-positive", "sign of zero", operator="lion")
def positive_zero(row: Row, params: Any, grads: Any, moments: Any, lr: Tensor, *rest: Any,
                  **attrs: Attr) -> Any:  # fmt: skip
    still = [(g == 0.0) & (m == 0.0) for g, m in zip(grads, moments, strict=True)]
    skipped = rest[3] is not None and float(rest[3])
    row(params, grads, moments, lr, *rest, **attrs)
    for param, mask in zip(params, still, strict=True):
        param.sub_(torch.where(mask, 0.0 if skipped else lr, 0.0))


@wrong("trust-of-zero-is-zero", "a special case forgotten", operator="lamb")
def zero_trust(row: Row, *args: Any, **attrs: Attr) -> Any:
    empty = [float(p.norm()) == 0.0 for p in args[0]]
    if args[10] is None and any(empty):
        before = [p.clone() for p in args[0]]
        row(*args, **attrs)
        for param, old, is_empty in zip(args[0], before, empty, strict=True):
            param.copy_(old if is_empty else param)
        return
    row(*args, **attrs)


@wrong("decay-outside-of-direction", "a term at the wrong place", operator="lamb")
def decay_outside(row: Row, *args: Any, weight_decay: float, **attrs: Attr) -> Any:
    found_inf = args[8]
    if found_inf is None or not float(found_inf):
        for param in args[0]:
            param.mul_(1.0 - float(args[4]) * weight_decay)
    row(*args, weight_decay=0.0, **attrs)


exact = partial(wrong, operator="sums_of_squares", select="/sums_of_squares/")


def digits_of(totals: Sequence[float]) -> Tensor:
    """Rows of sums that are float64 numbers."""
    whole = [int(math.ldexp(total, 298)) if math.isfinite(total) else 0 for total in totals]
    return torch.tensor(
        [[*((w >> 32 * place) & 0xFFFFFFFF for place in range(19)), 0, 0] for w in whole]
    )


@exact("squares-added-in-float32", "an accumulator too narrow")
def narrow_sum(row: Row, tensors: Sequence[Tensor]) -> Any:
    return digits_of([float(t.float().square().sum()) for t in tensors])


@exact("squares-added-in-their-order", "bits that depend on the order")
def ordered_sum(row: Row, tensors: Sequence[Tensor]) -> Any:
    return digits_of([sum(v * v for v in t.reshape(-1).tolist()) for t in tensors])


@exact("lowest-bin-dropped", "small terms beside large ones lost")
def two_bins(row: Row, tensors: Sequence[Tensor]) -> Any:
    found = row(tensors)
    places = torch.arange(19)
    top = torch.where(found[:, :19] != 0, places, 0).amax(1, keepdim=True)
    found[:, :19][places < top - 2] = 0
    return found


@exact("subnormals-count-as-zero", "subnormal numbers")
def flushed_squares(row: Row, tensors: Sequence[Tensor]) -> Any:
    return row([torch.where(t.abs() < 2.0**-126, 0.0, t) for t in tensors])


@exact("tail-of-a-tile-dropped", "dropped tail")
def no_tail(row: Row, tensors: Sequence[Tensor]) -> Any:
    flat = [t.reshape(-1) for t in tensors]
    return row([t[: len(t) // 4096 * 4096] if len(t) > 4096 else t for t in flat])


@exact("one-sum-of-the-list", "wrong reduction length")
def one_row(row: Row, tensors: Sequence[Tensor]) -> Any:
    found = row(tensors)
    found[0], found[1:] = row([torch.cat([t.reshape(-1).float() for t in tensors])])[0], 0
    return found


@exact("nan-counts-as-infinity", "Inf or NaN lost")
def one_special(row: Row, tensors: Sequence[Tensor]) -> Any:
    found = row(tensors)
    found[:, 19] += found[:, 20]
    found[:, 20] = 0
    return found


coded = partial(wrong, operator="adamw_8bit")


def _is_skipped(args: Sequence[Any]) -> bool:
    return args[10] is not None and bool(float(args[10]))


@coded("small-square-becomes-0", "underflow", select="adamw_8bit/fp32/far-apart")
def small_squares(row: Row, *args: Any, **attrs: Attr) -> Any:
    row(*args, **attrs)
    for codes in () if _is_skipped(args) else args[4]:
        codes.copy_(torch.where(codes == 1, 0, codes))


@coded("moves-by-rounded-averages", "rounded too early", select="adamw_8bit/fp32/plain")
def rounded_averages(row: Row, *args: Any, **attrs: Attr) -> Any:
    before = [p.clone() for p in args[0]]
    row(*args, **attrs)
    beta1, beta2, rate, count = attrs["beta1"], attrs["beta2"], float(args[6]), float(args[7])
    for index, (param, old) in enumerate(zip(args[0], before, strict=True)):
        first = SIGNED.decode(args[2][index], args[3][index]) / (1.0 - beta1**count)
        second = UNSIGNED.decode(args[4][index], args[5][index]) / (1.0 - beta2**count)
        step = first / (second.sqrt() + attrs["eps"])
        param.copy_(old * (1.0 - rate * attrs["weight_decay"]) - rate * step)


@coded("scale-of-the-power-above", "off by one", select="adamw_8bit/fp32/plain")
def power_above(row: Row, *args: Any, **attrs: Attr) -> Any:
    row(*args, **attrs)
    for scales in args[5]:
        scales.mul_(1.9375 / 2.0)


@coded("codes-cleared-on-skip", "a flag that is not looked at everywhere",
       select="/adamw_8bit/design")  # fmt: skip
def cleared_codes(row: Row, *args: Any, **attrs: Attr) -> Any:
    row(*args, **attrs)
    for codes in args[2] if _is_skipped(args) else ():
        codes.zero_()


ARGUMENTS = (
    wrong_arguments("momentum-dampened", "another definition of a term", "sgd",
        grads=lambda grads, momentum: [g * (1.0 - momentum) for g in grads]),
    wrong_arguments("lion-found-inf-ignored", "a flag without effect", "lion", found_inf=None),
    wrong_arguments("trust-ratio-missing", "missing factor", "lamb",
        trust=lambda trust, params: torch.ones(len(params)) if trust is None else trust),
    wrong_arguments("trust-of-given-ignored", "an argument without effect", "lamb", trust=None),
    wrong_arguments("norms-before-the-step", "stale operand", "lamb_sums_of_squares",
        grads=lambda grads: [torch.zeros_like(g) for g in grads]),
    wrong_arguments("weights-unsquared-rows-swapped", "results swapped", "lamb_sums_of_squares",
        y=lambda y: y.flip(0)),
    wrong_arguments("nesterov-ignored", "an attribute without effect", "sgd", nesterov=False),
    wrong_arguments("sgd-decay-always-decoupled", "weight decay decoupled instead of coupled",
        "sgd", decoupled=True),
    wrong_arguments("lion-sign-of-kept-average", "the wrong one of two averages", "lion",
        beta1=lambda beta2: beta2),
)  # fmt: skip
