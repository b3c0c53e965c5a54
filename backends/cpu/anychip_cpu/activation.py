"""Activations of one tensor, mapped to torch's: float32 inside, one rounding. gelu is native."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cpu.table import Needs, declared

_aten = torch.ops.aten


@declared.forward("silu", kind="mapped")
def silu(x: Tensor) -> Tensor:
    y: Tensor = _aten.silu(x.contiguous())
    return y


@declared.backward("silu", kind="mapped")
def silu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    return (_aten.silu_backward(grad.contiguous(), x.contiguous()),)


@declared.forward("relu", kind="mapped")
def relu(x: Tensor) -> Tensor:
    return torch.relu(x.contiguous())


@declared.backward("relu", kind="mapped")
def relu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    return (_aten.threshold_backward(grad.contiguous(), x.contiguous(), 0),)


@declared.forward("relu2", kind="mapped")
def relu2(x: Tensor) -> Tensor:
    return torch.relu(x.contiguous()).square_()


@declared.backward("relu2", kind="mapped")
def relu2_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    wide = x.contiguous().float()
    slope = (2.0 * wide).mul_(grad.contiguous())
    return (_aten.threshold_backward(slope, wide, 0).to(x.dtype),)


@declared.forward("sigmoid", kind="mapped")
def sigmoid(x: Tensor) -> Tensor:
    return torch.sigmoid(x.contiguous())


@declared.backward("sigmoid", kind="mapped")
def sigmoid_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    # torch takes y, of which 16 bits would not do.
    y = torch.sigmoid(x.contiguous().float())
    return (_aten.sigmoid_backward(grad.contiguous().float(), y).to(x.dtype),)


@declared.forward("tanh", kind="mapped")
def tanh(x: Tensor) -> Tensor:
    return torch.tanh(x.contiguous())


@declared.backward("tanh", kind="mapped")
def tanh_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    y = torch.tanh(x.contiguous().float())
    return (_aten.tanh_backward(grad.contiguous().float(), y).to(x.dtype),)


def _exp_is_finite(*_: Tensor, beta: float, threshold: float, **__: object) -> bool:
    """torch computes exp(beta x) up to the threshold."""
    return threshold <= 80.0


@declared.forward("softplus", kind="mapped", accepts=_exp_is_finite)
def softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    y: Tensor = _aten.softplus(x.contiguous(), beta, threshold)
    return y


@declared.backward("softplus", kind="mapped", accepts=_exp_is_finite)
def softplus_backward(
    grad: Tensor, x: Tensor, *, beta: float, threshold: float, needs: Needs
) -> tuple[Tensor]:
    return (_aten.softplus_backward(grad.contiguous(), x.contiguous(), beta, threshold),)
