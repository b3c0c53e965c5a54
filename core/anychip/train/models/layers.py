"""torch's layers with ``anychip.ops`` inside: same parameters, same names, same initial values."""

from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.train import random


class Linear(nn.Linear):
    """``nn.Linear`` through ``ops.linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """``nn.Embedding`` through ``ops.embedding``."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.embedding(input, self.weight)


class LayerNorm(nn.LayerNorm):
    """``nn.LayerNorm`` over the last dim; with a residual of the sum with it, which comes too."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return _for_products(ops.layer_norm(input, self.weight, self.bias, eps=self.eps))
        return ops.add_layer_norm(input, residual, self.weight, self.bias, eps=self.eps)


class RMSNorm(nn.Module):
    """As :class:`LayerNorm`, by the root mean square alone, with a weight that starts at one."""

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        if residual is None:
            return _for_products(ops.rms_norm(x, self.weight, eps=self.eps))
        return ops.add_rms_norm(x, residual, self.weight, eps=self.eps)


def _for_products(x: Tensor) -> Tensor:
    """What products take under autocast: cast here once, not by each of those that share x."""
    kind = x.device.type  # meta, of a plan, has no autocast
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return x.to(torch.get_autocast_dtype(kind)) if on and x.dtype == torch.float32 else x


class Dropout(nn.Module):
    """``ops.dropout`` with a fresh (seed, offset) per call; the identity when not training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return ops.dropout(x, random.draw(x.device), p=self.p)
