"""What costs and sharding rules ask of arguments: bytes, and the dims that are rows."""

import torch
from torch import Tensor

Needs = tuple[bool, ...]
"""Which of the differentiable arguments a backward has to give the gradients of."""


def nbytes(*tensors: Tensor | None) -> int:
    """Bytes of all of them; one that is not given has none."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def empty_like(x: Tensor) -> Tensor:
    """Of the shape and dtype, and contiguous."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def batch_dims(x: Tensor) -> range:
    """All dims but the last."""
    return range(x.dim() - 1)
