"""Activations of one tensor, mapped to torch's: float32 inside, one rounding. gelu is native."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cpu.table import FLOATS, Needs, table

_aten = torch.ops.aten


@table.forward("silu", kind="mapped", dtypes=FLOATS)
def silu(x: Tensor) -> Tensor:
    y: Tensor = _aten.silu(x.contiguous())
    return y


@table.backward("silu", kind="mapped", dtypes=FLOATS)
def silu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    return (_aten.silu_backward(grad.contiguous(), x.contiguous()),)


@table.forward("relu", kind="mapped", dtypes=FLOATS)
def relu(x: Tensor) -> Tensor:
    return torch.relu(x.contiguous())


@table.backward("relu", kind="mapped", dtypes=FLOATS)
def relu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    return (_aten.threshold_backward(grad.contiguous(), x.contiguous(), 0),)


@table.forward("relu2", kind="mapped", dtypes=FLOATS)
def relu2(x: Tensor) -> Tensor:
    return torch.relu(x.contiguous()).square_()


@table.backward("relu2", kind="mapped", dtypes=FLOATS)
def relu2_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    wide = x.contiguous().float()
    slope = (2.0 * wide).mul_(grad.contiguous())
    return (_aten.threshold_backward(slope, wide, 0).to(x.dtype),)


@table.forward("sigmoid", kind="mapped", dtypes=FLOATS)
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.contiguous())


@table.backward("sigmoid", kind="mapped", dtypes=FLOATS)
def sigmoid_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    # torch takes y, of which 16 bits would not do.
    y = torch.sigmoid(x.contiguous().float())
    return (_aten.sigmoid_backward(grad.contiguous().float(), y).to(x.dtype),)


@table.forward("tanh", kind="mapped", dtypes=FLOATS)
def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x.contiguous())


@table.backward("tanh", kind="mapped", dtypes=FLOATS)
def tanh_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    y = torch.tanh(x.contiguous().float())
    return (_aten.tanh_backward(grad.contiguous().float(), y).to(x.dtype),)


def _exp_is_finite(*_: Tensor, beta: float, threshold: float, **__: object) -> bool:
    """torch computes exp(beta x) up to the threshold."""
    return threshold <= 80.0


@table.forward("softplus", kind="mapped", dtypes=FLOATS, accepts=_exp_is_finite)
def softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    y: Tensor = _aten.softplus(x.contiguous(), beta, threshold)
    return y


@table.backward("softplus", kind="mapped", dtypes=FLOATS, accepts=_exp_is_finite)
def softplus_backward(
    grad: Tensor, x: Tensor, *, beta: float, threshold: float, needs: Needs
) -> tuple[Tensor]:
    return (_aten.softplus_backward(grad.contiguous(), x.contiguous(), beta, threshold),)
