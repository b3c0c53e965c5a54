"""Activations on the host: gelu and the gated ones native, the others torch's.

Each is float32 inside, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared, have_one_dtype, rows_of, wanted

_aten = torch.ops.aten
_kernels: Any = native.kernels


@declared.forward("gelu")
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    x = x.contiguous()
    y, tanh = torch.empty_like(x), approximate == "tanh"
    _kernels.gelu_forward(x.data_ptr(), y.data_ptr(), x.numel(), tanh, CODES[x.dtype])
    return y


@declared.backward("gelu")
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str, needs: Needs) -> tuple[Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    dx, tanh = torch.empty_like(x), approximate == "tanh"
    addresses = (grad.data_ptr(), x.data_ptr(), dx.data_ptr())
    _kernels.gelu_backward(*addresses, x.numel(), tanh, CODES[x.dtype])
    return (dx,)


@declared.forward("swiglu", accepts=have_one_dtype)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    addresses = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    _kernels.swiglu_forward(*addresses, gate.numel(), CODES[gate.dtype])
    return y


@declared.backward("swiglu", accepts=lambda grad, gate, up, **_: have_one_dtype(gate, up))
def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dgate_address = wanted(needs[0], gate)
    dup, dup_address = wanted(needs[1], up)
    addresses = (grad.data_ptr(), gate.data_ptr(), up.data_ptr(), dgate_address, dup_address)
    _kernels.swiglu_backward(*addresses, gate.numel(), CODES[gate.dtype])
    return dgate, dup


@declared.forward("bias_gelu")
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    y = torch.empty_like(x)
    addresses = (x.data_ptr(), bias.data_ptr(), y.data_ptr())
    codes = (CODES[x.dtype], CODES[bias.dtype])
    _kernels.bias_gelu_forward(*addresses, *rows_of(x), approximate == "tanh", *codes)
    return y


@declared.backward("bias_gelu")
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    dx, dx_address = wanted(needs[0], x)
    dbias, dbias_address = wanted(needs[1], bias)
    addresses = (grad.data_ptr(), x.data_ptr(), bias.data_ptr(), dx_address, dbias_address)
    codes = (CODES[x.dtype], CODES[bias.dtype])
    _kernels.bias_gelu_backward(*addresses, *rows_of(x), approximate == "tanh", *codes)
    return dx, dbias


@declared.forward("geglu")
def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    if gate.dtype != up.dtype:
        # The kernel takes one dtype for both.
        return geglu(gate.float(), up.float(), approximate=approximate).to(gate.dtype)
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    addresses = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    _kernels.geglu_forward(*addresses, gate.numel(), approximate == "tanh", CODES[gate.dtype])
    return y


@declared.backward("geglu")
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    if gate.dtype != up.dtype:
        wide = (t.float() for t in (grad, gate, up))
        found = geglu_backward(*wide, approximate=approximate, needs=needs)
        dgate, dup = (
            None if t is None else t.to(like.dtype)
            for t, like in zip(found, (gate, up), strict=True)
        )
        return dgate, dup
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dgate_address = wanted(needs[0], gate)
    dup, dup_address = wanted(needs[1], up)
    addresses = (grad.data_ptr(), gate.data_ptr(), up.data_ptr(), dgate_address, dup_address)
    _kernels.geglu_backward(*addresses, gate.numel(), approximate == "tanh", CODES[gate.dtype])
    return dgate, dup


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
