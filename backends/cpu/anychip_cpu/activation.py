"""Activations on the host, one pair of native kernels for all: alone, gated, and after a bias.

Each is float32 inside, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, have_one_dtype, rows_of

_kernels: Any = native.kernels


def _activated(
    name: str,
    x: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    beta: float = 1.0,
    threshold: float = 0.0,
) -> Tensor:
    """f(x), f(x) * up or f(x + bias)."""
    x = x.contiguous()
    up, bias = (None if t is None else t.contiguous() for t in (up, bias))
    y = torch.empty_like(x)
    _kernels.activation_forward(
        *map(address, (x, up, bias, y)),
        *rows_of(x),
        getattr(_kernels, name),
        beta,
        threshold,
        CODES[x.dtype],
        CODES[(x if bias is None else bias).dtype],
    )
    return y


def _gradients(
    name: str,
    grad: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    needs: Needs,
    beta: float = 1.0,
    threshold: float = 0.0,
) -> tuple[Tensor | None, ...]:
    """Of x and of up or the bias, as far as they are wanted."""
    grad, x = grad.contiguous(), x.contiguous()
    up, bias = (None if t is None else t.contiguous() for t in (up, bias))
    other = up if bias is None else bias
    dx = torch.empty_like(x) if needs[0] else None
    dother = torch.empty_like(other) if other is not None and needs[1] else None
    dup, dbias = (dother, None) if bias is None else (None, dother)
    _kernels.activation_backward(
        *map(address, (grad, x, up, bias, dx, dup, dbias)),
        *rows_of(x),
        getattr(_kernels, name),
        beta,
        threshold,
        CODES[x.dtype],
        CODES[(x if bias is None else bias).dtype],
    )
    return (dx, dother)[: len(needs)]


def _declare_alone(name: str) -> None:
    """Rows of an operator of one tensor, whose attributes are the kernel's."""
    number = name.upper()

    @declared.forward(name)
    def forward(x: Tensor, **attrs: Any) -> Tensor:
        return _activated(number, x, **attrs)

    @declared.backward(name)
    def backward(grad: Tensor, x: Tensor, **attrs: Any) -> tuple[Tensor | None, ...]:
        return _gradients(number, grad, x, **attrs)


for _name in ("silu", "relu", "relu2", "sigmoid", "tanh", "softplus"):
    _declare_alone(_name)


def _gelu(approximate: str) -> str:
    return "GELU_TANH" if approximate == "tanh" else "GELU"


@declared.forward("gelu")
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    return _activated(_gelu(approximate), x)


@declared.backward("gelu")
def gelu_backward(
    grad: Tensor, x: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, ...]:
    return _gradients(_gelu(approximate), grad, x, needs=needs)


@declared.forward("bias_gelu")
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    return _activated(_gelu(approximate), x, None, bias)


@declared.backward("bias_gelu")
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, ...]:
    return _gradients(_gelu(approximate), grad, x, None, bias, needs=needs)


@declared.forward("swiglu", accepts=have_one_dtype)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _activated("SILU", gate, up)


@declared.backward("swiglu", accepts=lambda grad, gate, up, **_: have_one_dtype(gate, up))
def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, needs: Needs
) -> tuple[Tensor | None, ...]:
    return _gradients("SILU", grad, gate, up, needs=needs)


@declared.forward("geglu")
def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    if gate.dtype != up.dtype:
        # The kernel takes one dtype for both.
        return _activated(_gelu(approximate), gate.float(), up.float()).to(gate.dtype)
    return _activated(_gelu(approximate), gate, up)


@declared.backward("geglu")
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, ...]:
    if gate.dtype == up.dtype:
        return _gradients(_gelu(approximate), grad, gate, up, needs=needs)
    wide = (t.float() for t in (grad, gate, up))
    found = _gradients(_gelu(approximate), *wide, needs=needs)
    return tuple(
        None if t is None else t.to(like.dtype) for t, like in zip(found, (gate, up), strict=True)
    )
