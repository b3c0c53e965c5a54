"""The output layer and the loss in one, without the logits of all rows: linear_cross_entropy.

The logits of a language model are by far its largest tensor, (rows, vocabulary). Here they are made
for a few rows at a time, in float32, used up and thrown away, in the backward direction once more.

Of a vocabulary that lies in parts, on several ranks perhaps, linear_cross_entropy_partials gives
what a loss needs of each; the parts are joined by lse as attention's blocks are.

A second derivative, a function transform and a compiler that inlines the reference differentiate
through the chunks and keep them: what they compute is right, but they hold the logits.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import (
    Bound,
    Cost,
    OperatorSpec,
    Placement,
    Placements,
    Residual,
    Sample,
    SampleMaker,
    Sharding,
)
from anychip.operators.extents import nbytes
from anychip.operators.linear import check_bias
from anychip.operators.loss import (
    check_options,
    check_targets,
    cross_entropy_backward,
    cross_entropy_forward,
    sampled_options,
)

CHUNK = 1 << 20
"""Largest number of logits at a time: 4 MiB in float32, enough rows to keep a product busy."""


def chunks(num_rows: int, num_classes: int) -> Iterator[slice]:
    """Slices of the rows with at most CHUNK logits each, but at least one row."""
    step = max(CHUNK // num_classes, 1)
    # Only the number of chunks is fixed by this for a compiler, not the number of rows.
    for index in range(-(-num_rows // step)):
        yield slice(index * step, (index + 1) * step)


def _forward(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, ignore_index: int,
    reduction: str, **options: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_targets("linear_cross_entropy", target, weight.shape[0], ignore_index)
    rows, labels, wide = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1), weight.float()
    losses, lses = [], []
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk].float(), wide, bias)
        loss, lse = cross_entropy_forward(
            logits, labels[chunk], ignore_index=ignore_index, reduction="none", **options
        )
        losses.append(loss)
        lses.append(lse)
    loss = torch.cat(losses) if losses else wide.new_empty(0)
    lse = torch.cat(lses) if lses else wide.new_empty(0)
    if reduction == "none":
        return loss.reshape(target.shape), lse.reshape(target.shape)
    total = loss.sum() if reduction == "sum" else loss.sum() / (labels != ignore_index).sum()
    return total, lse.reshape(target.shape)


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = rows @ weight.t()
    return logits if bias is None else logits + bias.float()


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, lse: Tensor, *,
    ignore_index: int, reduction: str, needs: tuple[bool, bool, bool], **options: float,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    labels = target.reshape(-1)
    slope = grad / (labels != ignore_index).sum() if reduction == "mean" else grad
    slope, lse = slope.expand(target.shape).reshape(-1), lse.reshape(-1)

    more: dict[str, Any] = {"reduction": "none", "ignore_index": ignore_index, **options}

    def slope_of(chunk: slice, logits: Tensor) -> Tensor:
        given = slope[chunk], logits, labels[chunk], lse[chunk]
        return cross_entropy_backward(*given, needs=(True,), **more)[0]

    return _gradients(x, weight, target, bias, slope_of, needs)


def _gradients(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    slope_of: Callable[[slice, Tensor], Tensor],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, weight and bias; ``slope_of(chunk, logits)`` is the gradient of a chunk's logits."""
    rows, wide = x.reshape(target.numel(), x.shape[-1]), weight.float()
    dx, dweight, dbias = [], torch.zeros_like(wide), wide.new_zeros(weight.shape[0])
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        part = rows[chunk].float()
        dlogits = slope_of(chunk, _logits(part, wide, bias))
        if needs[0]:
            dx.append((dlogits @ wide).to(x.dtype))
        if needs[1]:
            dweight = dweight + dlogits.t() @ part
        if needs[2]:
            dbias = dbias + dlogits.sum(0)
    return (
        (torch.cat(dx) if dx else rows).reshape(x.shape) if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] else None,
        dbias.to(weight.dtype) if needs[2] else None,
    )


def _fake(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, reduction: str, **_: Any
) -> tuple[Tensor, Tensor]:
    loss = x.new_empty(target.shape if reduction == "none" else (), dtype=torch.float32)
    return loss, x.new_empty(target.shape, dtype=torch.float32)


def _check(*tensors: Any, ignore_index: int, **options: Any) -> None:
    _check_shapes(*tensors)
    check_options(**options)


def _check_shapes(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1] or not weight.shape[0]:
        raise ValueError(
            f"x must be (..., K) and weight (V, K) with V > 0; got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if x.shape[:-1] != target.shape:
        raise ValueError(
            f"target must be {tuple(x.shape[:-1])}, x without its last dim; got "
            f"{tuple(target.shape)}"
        )
    check_bias(x, weight, bias)


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    last = {"ignore_index": 2, "label_smoothing": 0.1, "z_loss": 1e-3}
    for shape, inputs, classes in (((6,), 8, 11), ((2, 3), 17, 130)):
        x, weight = maker.normal(*shape, inputs), maker.normal(classes, inputs, scale=0.3)
        target, bias = maker.integers(classes, *shape), maker.normal(classes)
        target.reshape(-1)[0] = 2
        for index, (options, changes) in enumerate(sampled_options(last)):
            args = (x, weight, target, bias if index % 2 else None)
            label = f"{'x'.join(map(str, shape))}x{inputs}->{classes},{changes}"
            yield Sample(args, options, label)


def _shards(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *attrs: Any
) -> Placements:
    # A mean over shards is not the mean of the whole, since each shard ignores other rows.
    reduction: str = attrs[-1]
    loss: dict[str, Placement] = {"sum": "partial"}
    rest: list[Placement] = [] if bias is None else [None]
    dims = range(target.dim()) if reduction != "mean" else ()
    return [([loss.get(reduction, d), d], [d, None, d, *rest]) for d in dims]


def _backward_shards(
    grad: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *rest: Any
) -> Placements:
    reduction: str = rest[-2]
    given: list[Placement] = [] if bias is None else [None]
    dims = range(target.dim()) if reduction != "mean" else ()
    return [
        ([d, "partial", "partial"], [None if reduction == "sum" else d, d, None, d, *given, d])
        for d in dims
    ]


linear_cross_entropy = OperatorSpec(
    name="linear_cross_entropy",
    signature=(
        "(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, int ignore_index=-100, "
        'float label_smoothing=0.0, float z_loss=0.0, str reduction="mean") -> Tensor'),
    equation="cross_entropy(x weight^T + bias, target); float32 logits of a few rows at a time",
    source="as cross_entropy; in chunks: Wijmans et al. 2024, arXiv:2411.09009, section 4",
    forward=_forward, backward=_backward, fake=_fake,
    residuals=(Residual("lse", "target.shape", "float32"),),
    saved=("x", "weight", "target", "bias", "lse"), differentiable=("x", "weight", "bias"),
    check=_check, fixed_dtypes={"target": "int64"}, indexes={"target": "weight[0]"},
    sizes=lambda x, weight, target, bias, **_: {
        "rows": target.numel(), "in": weight.shape[1], "vocabulary": weight.shape[0]},
    autocast="lower", sharding=Sharding(_shards, _backward_shards),
    cost=lambda x, weight, target, bias, **_: Cost(
        nbytes(x, weight, bias) + 16 * target.numel(),
        (2 * x.shape[-1] + 4) * target.numel() * weight.shape[0]),
    backward_cost=lambda x, weight, target, bias, **_: Cost(
        2 * nbytes(x, weight, bias), (6 * x.shape[-1] + 4) * target.numel() * weight.shape[0]),
    samples=_samples,
    bound=Bound(forward=10, backward=14, length=lambda x, weight, *_, **__: max(weight.shape)),
)  # fmt: skip


# linear_cross_entropy_partials


def _partials_forward(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows, labels, wide = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1), weight.float()
    found = []
    for chunk in chunks(rows.shape[0], weight.shape[0]):
        logits = _logits(rows[chunk].float(), wide, bias)
        found.append(partials_of_rows(logits, labels[chunk], first))
    if not found:
        found.append((wide.new_empty(0),) * 3)
    lse, picked, total = (
        torch.cat(parts).reshape(target.shape) for parts in zip(*found, strict=True)
    )
    return lse, picked, total


def partials_of_rows(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """lse, picked and total of (rows, V) logits of the classes from ``first`` on."""
    place, is_here = _places(labels, first, logits.shape[1])
    picked = torch.where(is_here, logits.gather(1, place)[:, 0], 0.0)
    return torch.logsumexp(logits, 1), picked, logits.sum(1)


def slope_of_rows(
    logits: Tensor, labels: Tensor, grads: Sequence[Tensor], lse: Tensor, first: int
) -> Tensor:
    """The gradient of (rows, V) logits from those of lse, picked and total; lse may be of all."""
    by_lse, by_picked, by_total, whole = (t.unsqueeze(1) for t in (*grads, lse))
    place, is_here = _places(labels, first, logits.shape[1])
    slope = torch.exp(logits - whole) * by_lse + by_total
    return slope.scatter_add(1, place, by_picked * is_here.unsqueeze(1))


def _places(labels: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """(rows, 1) columns of the targets, 0 for one of another part; and which are of this one."""
    place = labels - first
    is_here = (place >= 0) & (place < count)
    return torch.where(is_here, place, 0).unsqueeze(1), is_here


def _partials_backward(
    grad_lse: Tensor, grad_picked: Tensor, grad_total: Tensor, x: Tensor, weight: Tensor,
    target: Tensor, bias: Tensor | None, lse: Tensor, *, first: int, needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    labels = target.reshape(-1)
    per_row = [t.reshape(-1) for t in (grad_lse, grad_picked, grad_total, lse)]

    def slope_of(chunk: slice, logits: Tensor) -> Tensor:
        *grads, whole = (t[chunk] for t in per_row)
        return slope_of_rows(logits, labels[chunk], grads, whole, first)

    return _gradients(x, weight, target, bias, slope_of, needs)


def _partials_check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *, first: int
) -> None:
    _check_shapes(x, weight, target, bias)
    if first < 0:
        raise ValueError(f"first must be at least 0, the number of the first class; got {first}")


def _partials_samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, inputs, classes, first in (
        ((6,), 8, 11, 0),
        ((2, 3), 17, 130, 130),
        ((4,), 5, 3, 2),
    ):
        x, weight = maker.normal(*shape, inputs), maker.normal(classes, inputs, scale=0.3)
        target, bias = maker.integers(first + 2 * classes, *shape), maker.normal(classes)
        target.reshape(-1)[0] = -100
        label = f"{'x'.join(map(str, shape))}x{inputs}->{classes}from{first}"
        yield Sample((x, weight, target, None if first == 2 else bias), {"first": first}, label)


def _partials_shards(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *_: object
) -> Placements:
    rest: list[Placement] = [] if bias is None else [None]
    return [([d, d, d], [d, None, d, *rest]) for d in range(target.dim())]


def _partials_backward_shards(*given: Any) -> Placements:
    target, bias = given[5], given[6]
    rest: list[Placement] = [] if bias is None else [None]
    return [
        ([d, "partial", "partial"], [d, d, d, d, None, d, *rest, d]) for d in range(target.dim())
    ]


linear_cross_entropy_partials = OperatorSpec(
    name="linear_cross_entropy_partials",
    signature=(
        "(Tensor x, Tensor weight, Tensor target, Tensor? bias=None, *, int first=0) "
        "-> (Tensor, Tensor, Tensor)"),
    equation=(
        "l = x weight^T + bias, the logits of classes first to first + V - 1; lse = log sum exp l; "
        "picked = l[target - first], 0 for a target that is none of these; total = sum l"),
    source="Shoeybi et al. 2019, arXiv:1909.08053, section 3 (vocabulary in parts); chunks: "
    "Wijmans et al. 2024, arXiv:2411.09009",
    forward=_partials_forward, backward=_partials_backward,
    fake=lambda x, weight, target, *_, **__: tuple(
        x.new_empty(target.shape, dtype=torch.float32) for _ in range(3)),
    saved=("x", "weight", "target", "bias", "y0"), differentiable=("x", "weight", "bias"),
    deferrable=("weight", "bias"), check=_partials_check, fixed_dtypes={"target": "int64"},
    sizes=lambda x, weight, target, bias, *, first: {
        "rows": target.numel(), "in": weight.shape[1], "vocabulary": weight.shape[0]},
    autocast="lower", sharding=Sharding(_partials_shards, _partials_backward_shards),
    cost=lambda x, weight, target, bias, *, first: Cost(
        nbytes(x, weight, bias) + 20 * target.numel(),
        (2 * x.shape[-1] + 4) * target.numel() * weight.shape[0]),
    backward_cost=lambda x, weight, target, bias, *, first: Cost(
        2 * nbytes(x, weight, bias), (6 * x.shape[-1] + 4) * target.numel() * weight.shape[0]),
    samples=_partials_samples,
    bound=Bound(forward=10, backward=14, length=lambda x, weight, *_, **__: max(weight.shape)),
)  # fmt: skip
