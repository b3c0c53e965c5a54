"""torch's layers with ``anychip.ops`` inside: same parameters, same names, same initial values."""

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
    """``nn.LayerNorm`` over the last dim through ``ops.layer_norm``."""

    def forward(self, input: Tensor) -> Tensor:
        return ops.layer_norm(input, self.weight, self.bias, eps=self.eps)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with a weight that starts at one."""

    def __init__(self, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, eps=self.eps)


class Dropout(nn.Module):
    """``ops.dropout`` with a fresh (seed, offset) per call; the identity when not training."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        return ops.dropout(x, random.draw(x.device), p=self.p)
