"""Wrong backends that the gradients chapter has to find."""

from typing import Any

import torch
from torch import Tensor

from tests.meta.honest import Row
from tests.meta.wrong import Attr, wrong_gradients
from tests.meta.wrong import wrong_backward as wrong

Grads = tuple[Tensor | None, ...]


@wrong("last-row-not-summed", "gradient of a weight not summed over all rows", operator="rms_norm")
def last_row(row: Row, grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, **attrs: Attr) -> Any:
    dx, dweight = row(grad, x, weight, rstd, **attrs)
    if dweight is not None and x.dim() > 1 and x.numel():
        rows, hidden = grad.reshape(-1, x.shape[-1]), x.reshape(-1, x.shape[-1])
        dweight = dweight - rows[-1] * hidden[-1] * rstd.reshape(-1)[-1]
    return dx, dweight


@wrong("projection-missing", "missing term of a derivative", operator="layer_norm")
def no_projection(
    row: Row, grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, **attrs: Attr
) -> Any:
    _, dweight, dbias = row(grad, x, weight, mean, rstd, **attrs)
    scaled = grad * weight
    dx = (scaled - scaled.mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return (dx if attrs["needs"][0] else None), dweight, dbias


@wrong("residual-gradient-dropped-too", "mask at the wrong place", operator="bias_dropout_add")
def dropped_stream(row: Row, *args: Any, needs: Any, **attrs: Any) -> Any:
    dx, _, dbias = row(*args, needs=(True, True, needs[2]), **attrs)
    return dx, (dx.clone() if needs[1] else None), dbias


@wrong("softmax-projection-missing", "missing term of a derivative", operator="softmax")
def diagonal_only(row: Row, grad: Tensor, y: Tensor, *, scale: float, **attrs: Attr) -> Any:
    return ((y * grad * scale).contiguous(),)


@wrong("ignored-rows-have-gradient", "gradient of ignored rows not zero", operator="cross_entropy")
def ignored(
    row: Row, grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, *, ignore_index: int,
    **attrs: Attr,
) -> Any:  # fmt: skip
    valid = target != ignore_index
    (found,) = row(grad, logits, target, lse, ignore_index=ignore_index, **attrs)
    softmax = torch.exp(logits - lse.unsqueeze(-1)) / max(int(valid.sum()), 1)
    return (torch.where(valid.unsqueeze(-1), found, softmax),)


@wrong("mean-divides-by-all-rows", "ignore_index counted in the mean", operator="cross_entropy")
def all_rows(
    row: Row, grad: Tensor, logits: Tensor, target: Tensor, lse: Tensor, *, reduction: str,
    **attrs: Attr,
) -> Any:  # fmt: skip
    if reduction != "mean":
        return row(grad, logits, target, lse, reduction=reduction, **attrs)
    count = max(target.numel(), 1)
    return row(grad / count, logits, target, lse, reduction="sum", **attrs)


@wrong("group-not-summed", "sum over one of several", operator="attention")
def one_head(
    row: Row, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, **attrs: Attr
) -> Any:
    dq, *_ = row(grad, q, k, v, y, lse, **attrs)
    groups = q.shape[2] // k.shape[2]
    first = row(
        grad[:, :, ::groups], q[:, :, ::groups], k, v, y[:, :, ::groups], lse[:, ::groups], **attrs
    )
    return dq, first[1], first[2]


@wrong("gate-and-up-swapped", "arguments swapped", operator="swiglu")
def swapped(row: Row, grad: Tensor, gate: Tensor, up: Tensor, **attrs: Attr) -> Any:
    return tuple(reversed(row(grad, gate, up, **attrs)))


@wrong("stride-of-gradient-ignored", "layout not looked at", operator="linear")
def as_if_contiguous(row: Row, grad: Tensor, x: Tensor, weight: Tensor, **attrs: Attr) -> Any:
    if not grad.is_contiguous() and grad.untyped_storage().nbytes() >= grad.nbytes:
        strides = torch.empty(grad.shape, device="meta").stride()
        grad = grad.as_strided(grad.shape, strides)
    return row(grad, x, weight, **attrs)


@wrong("gradient-overwritten", "write to an argument", operator="gelu")
def consumes(row: Row, grad: Tensor, x: Tensor, **attrs: Attr) -> Any:
    found = row(grad, x, **attrs)
    grad.data.zero_()
    return found


ARGUMENTS = (
    wrong_gradients("weight-gradient-needs-dx", "wrong use of needs", "rms_norm",
        dweight=lambda dweight, needs: dweight if needs[0] else torch.zeros_like(dweight)),
    wrong_gradients("last-write-wins", "scatter without addition", "embedding",
        dweight=lambda dweight, indices, grad: torch.zeros_like(dweight).index_put(
            (indices.reshape(-1),), grad.reshape(-1, grad.shape[-1]))),
    wrong_gradients("bias-gradient-of-one-row", "sum over one of several", "linear",
        dbias=lambda dbias, grad:
        grad.reshape(-1, grad.shape[-1])[0].clone() if grad.numel() else dbias),
    wrong_gradients("residual-gets-the-stream-only", "missing term of a derivative",
        "add_layer_norm", dresidual=lambda grad1: grad1.clone()),
    wrong_gradients("bias-gradient-of-all-elements", "mask forgotten", "bias_dropout_add",
        dbias=lambda grad: grad.unsqueeze(0).flatten(0, -2).sum(0)),
    wrong_gradients("up-gradient-without-gelu", "missing factor", "geglu",
        dup=lambda grad, gate: grad * gate),
    wrong_gradients("key-gradient-unscaled", "missing factor", "attention",
        dk=lambda dk, q, scale: dk / (scale or 1.0 / q.shape[-1] ** 0.5)),
    wrong_gradients("dropout-gradient-unscaled", "missing factor", "dropout",
        dx=lambda dx, p: dx * (1.0 - p)),
    wrong_gradients("gradient-of-the-sum-lost", "missing term of a derivative", "add_rms_norm",
        grad1=lambda grad1: torch.zeros_like(grad1)),
    wrong_gradients("slope-without-bias", "derivative at the wrong place", "bias_gelu",
        bias=lambda bias: torch.zeros_like(bias)),
    wrong_gradients("softmax-gradient-unscaled", "missing factor", "softmax", scale=1.0),
    wrong_gradients("z-loss-has-no-gradient", "missing term of a derivative", "cross_entropy",
        z_loss=0.0),
    wrong_gradients("rotation-not-reversed", "wrong sign", "rope", sin=lambda sin: -sin),
    wrong_gradients("exact-gradient-for-tanh", "derivative of another form", "gelu",
        approximate="none"),
)  # fmt: skip
