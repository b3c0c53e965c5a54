"""hadamard and top_k on the host: native kernels; the gradient of top_k is torch's scatter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared, rows_of

_kernels: Any = native.kernels


@declared.forward("hadamard")
def hadamard(x: Tensor, *, block: int | None) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    length = x.shape[-1] if block is None else block
    _kernels.hadamard(x.data_ptr(), y.data_ptr(), x.numel(), length, CODES[x.dtype])
    return y


@declared.backward("hadamard")
def hadamard_backward(grad: Tensor, *, block: int | None, needs: Needs) -> tuple[Tensor]:
    return (hadamard(grad, block=block),)


def _has_places(x: Tensor, *, k: int) -> bool:
    """Whether 32 bits tell the elements of a row apart."""
    return x.shape[-1] <= 1 << 32


@declared.forward("top_k", accepts=_has_places)
def top_k(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    shape = (*x.shape[:-1], k)
    y, indices = torch.empty(shape, dtype=x.dtype), torch.empty(shape, dtype=torch.int64)
    addresses = (x.data_ptr(), y.data_ptr(), indices.data_ptr())
    _kernels.top_k(*addresses, *rows_of(x), k, CODES[x.dtype])
    return y, indices


@declared.backward("top_k", kind="mapped")
def top_k_backward(
    grad: Tensor, _: Tensor, x: Tensor, indices: Tensor, *, k: int, needs: Needs
) -> tuple[Tensor]:
    return (torch.zeros(x.shape, dtype=x.dtype).scatter_(-1, indices, grad.to(x.dtype)),)
