"""The loss of a language model: cross_entropy."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from anychip.contract import (
    HOST,
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
from anychip.operators.values import has_values

_REDUCTIONS = ("mean", "sum", "none")


def cross_entropy_forward(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """The loss by ``reduction`` and the lse of every row, both float32."""
    check_targets("cross_entropy", target, logits.shape[-1], ignore_index)
    wide = logits.float()
    lse = torch.logsumexp(wide, dim=-1)
    valid = target != ignore_index
    picked = wide.gather(-1, torch.where(valid, target, 0).unsqueeze(-1)).squeeze(-1)
    loss = lse - picked
    if label_smoothing:
        smooth = lse - wide.mean(-1)
        loss = (1.0 - label_smoothing) * loss + label_smoothing * smooth
    if z_loss:
        loss = loss + z_loss * lse.square()
    loss = torch.where(valid, loss, 0.0)
    if reduction == "mean":
        loss = loss.sum() / valid.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.contiguous(), lse.contiguous()


def check_targets(operator: str, target: Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises IndexError for a target that is no class; on a host only.

    A device cannot look without a synchronisation.
    """
    if target.device.type != HOST or not target.numel() or not has_values(target):
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= num_classes))
    if wrong.any():
        row = int(wrong.reshape(-1).nonzero()[0])
        raise IndexError(
            f"{operator}: target must be from 0 to {num_classes - 1} or ignore_index "
            f"{ignore_index}, got {int(target.reshape(-1)[row])} in row {row}"
        )


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, *, ignore_index: int,
    label_smoothing: float, z_loss: float, reduction: str, needs: tuple[bool],
) -> tuple[Tensor]:  # fmt: skip
    """The gradient of the logits, in their dtype."""
    valid = target != ignore_index
    probability = torch.exp(logits.float() - lse.unsqueeze(-1))
    slope = probability
    if z_loss:
        slope = slope * (1.0 + 2.0 * z_loss * lse).unsqueeze(-1)
    if label_smoothing:
        slope = slope - label_smoothing / logits.shape[-1]
    index = torch.where(valid, target, 0).unsqueeze(-1)
    taken = torch.full_like(index, -1, dtype=torch.float32) * (1.0 - label_smoothing)
    slope = slope.scatter_add(-1, index, taken)
    weight = grad / valid.sum() if reduction == "mean" else grad
    row = torch.where(valid, weight.expand(target.shape), 0.0).unsqueeze(-1)
    return (torch.where(valid.unsqueeze(-1), slope * row, 0.0).to(logits.dtype),)


def _fake(logits: Tensor, target: Tensor, *, reduction: str, **_: Any) -> tuple[Tensor, Tensor]:
    shape = target.shape if reduction == "none" else ()
    loss = logits.new_empty(shape, dtype=torch.float32)
    return loss, logits.new_empty(target.shape, dtype=torch.float32)


def _check(logits: Tensor, target: Tensor, *, ignore_index: int, **options: Any) -> None:
    if logits.dim() < 1 or logits.shape[:-1] != target.shape or not logits.shape[-1]:
        raise ValueError(
            f"logits must be (..., V) with V > 0 and target (...); got {tuple(logits.shape)} and "
            f"{tuple(target.shape)}"
        )
    check_options(**options)


def check_options(*, label_smoothing: float, z_loss: float, reduction: str) -> None:
    """Raises ValueError for an option of the loss that is out of its range."""
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction must be mean, sum or none, got {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {label_smoothing}")
    if z_loss < 0.0:
        raise ValueError(f"z_loss must be at least 0, got {z_loss}")


def sampled_options(*more: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Options of a sample, and what its label says of them; more: changes of the defaults."""
    plain = {"ignore_index": -100, "label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean"}
    summed = {"reduction": "sum", "label_smoothing": 0.1}
    changes = ({}, summed, {"reduction": "none", "z_loss": 1e-3}, *more)
    return [(plain | change, f"{change or 'defaults'}".replace(" ", "")) for change in changes]


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for shape, vocabulary in (((6,), 11), ((2, 3), 130)):
        logits, target = maker.normal(*shape, vocabulary), maker.integers(vocabulary, *shape)
        target.reshape(-1)[0] = 2
        for options, changes in sampled_options({"ignore_index": 2}):
            label = f"{'x'.join(map(str, shape))}x{vocabulary},{changes}"
            yield Sample((logits, target), options, label)


def _shards(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, z: float, reduction: str
) -> Placements:
    # A mean over shards is not the mean of the whole, since each shard ignores other rows.
    loss: dict[str, Placement] = {"sum": "partial"}
    dims = range(target.dim()) if reduction != "mean" else ()
    return [([loss.get(reduction, d), d], [d, d]) for d in dims]


def _backward_shards(grad: Tensor, logits: Tensor, target: Tensor, *rest: Any) -> Placements:
    reduction: str = rest[-2]
    dims = range(target.dim()) if reduction != "mean" else ()
    return [([d], [None if reduction == "sum" else d, d, d, d]) for d in dims]


cross_entropy = OperatorSpec(
    name="cross_entropy",
    signature=(
        "(Tensor logits, Tensor target, *, int ignore_index=-100, float label_smoothing=0.0, "
        'float z_loss=0.0, str reduction="mean") -> Tensor'),
    equation=(
        "row = (1 - ls) (lse - logit[target]) + ls (lse - mean(logits)) + z lse^2, "
        "lse = log sum exp(logits); rows with target = ignore_index are 0 and not counted"),
    source=(
        "torch.nn.functional.cross_entropy; z-loss: Chowdhery et al. 2022, arXiv:2204.02311, "
        "section 5; label smoothing: Szegedy et al. 2016, section 7"),
    forward=cross_entropy_forward, backward=cross_entropy_backward, fake=_fake,
    residuals=(Residual("lse", "target.shape", "float32"),), saved=("logits", "target", "lse"),
    differentiable=("logits",), check=_check, fixed_dtypes={"target": "int64"},
    indexes={"target": "logits[-1]"},
    sizes=lambda logits, target, **_: {"vocabulary": logits.shape[-1], "rows": target.numel()},
    sharding=Sharding(_shards, _backward_shards),
    cost=lambda logits, target, **_: Cost(nbytes(logits) + 16 * target.numel(), 4 * logits.numel()),
    backward_cost=lambda logits, target, **_: Cost(2 * nbytes(logits), 4 * logits.numel()),
    samples=_samples,
    bound=Bound(forward=8, backward=10, length=lambda logits, *_, **__: logits.shape[-1]),
)  # fmt: skip
