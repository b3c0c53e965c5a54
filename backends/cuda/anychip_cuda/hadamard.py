"""Rows of hadamard, in blocks of up to 32,768: a longer one does not fit a block's registers."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cuda.native import Kernels
from anychip_cuda.table import Needs, declared

_LONGEST = 32_768


@declared.forward("hadamard", limits={"block": range(1, _LONGEST + 1)})
def hadamard(kernels: Kernels, x: Tensor, *, block: int | None) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    kernels.native.hadamard(
        x.data_ptr(),
        y.data_ptr(),
        x.numel(),
        x.shape[-1] if block is None else block,
        kernels.codes[x.dtype],
        *kernels.place(x),
    )
    return y


def _is_short(grad: Tensor, *, block: int | None, **_: object) -> bool:
    return (grad.shape[-1] if block is None else block) <= _LONGEST


@declared.backward("hadamard", accepts=_is_short)
def hadamard_backward(
    kernels: Kernels, grad: Tensor, *, block: int | None, needs: Needs
) -> tuple[Tensor]:
    """The matrix is symmetric: the transform is its own gradient."""
    return (hadamard(kernels, grad, block=block),)
