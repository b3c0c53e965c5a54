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
from tests.meta.wrong import Attr, Change, Wrong, wrong_arguments, wrong_row
from tests.meta.wrong_updates import digits_of


def wrong(
    name: str, bug: str, chapter: str, operator: str, select: str, direction: str = "forward"
) -> Callable[[Change], Wrong]:
    """As wrong_row, with one twin for all."""
    wrap = wrong_row(
        name, bug, chapter=chapter, operator=operator, direction=direction, select=select
    )
    return lambda change: replace(wrap(change), twin=HonestRows)


def wrong_values(
    name: str, bug: str, chapter: str, operator: str, select: str, **how: Any
) -> Wrong:
    """As wrong_arguments, with one twin for all."""
    wrong = wrong_arguments(name, bug, operator, chapter=chapter, select=select, **how)
    return replace(wrong, twin=HonestRows)


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


def _one_step_on(row: Row, *args: Any, **attrs: Attr) -> Any:
    step = args[5] + 1.0
    row(*args[:5], step, *args[6:], **attrs)
    args[5].copy_(step - 1.0)


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


@wrong("norm-of-what-is-here", "hidden state", "zero", "sums_of_squares",
       "zero/2/adamw")  # fmt: skip
def local_norm(row: Row, tensors: Any) -> Any:
    # An empty part is taken for the end of the list.
    found = row(tensors)
    empty = [index for index, tensor in enumerate(tensors) if not tensor.numel()]
    found[empty[0] if empty else len(tensors) :] = 0
    return found


@wrong("sum-of-a-part-in-16-bits", "bits that depend on the cut", "zero", "sums_of_squares",
       "zero/2/adamw")  # fmt: skip
def rounded_parts(row: Row, tensors: Any) -> Any:
    return digits_of([float(t.float().square().sum().bfloat16()) for t in tensors])


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


@wrong("slope-of-the-sigmoid", "derivative of another form", "training", "gelu", "momentum",
       "backward")  # fmt: skip
def sigmoid_slope(row: Row, grad: Tensor, x: Tensor, **attrs: Attr) -> Any:
    sigmoid = torch.sigmoid(1.702 * x)
    return (grad * (sigmoid + 1.702 * x * sigmoid * (1.0 - sigmoid)),)


ARGUMENTS = (
    wrong_values("clip-of-some-only", "one of a list forgotten", "optimizer", "lion", "lion/clip",
        grads=lambda grads, clip: grads if clip is None else [*grads[:-1], grads[-1] / clip]),
    wrong_values("decay-of-the-first-group", "an attribute compiled in", "optimizer", "adamw",
        "adamw/plain", weight_decay=lambda weight_decay:
        _Kept.decays.setdefault("adamw", weight_decay)),
    wrong_values("rate-of-the-first-group", "stale operand", "optimizer", "lamb", "lamb/plain",
        lr=lambda lr, weight_decay: lr * 2.0 if weight_decay == 0.0 else lr),
    wrong_values("scale-left-in", "an argument without effect", "optimizer", "sgd", "sgd/scaled",
        scale=None),
    wrong_values("overflow-not-seen", "loss scale that never backs off", "optimizer",
        "unscale_and_check", "loss-scale", found_inf=lambda found_inf: found_inf.clone().zero_()),
    wrong_values("trust-of-the-shard", "norm of a part in place of the whole", "zero", "lamb",
        "zero/1/lamb", trust=None),
    wrong_values("gradient-too-large-by-1e-5", "a small bias", "training", "linear", "momentum",
        direction="backward", dweight=lambda dweight: dweight * (1.0 + 1e-5)),
    wrong_values("one-layer-without-gradient", "gradient dropped", "training", "linear", "momentum",
        direction="backward", dweight=lambda dweight:
        dweight * float(dweight.shape[0] != 4 * dweight.shape[1])),
    wrong_values("probabilities-in-bf16", "lower precision of an intermediate result", "training",
        "cross_entropy", "adamw", direction="backward",
        dlogits=lambda dlogits: dlogits.bfloat16().float()),
    wrong_values("repeated-token-averaged", "mean for a sum", "training", "embedding", "momentum",
        direction="backward", dweight=lambda dweight, indices: dweight / torch.bincount(
            indices.reshape(-1), minlength=len(dweight)).clamp(min=1).unsqueeze(-1)),
    wrong("correction-from-zero", "bias correction step off by one", "optimizer", "lamb",
        "lamb/plain")(_one_step_on),
    wrong("correction-off-by-one", "bias correction step off by one", "training", "adamw",
        "adamw")(_one_step_on),
)  # fmt: skip
