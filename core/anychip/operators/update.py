"""What happens to lists of tensors between backward and the next step.

l2_norm, clip, unscale_and_check, adamw. They write in place, return nothing (l2_norm excepted), and
read lr, step, scale, clip and found_inf from 0-dim tensors on the device, so that no step waits for
the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker

CLIP_EPS = 1e-6
"""Added to the norm before the division, as in torch.nn.utils.clip_grad_norm_."""

_SHAPES = ((4, 5), (17,), (), (1000,))


def _nbytes(*lists: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for tensors in lists for t in tensors)


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)


def _check_scalars(**scalars: Tensor | None) -> None:
    for name, tensor in scalars.items():
        if tensor is not None and tensor.dim() != 0:
            raise ValueError(f"{name} must be a 0-dim tensor, got shape {tuple(tensor.shape)}")


def _check_shapes(first: str, tensors: Sequence[Tensor], **others: Sequence[Tensor]) -> None:
    for name, other in others.items():
        if len(other) != len(tensors):
            raise ValueError(
                f"{name} must be as long as {first} ({len(tensors)}), got {len(other)}"
            )
        for index, (a, b) in enumerate(zip(tensors, other, strict=True)):
            if a.shape != b.shape:
                raise ValueError(
                    f"{name}[{index}] must have the shape of {first}[{index}] {tuple(a.shape)}, "
                    f"got {tuple(b.shape)}"
                )


# l2_norm


def _l2_forward(tensors: Sequence[Tensor]) -> Tensor:
    if not tensors:
        raise ValueError("l2_norm: at least one tensor expected, got none")
    partial = [t.float().square().sum() for t in tensors]
    return torch.stack(partial).sum().sqrt()


def _l2_samples(maker: SampleMaker) -> Iterator[Sample]:
    yield Sample(([maker.normal(*shape) for shape in _SHAPES],), {}, "four tensors")
    yield Sample(([maker.normal(33, scale=1e-3)],), {}, "one tensor")


l2_norm = OperatorSpec(
    name="l2_norm",
    signature="(Tensor[] tensors) -> Tensor",
    equation="sqrt(sum over tensors and entries of t^2), float32",
    source="torch.nn.utils.get_total_norm",
    forward=_l2_forward,
    fake=lambda tensors: tensors[0].new_empty((), dtype=torch.float32),
    sizes=lambda tensors: {"numel": _numel(tensors)},
    reduction="sum_of_squares",
    cost=lambda tensors: Cost(_nbytes(tensors), 2 * _numel(tensors)),
    aten=frozenset({"square", "sum", "stack", "sqrt"}),
    samples=_l2_samples,
    bound=Bound(forward=3, backward=0, length=lambda tensors, **_: max(_numel(tensors), 1)),
)


# clip


def _clip_forward(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    coefficient = torch.clamp(max_norm / (norm + CLIP_EPS), max=1.0)
    for tensor in tensors:
        tensor.mul_(coefficient.to(tensor.dtype) if tensor.dtype == torch.float32 else coefficient)


def _clip_check(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    _check_scalars(norm=norm)
    if not max_norm > 0.0:
        raise ValueError(f"max_norm must be greater than 0, got {max_norm}")


def _clip_samples(maker: SampleMaker) -> Iterator[Sample]:
    for norm in (0.5, 4.0):
        tensors = [maker.normal(*shape) for shape in _SHAPES]
        yield Sample((tensors, maker.scalar(norm)), {"max_norm": 1.0}, f"norm={norm}")


clip = OperatorSpec(
    name="clip",
    signature="(Tensor(a!)[] tensors, Tensor norm, *, float max_norm=1.0) -> ()",
    equation="t = t * min(1, max_norm / (norm + 1e-6))",
    source="Pascanu et al. 2013, arXiv:1211.5063, algorithm 1; torch.nn.utils.clip_grad_norm_",
    forward=_clip_forward,
    fake=lambda tensors, norm, *, max_norm: None,
    check=_clip_check,
    fixed_dtypes={"norm": "float32"},
    sizes=lambda tensors, norm, *, max_norm: {"numel": _numel(tensors)},
    reduction="elementwise",
    cost=lambda tensors, norm, *, max_norm: Cost(2 * _nbytes(tensors), _numel(tensors)),
    aten=frozenset({"clamp", "mul_", "reciprocal"}),
    samples=_clip_samples,
    bound=Bound(forward=4, backward=0, length=lambda *_, **__: 1),
)


# unscale_and_check


def _unscale_forward(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    for grad in grads:
        grad.copy_(grad.float() / scale)
        # Of what was stored, so that an overflow by the division counts too.
        bad = torch.logical_not(torch.isfinite(grad).all())
        found_inf.copy_(torch.where(bad, 1.0, found_inf))


def _unscale_samples(maker: SampleMaker) -> Iterator[Sample]:
    for bad in (None, float("inf"), float("nan")):
        grads = [maker.normal(*shape) for shape in _SHAPES]
        if bad is not None:
            grads[1][3] = bad
        args = (grads, maker.scalar(1024.0), maker.scalar(0.0))
        yield Sample(args, {}, f"bad={bad}")


unscale_and_check = OperatorSpec(
    name="unscale_and_check",
    signature="(Tensor(a!)[] grads, Tensor scale, Tensor(b!) found_inf) -> ()",
    equation="g = g / scale; found_inf = 1 if any entry of any new g is not finite, else as it was",
    source="Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; torch.amp.GradScaler",
    forward=_unscale_forward,
    fake=lambda grads, scale, found_inf: None,
    check=lambda grads, scale, found_inf: _check_scalars(scale=scale, found_inf=found_inf),
    fixed_dtypes={"scale": "float32", "found_inf": "float32"},
    sizes=lambda grads, scale, found_inf: {"numel": _numel(grads)},
    reduction="max",
    cost=lambda grads, scale, found_inf: Cost(2 * _nbytes(grads), 2 * _numel(grads)),
    aten=frozenset({"isfinite", "all", "where", "div", "copy_"}),
    samples=_unscale_samples,
    bound=Bound(forward=1, backward=0, length=lambda *_, **__: 1),
)


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
    skip = torch.zeros((), dtype=torch.bool, device=lr.device)
    if found_inf is not None:
        skip = found_inf != 0
    count = step + 1.0
    correction1 = 1.0 - torch.pow(beta1, count)
    correction2 = 1.0 - torch.pow(beta2, count)
    for index, param in enumerate(params):
        grad, exp_avg, exp_avg_sq = grads[index].float(), exp_avgs[index], exp_avg_sqs[index]
        if scale is not None:
            grad = grad / scale
        if clip is not None:
            grad = grad * clip
        first = beta1 * exp_avg + (1.0 - beta1) * grad
        second = beta2 * exp_avg_sq + (1.0 - beta2) * grad.square()
        decayed = param.float() * (1.0 - lr * weight_decay)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        new = torch.where(skip, param, (decayed - lr * update).to(param.dtype))
        exp_avg.copy_(torch.where(skip, exp_avg, first))
        exp_avg_sq.copy_(torch.where(skip, exp_avg_sq, second))
        param.copy_(new)
        if low_precision:
            cast = new.to(low_precision[index].dtype)
            low_precision[index].copy_(torch.where(skip, low_precision[index], cast))
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
    _check_shapes("params", params, grads=grads, exp_avgs=exp_avgs, exp_avg_sqs=exp_avg_sqs)
    if low_precision:
        _check_shapes("params", params, low_precision=low_precision)
    _check_scalars(lr=lr, step=step, scale=scale, clip=clip, found_inf=found_inf)
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {beta}")
    if eps < 0.0:
        raise ValueError(f"eps must be at least 0, got {eps}")


def _adamw_samples(maker: SampleMaker) -> Iterator[Sample]:
    attrs = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
    for label, options in (
        ("plain", (None, None, None)),
        ("scale,clip", (1024.0, 0.5, 0.0)),
        ("found_inf", (1024.0, None, 1.0)),
    ):
        params = [maker.normal(*shape, dtype=torch.float32) for shape in _SHAPES]
        grads = [maker.normal(*shape) for shape in _SHAPES]
        moments = [maker.normal(*shape, scale=0.1, dtype=torch.float32) for shape in _SHAPES]
        squares = [maker.normal(*shape, dtype=torch.float32).square() for shape in _SHAPES]
        scalars = (None if value is None else maker.scalar(value) for value in options)
        low = [p.to(torch.bfloat16) for p in params] if label == "scale,clip" else None
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
    sizes=lambda params, *_, **__: {"numel": _numel(params), "tensors": len(params)},
    reduction="elementwise",
    cost=lambda params, grads, m, v, *_, **__: Cost(
        2 * _nbytes(params, m, v) + _nbytes(grads), 15 * _numel(params)
    ),
    aten=frozenset({"mul", "add", "div", "sqrt", "pow", "where", "copy_"}),
    samples=_adamw_samples,
    bound=Bound(forward=14, backward=0, length=lambda *_, **__: 1),
)
