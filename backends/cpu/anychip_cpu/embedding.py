"""embedding on the host: rows copied by the native kernels, and their gradients added up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared

_kernels: Any = native.kernels


@declared.forward("embedding")
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    indices, weight = indices.contiguous(), weight.contiguous()
    y = torch.empty((*indices.shape, weight.shape[1]), dtype=weight.dtype)
    addresses = (weight.data_ptr(), indices.data_ptr(), 0, y.data_ptr())
    code = CODES[weight.dtype]
    _kernels.sum_rows(*addresses, indices.numel(), 1, *weight.shape, code, code)
    return y


@declared.backward(
    "embedding", accepts=lambda grad, _, weight, **__: bool(grad.dtype == weight.dtype)
)
def embedding_backward(
    grad: Tensor, indices: Tensor, weight: Tensor, *, needs: Needs
) -> tuple[Tensor]:
    grad, indices = grad.contiguous(), indices.contiguous()
    total = torch.empty(weight.shape, dtype=weight.dtype)
    addresses = (grad.data_ptr(), indices.data_ptr(), 0, total.data_ptr())
    (rows, width), code = weight.shape, CODES[grad.dtype]
    _kernels.sum_rows_by_index(*addresses, rows, 1, indices.numel(), width, code, code)
    return (total,)
