"""Wrong backends for the chapters about training: optimizer, zero, pipeline, training.

Bugs that single calls do not show, or hardly: state between calls, results that depend on how a
tensor is cut, small biases.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import HonestRows, Row
from tests.meta.wrong import Change, Wrong, wrong_row

Attr = Any


def wrong(
    name: str, bug: str, chapter: str, operator: str, select: str, direction: str = "forward"
) -> Callable[[Change], Wrong]:
    """As wrong_row, with one twin for all."""
    wrap = wrong_row(
        name, bug, chapter=chapter, operator=operator, direction=direction, select=select
    )
    return lambda change: replace(wrap(change), twin=HonestRows)


# Optimizer


@wrong("count-kept-by-the-row", "hidden state", "optimizer", "adamw", "adamw/absent")
def own_count(row: Row, *args: Any, **attrs: Attr) -> Any:
    # Parameters that missed a gradient have a step count of their own.
    step = args[5]
    _Kept.count = max(_Kept.count, float(step)) if float(step) else 0.0
    row(*args[:5], torch.tensor(_Kept.count), *args[6:], **attrs)
    step.add_(1.0)


class _Kept:
    count = 0.0
    rates: dict[int, float] = {}  # noqa: RUF012
    rooms: dict[tuple[int, ...], Tensor] = {}  # noqa: RUF012
    x: Tensor | None = None
    moments: dict[int, Any] = {}  # noqa: RUF012
    decays: dict[str, float] = {}  # noqa: RUF012
    weights: dict[Any, Any] = {}  # noqa: RUF012
    flag = 0.0
    calls = 0


@wrong("rate-read-once", "stale operand", "optimizer", "sgd", "momentum/schedule")
def first_rate(row: Row, params: Any, grads: Any, buffers: Any, lr: Tensor, *rest: Any,
               **attrs: Attr) -> Any:  # fmt: skip
    if not float(rest[0]):
        _Kept.rates[len(params)] = float(lr)
    row(params, grads, buffers, torch.tensor(_Kept.rates[len(params)]), *rest, **attrs)


@wrong("moments-in-bf16", "lower precision of the state", "optimizer", "adamw", "adamw/plain")
def narrow_moments(row: Row, *args: Any, **attrs: Attr) -> Any:
    row(*args, **attrs)
    for moment in (*args[2], *args[3]):
        moment.copy_(moment.bfloat16())


@wrong("correction-from-zero", "bias correction step off by one", "optimizer", "lamb", "lamb/plain")
def late_correction(row: Row, *args: Any, **attrs: Attr) -> Any:
    step = args[5] + 1.0
    row(*args[:5], step, *args[6:], **attrs)
    args[5].copy_(step - 1.0)


@wrong("clip-of-some-only", "one of a list forgotten", "optimizer", "lion", "lion/clip")
def clips_some(row: Row, params: Any, grads: Any, moments: Any, lr: Any, step: Any, scale: Any,
               clip: Any, *rest: Any, **attrs: Attr) -> Any:  # fmt: skip
    if clip is not None:
        grads = [*grads[:-1], grads[-1] / clip]
    row(params, grads, moments, lr, step, scale, clip, *rest, **attrs)


@wrong("skip-decays-anyway", "a flag that is not looked at everywhere", "optimizer", "adamw",
       "adamw/found-inf")  # fmt: skip
def decays(row: Row, *args: Any, weight_decay: float, **attrs: Attr) -> Any:
    row(*args, weight_decay=weight_decay, **attrs)
    if args[8] is not None and float(args[8]):
        for param in args[0]:
            param.mul_(1.0 - float(args[4]) * weight_decay)


@wrong("moments-of-the-library", "hidden state", "optimizer", "lion", "lion/resumed")
def own_moments(row: Row, params: Any, grads: Any, moments: Any, *rest: Any, **attrs: Attr) -> Any:
    # The library's optimizer has its own, from 0; what it is given is only written.
    kept = _Kept.moments.setdefault(params[0].data_ptr(), [torch.zeros_like(m) for m in moments])
    row(params, grads, kept, *rest, **attrs)
    for moment, own in zip(moments, kept, strict=True):
        moment.copy_(own)


@wrong("decay-of-the-first-group", "an attribute compiled in", "optimizer", "adamw", "adamw/plain")
def first_decay(row: Row, *args: Any, weight_decay: float, **attrs: Attr) -> Any:
    row(*args, weight_decay=_Kept.decays.setdefault("adamw", weight_decay), **attrs)


@wrong("rate-of-the-first-group", "stale operand", "optimizer", "lamb", "lamb/plain")
def first_group_rate(row: Row, *args: Any, **attrs: Attr) -> Any:
    larger = args[4] * 2.0 if attrs["weight_decay"] == 0.0 else args[4]
    row(*args[:4], larger, *args[5:], **attrs)


@wrong("scale-left-in", "an argument without effect", "optimizer", "sgd", "sgd/scaled")
def keeps_scale(row: Row, params: Any, grads: Any, buffers: Any, lr: Any, step: Any, scale: Any,
                *rest: Any, **attrs: Attr) -> Any:  # fmt: skip
    row(params, grads, buffers, lr, step, None, *rest, **attrs)


@wrong("overflow-not-seen", "loss scale that never backs off", "optimizer", "unscale_and_check",
       "loss-scale")  # fmt: skip
def never_backs_off(row: Row, grads: Any, scale: Tensor, found_inf: Tensor) -> Any:
    row(grads, scale, torch.zeros_like(found_inf))


@wrong("overflow-for-ever", "loss scale that never grows", "optimizer", "unscale_and_check",
       "loss-scale")  # fmt: skip
def never_grows(row: Row, grads: Any, scale: Tensor, found_inf: Tensor) -> Any:
    row(grads, scale, found_inf)
    _Kept.flag = max(_Kept.flag, float(found_inf))
    found_inf.fill_(_Kept.flag)


@wrong("minus-infinity-not-seen", "half of a condition", "optimizer", "unscale_and_check",
       "loss-scale")  # fmt: skip
def one_side(row: Row, grads: Any, scale: Tensor, found_inf: Tensor) -> Any:
    before = float(found_inf)
    row(grads, scale, found_inf)
    if not before and not any(bool((g.isnan() | (g == torch.inf)).any()) for g in grads):
        found_inf.zero_()


# ZeRO


@wrong("tail-rounded-otherwise", "bits that depend on the cut", "zero", "adamw", "zero/1/adamw")
def other_tail(row: Row, params: Any, *rest: Any, **attrs: Attr) -> Any:
    row(params, *rest, **attrs)
    for param in params:
        # Blocks of 2048 elements are written by one path, the rest by one that rounds up.
        rest_of_it = param.view(-1)[param.numel() // 2048 * 2048 :]
        rest_of_it.copy_(torch.nextafter(rest_of_it, torch.full_like(rest_of_it, torch.inf)))


@wrong("norm-of-what-is-here", "an attribute without effect", "zero", "l2_norm_partials",
       "zero/2/adamw")  # fmt: skip
def local_norm(row: Row, tensors: Any, *, offsets: Any, sizes: Any, block: int) -> Any:
    found = row(tensors, offsets=offsets, sizes=sizes, block=block)
    return found * (2.0 if any(offsets or ()) else 1.0)


@wrong("trust-of-the-shard", "norm of a part in place of the whole", "zero", "lamb", "zero/1/lamb")
def shard_trust(row: Row, *args: Any, **attrs: Attr) -> Any:
    row(*args[:10], None, **attrs)


@wrong("partials-of-whole-tensors", "bits that depend on the cut", "zero", "l2_norm_partials",
       "zero/2/adamw")  # fmt: skip
def one_partial(row: Row, tensors: Any, *, offsets: Any, sizes: Any, block: int) -> Any:
    found = row(tensors, offsets=offsets, sizes=sizes, block=block)
    start = 0
    for index, tensor in enumerate(tensors):
        size = tensor.numel() if sizes is None else sizes[index]
        count = -(-size // block)
        if count:
            total = found[start : start + count].sum()
            found[start : start + count] = 0.0
            found[start] = total
        start += count
    return found


@wrong("step-of-the-shard", "hidden state", "zero", "lamb", "zero/1/lamb")
def shard_step(row: Row, *args: Any, **attrs: Attr) -> Any:
    # Empty parts are no call for the library, whose own count then is behind.
    _Kept.calls += 1
    if any(p.numel() == 0 for p in args[0]) and _Kept.calls % 2:
        return
    row(*args, **attrs)


# Pipeline


@wrong("statistics-in-one-room", "residual that is not fresh", "pipeline", "layer_norm",
       "gradients")  # fmt: skip
def one_room(row: Row, x: Tensor, *rest: Any, **attrs: Attr) -> Any:
    y, mean, rstd = row(x, *rest, **attrs)
    shared = _Kept.rooms.setdefault((*rstd.shape, -1), torch.empty_like(rstd))
    return y, mean, shared.copy_(rstd)


@wrong("first-in-first-out", "hidden state", "pipeline", "layer_norm", "gradients", "backward")
def queue_of_statistics(row: Row, grad: Tensor, x: Tensor, *rest: Any, **attrs: Attr) -> Any:
    kept = _Kept.weights.setdefault(("x", tuple(x.shape)), [])
    kept.append(x)
    return row(grad, kept.pop(0) if len(kept) > 3 else x, *rest, **attrs)


@wrong("residual-in-the-row", "hidden state", "pipeline", "gelu", "gradients", "backward")
def last_x(row: Row, grad: Tensor, x: Tensor, **attrs: Attr) -> Any:
    # What one forward has saved is kept in one place: right as long as backward follows at once.
    kept, _Kept.x = _Kept.x, x
    same = kept is not None and kept.shape == x.shape and float((kept - x).abs().max()) > 0.0
    return row(grad, kept if same and kept is not None else x, **attrs)


@wrong("output-in-one-buffer", "output that is not fresh", "pipeline", "gelu", "gradients")
def one_buffer(row: Row, x: Tensor, **attrs: Attr) -> Any:
    # Right as long as the next call comes after backward.
    y = row(x, **attrs)
    room = _Kept.rooms.setdefault(tuple(y.shape), torch.empty_like(y))
    return room.copy_(y)


# Training


@wrong("gradient-too-large-by-1e-5", "a small bias", "training", "linear", "momentum", "backward")
def biased(row: Row, *args: Any, **attrs: Attr) -> Any:
    dx, dweight, dbias = row(*args, **attrs)
    return dx, (None if dweight is None else dweight * (1.0 + 1e-5)), dbias


@wrong("one-layer-without-gradient", "gradient dropped", "training", "linear", "momentum",
       "backward")  # fmt: skip
def dropped(row: Row, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any, **attrs: Attr) -> Any:
    dx, dweight, dbias = row(grad, x, weight, *rest, **attrs)
    if dweight is not None and weight.shape[0] == 4 * weight.shape[1]:
        dweight = torch.zeros_like(dweight)
    return dx, dweight, dbias


@wrong("correction-off-by-one", "bias correction step off by one", "training", "adamw", "adamw")
def early_correction(row: Row, *args: Any, **attrs: Attr) -> Any:
    step = args[5] + 1.0
    row(*args[:5], step, *args[6:], **attrs)
    args[5].copy_(step - 1.0)


@wrong("probabilities-in-bf16", "lower precision of an intermediate result", "training",
       "cross_entropy", "adamw", "backward")  # fmt: skip
def coarse(row: Row, *args: Any, **attrs: Attr) -> Any:
    (dlogits,) = row(*args, **attrs)
    return (dlogits.bfloat16().float(),)


@wrong("update-lost-now-and-then", "a race", "training", "sgd", "momentum")
def loses_update(row: Row, *args: Any, **attrs: Attr) -> Any:
    _Kept.calls += 1
    if _Kept.calls % 97:
        row(*args, **attrs)


@wrong("element-lost-now-and-then", "a race", "training", "linear", "momentum")
def loses_element(row: Row, *args: Any, **attrs: Attr) -> Any:
    y = row(*args, **attrs)
    _Kept.calls += 1
    if _Kept.calls % 499 == 0:
        y.view(-1)[0] = 0.0
    return y


@wrong("rate-of-the-last-step", "stale operand", "training", "sgd", "momentum")
def last_rate(row: Row, params: Any, grads: Any, buffers: Any, lr: Tensor, *rest: Any,
              **attrs: Attr) -> Any:  # fmt: skip
    before = _Kept.rates.get(-1, float(lr)) if float(rest[0]) else float(lr)
    _Kept.rates[-1] = float(lr)
    row(params, grads, buffers, torch.tensor(before), *rest, **attrs)


@wrong("weights-one-step-late", "cache by address", "training", "linear", "momentum")
def late_weights(row: Row, x: Tensor, weight: Tensor, bias: Tensor | None, **attrs: Attr) -> Any:
    key = ("late", weight.data_ptr())
    used, _Kept.weights[key] = _Kept.weights.get(key, weight), weight.detach().clone()
    return row(x, used.view(weight.shape), bias, **attrs)


@wrong("repeated-token-averaged", "mean for a sum", "training", "embedding", "momentum",
       "backward")  # fmt: skip
def averaged(row: Row, grad: Tensor, indices: Tensor, weight: Tensor, **attrs: Attr) -> Any:
    (dweight,) = row(grad, indices, weight, **attrs)
    counts = torch.bincount(indices.reshape(-1), minlength=weight.shape[0]).clamp(min=1)
    return (dweight / counts.unsqueeze(-1),)


@wrong("slope-of-the-sigmoid", "derivative of another form", "training", "gelu", "momentum",
       "backward")  # fmt: skip
def sigmoid_slope(row: Row, grad: Tensor, x: Tensor, **attrs: Attr) -> Any:
    sigmoid = torch.sigmoid(1.702 * x)
    return (grad * (sigmoid + 1.702 * x * sigmoid * (1.0 - sigmoid)),)
