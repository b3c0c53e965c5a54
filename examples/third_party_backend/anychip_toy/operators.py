"""The toy's operators, in numpy, on the memory of torch's tensors.

A row is called as its spec says (``anychip.operators``): a forward row returns the outputs and then
the residuals, a backward row takes gradients and saved tensors and returns one gradient, or None,
per differentiable argument. Autograd, dispatch and fallback are anychip's; a row only computes.

Outputs come from torch's allocator; numpy writes into them. Sums are double: on a host that costs
nothing that anybody would notice next to numpy's temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anychip.contract import OperatorTable
from anychip_toy import philox

table = OperatorTable()
FLOAT32 = {torch.float32}
Needs = tuple[bool, ...]
Array = NDArray[Any]


def _array(tensor: Tensor) -> Array:
    """The tensor's own memory as an array; nothing is copied."""
    array: Array = tensor.detach().numpy()
    return array


def _tensor(values: Array, dtype: torch.dtype = torch.float32) -> Tensor:
    """A fresh, contiguous tensor with these values, rounded once."""
    tensor = torch.empty(values.shape, dtype=dtype)
    _array(tensor)[...] = values
    return tensor


# rms_norm: a reduction with a residual


@table.forward("rms_norm", dtypes=FLOAT32)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    with np.errstate(all="ignore"):  # inf and NaN go through, as they do in torch
        wide = _array(x).astype(np.float64)
        rstd = 1.0 / np.sqrt(np.square(wide).mean(-1, keepdims=True) + eps)
        return _tensor(wide * rstd * _array(weight)), _tensor(rstd[..., 0])


@table.backward("rms_norm", dtypes=FLOAT32)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    dx = dweight = None
    with np.errstate(all="ignore"):
        inverse = _array(rstd).astype(np.float64)[..., None]
        normed = _array(x) * inverse
        if needs[0]:
            scaled = _array(grad).astype(np.float64) * _array(weight)
            mean = (scaled * normed).mean(-1, keepdims=True)
            dx = _tensor((scaled - normed * mean) * inverse)
        if needs[1]:
            dweight = _tensor((_array(grad) * normed).sum(tuple(range(x.dim() - 1))))
    return dx, dweight


# dropout: random, with a mask that is the same on every chip


@table.forward("dropout", dtypes=FLOAT32)
def dropout(
    x: Tensor, rng: Tensor, rows: Tensor | None, *, p: float, width: int, column: int
) -> Tensor:
    seed, offset = rng.tolist()
    if rows is None:
        index = np.arange(x.numel()).reshape(x.shape)
    else:  # a part of a tensor that is `width` wide: which of its rows, and from which column on
        index = _array(rows)[..., None] * width + np.arange(column, column + x.shape[-1])
    threshold = int(p * 2.0**32)  # the product is exact, int() takes the floor
    keep = philox.words(seed, offset, index) >= threshold
    scale = np.float32(0.0 if p == 1.0 else 1.0 / (1.0 - p))
    with np.errstate(all="ignore"):
        return _tensor(np.where(keep, _array(x) * scale, np.float32(0.0)))


@table.backward("dropout", dtypes=FLOAT32)
def dropout_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None, *, needs: Needs, **attrs: Any
) -> tuple[Tensor]:
    return (dropout(grad, rng, rows, **attrs),)


# cross_entropy: a loss with options


@table.forward("cross_entropy", dtypes=FLOAT32)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    classes, valid = _targets(logits, target, ignore_index)
    with np.errstate(all="ignore"):
        wide = _array(logits).astype(np.float64)
        lse = _log_sum_exp(wide)
        rows = lse - np.take_along_axis(wide, classes[..., None], -1)[..., 0]
        if label_smoothing:
            rows = (1.0 - label_smoothing) * rows + label_smoothing * (lse - wide.mean(-1))
        if z_loss:
            rows = rows + z_loss * np.square(lse)
        rows = np.where(valid, rows, 0.0)
        if reduction == "mean":
            rows = np.asarray(rows.sum() / valid.sum())  # no row at all: NaN, as in torch
        elif reduction == "sum":
            rows = np.asarray(rows.sum())
    return _tensor(rows), _tensor(lse)


@table.backward("cross_entropy", dtypes=FLOAT32)
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor]:
    classes, valid = _targets(logits, target, ignore_index)
    with np.errstate(all="ignore"):
        wide_lse = _array(lse).astype(np.float64)[..., None]
        slope = np.exp(_array(logits) - wide_lse) * (1.0 + 2.0 * z_loss * wide_lse)
        slope -= label_smoothing / logits.shape[-1]
        taken = np.take_along_axis(slope, classes[..., None], -1) - (1.0 - label_smoothing)
        np.put_along_axis(slope, classes[..., None], taken, -1)
        row = _array(grad).astype(np.float64)
        row = row / valid.sum() if reduction == "mean" else row
        weight = np.broadcast_to(row, valid.shape)[..., None]
        return (_tensor(np.where(valid[..., None], slope * weight, 0.0)),)


def _targets(logits: Tensor, target: Tensor, ignore_index: int) -> tuple[Array, Array]:
    """Classes, with 0 in place of ignored ones, and which rows are not ignored."""
    classes = _array(target)
    valid = classes != ignore_index
    wrong = valid & ((classes < 0) | (classes >= logits.shape[-1]))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise IndexError(
            f"cross_entropy: target must be from 0 to {logits.shape[-1] - 1} or ignore_index "
            f"{ignore_index}, got {classes.reshape(-1)[row]} in row {row}"
        )
    return np.where(valid, classes, 0), valid


def _log_sum_exp(x: Array) -> Array:
    highest = x.max(-1, keepdims=True)
    shift = np.where(np.isfinite(highest), highest, 0.0)  # inf - inf would be NaN
    total: Array = np.log(np.exp(x - shift).sum(-1)) + shift[..., 0]
    return total


# adamw: in place, over lists


def _is_float32(params: Sequence[Tensor], *_: object, **__: object) -> bool:
    return all(param.dtype == torch.float32 for param in params)


@table.forward("adamw", accepts=_is_float32)
def adamw(
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
    if found_inf is not None and found_inf.item() != 0.0:
        return
    step += 1.0
    rate, time = lr.item(), step.item()
    correction1, correction2 = 1.0 - beta1**time, 1.0 - beta2**time
    with np.errstate(all="ignore"):
        for index, param in enumerate(params):
            grad = _array(grads[index].float())  # torch casts what numpy has no type for
            if scale is not None:
                grad = grad / np.float32(scale.item())
            if clip is not None:
                grad = grad * np.float32(clip.item())
            p, m, v = (_array(t) for t in (param, exp_avgs[index], exp_avg_sqs[index]))
            m[...] = beta1 * m + (1.0 - beta1) * grad
            v[...] = beta2 * v + (1.0 - beta2) * np.square(grad)
            update = (m / correction1) / (np.sqrt(v / correction2) + eps)
            p[...] = p * (1.0 - rate * weight_decay) - rate * update
            if low_precision:
                low_precision[index].copy_(param)
