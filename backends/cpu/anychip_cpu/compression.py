"""hadamard and top_k on the host, mapped to torch's matrix product and selection."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from anychip_cpu.table import Needs, declared

_FACTOR = 64
"""Largest matrix of signs: up to it a product is faster than the additions one by one."""


@functools.cache
def _signs(length: int) -> Tensor:
    """Sylvester's matrix; symmetric."""
    matrix = torch.ones(1, 1, dtype=torch.float32)
    while matrix.shape[0] < length:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


@declared.forward("hadamard", kind="mapped")
def hadamard(x: Tensor, *, block: int | None) -> Tensor:
    length = x.shape[-1] if block is None else block
    y = x.float().reshape(-1, length) if x.numel() else x.float()
    inner = 1
    # H of n is the Kronecker product of smaller ones: one product per group of bits of the index.
    while inner < length and x.numel():
        size = min(_FACTOR, length // inner)
        if inner == 1:
            y = y.reshape(-1, size) @ _signs(size)
        else:
            y = _signs(size) @ y.reshape(-1, size, inner)
        inner *= size
    return (y.reshape(x.shape) * (1.0 / math.sqrt(length))).to(x.dtype).contiguous()


@declared.backward("hadamard", kind="mapped")
def hadamard_backward(grad: Tensor, *, block: int | None, needs: Needs) -> tuple[Tensor]:
    return (hadamard(grad, block=block),)


@declared.forward("top_k", kind="mapped")
def top_k(x: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    # One integer per element, all of a row different: the bits of |x|, which are in the order of
    # the magnitudes (NaN, made one and the same, above Inf), then the index, the lower the larger.
    size = x.abs().float()
    size = torch.where(size.isnan(), torch.nan, size)
    last = max(x.shape[-1] - 1, 0)
    index = torch.arange(last, last - x.shape[-1], -1)
    keys = (size.view(torch.int32).to(torch.int64) << 32) | index
    indices = last - (torch.topk(keys, k, dim=-1).values & 0xFFFFFFFF)
    return x.gather(-1, indices), indices


@declared.backward("top_k", kind="mapped")
def top_k_backward(
    grad: Tensor, _: Tensor, x: Tensor, indices: Tensor, *, k: int, needs: Needs
) -> tuple[Tensor]:
    return (torch.zeros(x.shape, dtype=x.dtype).scatter_(-1, indices, grad.to(x.dtype)),)
