"""softmax on the host: native kernels, and torch's sum for the gradient of a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, rows_of

_kernels: Any = native.kernels


def _rows_within(tensor: Tensor | None, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask or bias with whole rows of keys, and where in it each row of x begins."""
    if tensor is None:
        return None, None
    whole = tensor.expand(*tensor.shape[:-1], x.shape[-1]).contiguous()
    begins = torch.arange(whole.numel() // max(1, x.shape[-1])) * x.shape[-1]
    begins = begins.view(whole.shape[:-1]).expand(x.shape[:-1])
    return whole, begins.contiguous()


@declared.forward("softmax")
def softmax(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    mask, mask_rows = _rows_within(mask, x)
    bias, bias_rows = _rows_within(bias, x)
    rows, keys = rows_of(x)
    _kernels.softmax_forward(
        *map(address, (x, y, mask, mask_rows, bias, bias_rows)),
        0 if mask is None else mask.numel(),
        0 if bias is None else bias.numel(),
        rows,
        x.shape[-2] if causal else 0,
        keys,
        scale,
        causal,
        CODES[x.dtype],
        CODES[(x if bias is None else bias).dtype],
    )
    return y


def _gradient(grad: Tensor, y: Tensor, scale: float) -> Tensor:
    dx = torch.empty_like(y)
    addresses = (grad.data_ptr(), y.data_ptr(), dx.data_ptr())
    _kernels.softmax_backward(*addresses, *rows_of(y), scale, CODES[y.dtype])
    return dx


@declared.backward("softmax")
def softmax_backward(
    grad: Tensor, y: Tensor, bias: Tensor | None, *, scale: float, causal: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, y = grad.contiguous(), y.contiguous()
    if bias is None or not needs[1]:
        return (_gradient(grad, y, scale) if needs[0] else None), None
    # The sums for the bias go across rows, and are of float32 numbers.
    dscores = _gradient(grad.float(), y.float(), 1.0)
    dbias = dscores.sum_to_size(bias.shape).to(bias.dtype).contiguous()
    return ((dscores * scale).to(y.dtype) if needs[0] else None), dbias
