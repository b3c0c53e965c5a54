"""Rows of activations: gelu and the gated ones by our kernels, the others mapped to torch's.

Each is float32 inside, and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.columns import rows_of, scratch_for_sums
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared

_aten = torch.ops.aten


def _of_one_dtype(*tensors: Tensor) -> list[Tensor]:
    """Contiguous tensors, in float32 if they differ: exact, and what the kernels compute in."""
    if any(t.dtype != tensors[0].dtype for t in tensors):
        tensors = tuple(t.float() for t in tensors)
    return [t.contiguous() for t in tensors]


# gelu


@declared.forward("gelu")
def gelu(kernels: Kernels, x: Tensor, *, approximate: str) -> Tensor:
    x = x.contiguous()
    y = empty_like(x)
    kernels.native.gelu_forward(
        x.data_ptr(),
        y.data_ptr(),
        x.numel(),
        approximate == "tanh",
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return y


@declared.backward("gelu")
def gelu_backward(
    kernels: Kernels, grad: Tensor, x: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    dx = empty_like(x)
    kernels.native.gelu_backward(
        grad.data_ptr(),
        x.data_ptr(),
        dx.data_ptr(),
        x.numel(),
        approximate == "tanh",
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return (dx,)


# bias_gelu


@declared.forward("bias_gelu")
def bias_gelu(kernels: Kernels, x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    x, bias = x.contiguous(), bias.contiguous()
    y = empty_like(x)
    kernels.native.bias_gelu_forward(
        x.data_ptr(),
        bias.data_ptr(),
        y.data_ptr(),
        *rows_of(x),
        approximate == "tanh",
        kernels.codes[x.dtype],
        kernels.codes[bias.dtype],
        *kernels.place(x),
    )
    return y


@declared.backward("bias_gelu")
def bias_gelu_backward(
    kernels: Kernels, grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, x, bias = grad.contiguous(), x.contiguous(), bias.contiguous()
    dx = empty_like(x) if needs[0] else None
    dbias = empty_like(bias) if needs[1] else None
    parts, partial = scratch_for_sums(kernels, x, wanted=needs[1])
    kernels.native.bias_gelu_backward(
        grad.data_ptr(),
        x.data_ptr(),
        bias.data_ptr(),
        address(dx),
        address(dbias),
        address(partial),
        *rows_of(x),
        parts,
        approximate == "tanh",
        kernels.codes[x.dtype],
        kernels.codes[bias.dtype],
        *kernels.place(x),
    )
    return dx, dbias


# silu, relu, relu2, sigmoid, tanh, softplus


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


# swiglu, geglu


@declared.forward("swiglu")
def swiglu(kernels: Kernels, gate: Tensor, up: Tensor) -> Tensor:
    dtype = gate.dtype
    gate, up = _of_one_dtype(gate, up)
    y = empty_like(gate)
    kernels.native.swiglu_forward(
        gate.data_ptr(),
        up.data_ptr(),
        y.data_ptr(),
        gate.numel(),
        kernels.codes[gate.dtype],
        *kernels.place(gate),
    )
    return y.to(dtype)


@declared.backward("swiglu")
def swiglu_backward(
    kernels: Kernels, grad: Tensor, gate: Tensor, up: Tensor, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    dtypes = gate.dtype, up.dtype
    grad, gate, up = _of_one_dtype(grad, gate, up)
    made = [empty_like(gate) if need else None for need in needs]
    kernels.native.swiglu_backward(
        grad.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        *map(address, made),
        gate.numel(),
        kernels.codes[gate.dtype],
        *kernels.place(gate),
    )
    return _in_dtypes(made, dtypes)


@declared.forward("geglu")
def geglu(kernels: Kernels, gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    dtype = gate.dtype
    gate, up = _of_one_dtype(gate, up)
    y = empty_like(gate)
    kernels.native.geglu_forward(
        gate.data_ptr(),
        up.data_ptr(),
        y.data_ptr(),
        gate.numel(),
        approximate == "tanh",
        kernels.codes[gate.dtype],
        *kernels.place(gate),
    )
    return y.to(dtype)


@declared.backward("geglu")
def geglu_backward(
    kernels: Kernels, grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    dtypes = gate.dtype, up.dtype
    grad, gate, up = _of_one_dtype(grad, gate, up)
    made = [empty_like(gate) if need else None for need in needs]
    kernels.native.geglu_backward(
        grad.data_ptr(),
        gate.data_ptr(),
        up.data_ptr(),
        *map(address, made),
        gate.numel(),
        approximate == "tanh",
        kernels.codes[gate.dtype],
        *kernels.place(gate),
    )
    return _in_dtypes(made, dtypes)


def _in_dtypes(
    made: list[Tensor | None], dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = (None if t is None else t.to(dtype) for t, dtype in zip(made, dtypes, strict=True))
    return dgate, dup
