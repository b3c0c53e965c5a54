"""Rows of activations: gelu, bias_gelu, swiglu, geglu."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.columns import column_sums, rows_of
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


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
    parts, partial = column_sums(kernels, x, wanted=needs[1])
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
