"""Update rules over lists of tensors: adamw, sgd, lion.

They write in place, return nothing, and read lr, step, scale, clip and found_inf from 0-dim tensors
on the device, so that no step waits for the host. Element by element: a shard is updated like the
whole. The rule that also needs norms of whole tensors is in :mod:`.lamb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists


def is_skipped(found_inf: Tensor | None, like: Tensor) -> Tensor:
    """0-dim bool: nothing may be written."""
    if found_inf is None:
        return torch.zeros((), dtype=torch.bool, device=like.device)
    return found_inf != 0


def scaled(grad: Tensor, scale: Tensor | None, clip: Tensor | None) -> Tensor:
    """The gradient in float32, without the loss scale, clipped."""
    grad = grad.float()
    if scale is not None:
        grad = grad / scale
    return grad if clip is None else grad * clip


def store(skip: Tensor, param: Tensor, new: Tensor, low: Tensor | None) -> None:
    """Writes the new parameter, and its low-precision copy, unless the step is skipped."""
    new = torch.where(skip, param, new.to(param.dtype))
    param.copy_(new)
    if low is not None:
        low.copy_(torch.where(skip, low, new.to(low.dtype)))


def check_fractions(**values: float) -> None:
    """Raises ValueError for a number that is not from 0 to below 1."""
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def sampled_scalars(maker: SampleMaker) -> Iterator[tuple[str, list[Tensor | None]]]:
    """Labels, with scale, clip and found_inf: the three situations of a step."""
    for label, options in (
        ("plain", (None, None, None)),
        ("scale,clip", (1024.0, 0.5, 0.0)),
        ("found_inf", (1024.0, None, 1.0)),
    ):
        yield label, [None if value is None else maker.scalar(value) for value in options]


def sampled_copies(params: Sequence[Tensor], label: str) -> list[Tensor] | None:
    """Low-precision copies for one of those situations."""
    return [p.to(torch.bfloat16) for p in params] if label == "scale,clip" else None


# adamw


def _adamw_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    skip = is_skipped(found_inf, lr)
    count = step + 1.0
    correction1 = 1.0 - torch.pow(beta1, count)
    correction2 = 1.0 - torch.pow(beta2, count)
    for index, param in enumerate(params):
        grad, exp_avg, exp_avg_sq = grads[index], exp_avgs[index], exp_avg_sqs[index]
        grad = scaled(grad, scale, clip)
        first = beta1 * exp_avg + (1.0 - beta1) * grad
        second = beta2 * exp_avg_sq + (1.0 - beta2) * grad.square()
        decayed = param.float() * (1.0 - lr * weight_decay)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        exp_avg.copy_(torch.where(skip, exp_avg, first))
        exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, second))
        low = low_precision[index] if low_precision else None
        store(skip, param, decayed - lr * update, low)
    step.copy_(torch.where(skip, step, count))


def _adamw_check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    lists.check_shapes("params", params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if low_precision:
        lists.check_shapes("params", params, low_precision=low_precision)
    lists.check_scalars(lr=lr, step=step, scale=scale, clip=clip, found_inf=found_inf)
    check_fractions(beta1=beta1, beta2=beta2)
    if eps < 0.0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def _adamw_samples(maker: SampleMaker) -> Iterator[Sample]:
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    for label, scalars in sampled_scalars(maker):
        params = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
        grads = [maker.normal(*shape) for shape in lists.SHAPES]
        moments = [maker.normal(*shape, scale=0.1, dtype=torch.float32) for shape in lists.SHAPES]
        squares = [maker.normal(*shape, dtype=torch.float32).square() for shape in lists.SHAPES]
        low = sampled_copies(params, label)
        lr, step = maker.scalar(1e-2), maker.scalar(3.0)
        yield Sample((params, grads, moments, squares, lr, step, *scalars, low), attrs, label)


_ADAMW_FLOAT32 = ("exp_avgs", "exp_avg_sqs", "lr", "step", "scale", "clip", "found_inf")

adamw = OperatorSpec(
    name="adamw",
    signature=(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
        "Tensor lr, Tensor(d!) step, Tensor? scale=None, Tensor? clip=None, "
        "Tensor? found_inf=None, Tensor(e!)[]? low_precision=None, *, float beta1=0.9, "
        "float beta2=0.999, float eps=1e-08, float weight_decay=0.01) -> ()"
    ),
    equation=(
        "unless found_inf: t = step = step + 1; g = g / scale * clip; p = p (1 - lr wd); "
        "m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; "
        "p = p - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps); low_precision = cast(p)"
    ),
    source="Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2",
    forward=_adamw_forward,
    fake=lambda *args, **attrs: None,
    check=_adamw_check,
    fixed_dtypes={name: "float32" for name in _ADAMW_FLOAT32},
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    reduction="elementwise",
    cost=lambda params, grads, m, v, *_, **__: Cost(
        2 * lists.nbytes(params, m, v) + lists.nbytes(grads), 15 * lists.numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "sqrt", "pow", "where", "copy_"}),
    samples=_adamw_samples,
    bound=Bound(forward=14, backward=0, length=lambda *_, **__: 1),
)


# sgd


def _sgd_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decoupled: bool,
) -> None:
    skip = is_skipped(found_inf, lr)
    for index, param in enumerate(params):
        wide, update = param.float(), scaled(grads[index], scale, clip)
        if decoupled:
            wide = wide * (1.0 - lr * weight_decay)
        else:
            update = update + weight_decay * wide
        if momentum:
            kept = momentum_buffers[index]
            buffer = momentum * kept + update
            update = update + momentum * buffer if nesterov else buffer
            kept.copy_(torch.where(skip, kept, buffer))
        low = low_precision[index] if low_precision else None
        store(skip, param, wide - lr * update, low)
    step.copy_(torch.where(skip, step, step + 1.0))


def _sgd_check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decoupled: bool,
) -> None:
    lists.check_shapes("params", params, grads=grads)
    if momentum:
        lists.check_shapes("params", params, momentum_buffers=momentum_buffers)
    elif momentum_buffers:
        raise ValueError(
            f"momentum_buffers must be empty when momentum is 0, got {len(momentum_buffers)}"
        )
    if low_precision:
        lists.check_shapes("params", params, low_precision=low_precision)
    lists.check_scalars(lr=lr, step=step, scale=scale, clip=clip, found_inf=found_inf)
    check_fractions(momentum=momentum)
    if nesterov and not momentum:
        raise ValueError("nesterov needs a momentum greater than 0, got 0.0")


def _sgd_samples(maker: SampleMaker) -> Iterator[Sample]:
    for label, scalars in sampled_scalars(maker):
        momentum = 0.9 if label != "found_inf" else 0.0
        params = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
        grads = [maker.normal(*shape) for shape in lists.SHAPES]
        buffers = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
        low, lr, step = sampled_copies(params, label), maker.scalar(1e-2), maker.scalar(3.0)
        attrs = {
            "momentum": momentum,
            "nesterov": label == "scale,clip",
            "weight_decay": 0.1,
            "decoupled": label == "plain",
        }
        args = (params, grads, buffers if momentum else [], lr, step, *scalars, low)
        yield Sample(args, attrs, label)


_SGD_FLOAT32 = ("momentum_buffers", "lr", "step", "scale", "clip", "found_inf")

sgd = OperatorSpec(
    name="sgd",
    signature=(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] momentum_buffers, Tensor lr, "
        "Tensor(c!) step, Tensor? scale=None, Tensor? clip=None, Tensor? found_inf=None, "
        "Tensor(d!)[]? low_precision=None, *, float momentum=0.0, bool nesterov=False, "
        "float weight_decay=0.0, bool decoupled=False) -> ()"
    ),
    equation=(
        "unless found_inf: step = step + 1; g = g / scale * clip; decoupled: p = p (1 - lr wd), "
        "else g = g + wd p; b = momentum b + g; u = g + momentum b if nesterov else b; "
        "p = p - lr u; low_precision = cast(p)"
    ),
    source="Sutskever et al. 2013, PMLR 28(3):1139, section 2; torch.optim.SGD, dampening 0",
    forward=_sgd_forward,
    fake=lambda *args, **attrs: None,
    check=_sgd_check,
    fixed_dtypes={name: "float32" for name in _SGD_FLOAT32},
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    reduction="elementwise",
    cost=lambda params, grads, buffers, *_, **__: Cost(
        2 * lists.nbytes(params, buffers) + lists.nbytes(grads), 6 * lists.numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "where", "copy_"}),
    samples=_sgd_samples,
    bound=Bound(forward=9, backward=0, length=lambda *_, **__: 1),
)


# lion


def _lion_forward(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    skip = is_skipped(found_inf, lr)
    for index, param in enumerate(params):
        grad, exp_avg = scaled(grads[index], scale, clip), exp_avgs[index]
        direction = torch.sign(beta1 * exp_avg + (1.0 - beta1) * grad)
        moved = beta2 * exp_avg + (1.0 - beta2) * grad
        exp_avg.copy_(torch.where(skip, exp_avg, moved))
        decayed = param.float() * (1.0 - lr * weight_decay)
        low = low_precision[index] if low_precision else None
        store(skip, param, decayed - lr * direction, low)
    step.copy_(torch.where(skip, step, step + 1.0))


def _lion_check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    lists.check_shapes("params", params, grads=grads, exp_avgs=exp_avgs)
    if low_precision:
        lists.check_shapes("params", params, low_precision=low_precision)
    lists.check_scalars(lr=lr, step=step, scale=scale, clip=clip, found_inf=found_inf)
    check_fractions(beta1=beta1, beta2=beta2)


def _lion_samples(maker: SampleMaker) -> Iterator[Sample]:
    attrs = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
    for label, scalars in sampled_scalars(maker):
        params = [maker.normal(*shape, dtype=torch.float32) for shape in lists.SHAPES]
        grads = [maker.normal(*shape) for shape in lists.SHAPES]
        moments = [maker.normal(*shape, scale=0.1, dtype=torch.float32) for shape in lists.SHAPES]
        low, lr, step = sampled_copies(params, label), maker.scalar(1e-2), maker.scalar(3.0)
        yield Sample((params, grads, moments, lr, step, *scalars, low), attrs, label)


lion = OperatorSpec(
    name="lion",
    signature=(
        "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor lr, Tensor(c!) step, "
        "Tensor? scale=None, Tensor? clip=None, Tensor? found_inf=None, "
        "Tensor(d!)[]? low_precision=None, *, float beta1=0.9, float beta2=0.99, "
        "float weight_decay=0.0) -> ()"
    ),
    equation=(
        "unless found_inf: step = step + 1; g = g / scale * clip; "
        "u = sign(b1 m + (1 - b1) g); m = b2 m + (1 - b2) g; "
        "p = p (1 - lr wd) - lr u; low_precision = cast(p)"
    ),
    source="Chen et al. 2023, arXiv:2302.06675, algorithm 2",
    forward=_lion_forward,
    fake=lambda *args, **attrs: None,
    check=_lion_check,
    fixed_dtypes={
        name: "float32" for name in ("exp_avgs", "lr", "step", "scale", "clip", "found_inf")
    },
    sizes=lambda params, *_, **__: {"numel": lists.numel(params), "tensors": len(params)},
    reduction="elementwise",
    cost=lambda params, grads, moments, *_, **__: Cost(
        2 * lists.nbytes(params, moments) + lists.nbytes(grads), 10 * lists.numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "sign", "where", "copy_"}),
    samples=_lion_samples,
    bound=Bound(forward=8, backward=0, length=lambda *_, **__: 1),
)
