"""Modules that look like what an operator computes; some are it, and some are not."""

import math
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 48


class RMSNorm(nn.Module):
    """As in most decoders: rounded to x's dtype before the weight."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-5) -> None:
        super().__init__()
        self.scale_of_one = 1.0  # a float that is not eps
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden.dtype)


class ShiftedRMSNorm(RMSNorm):
    """A weight that is 1 + weight; for fresh ones of 0 nobody could tell."""

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return wide * (1.0 + self.weight)


class OtherEpsRMSNorm(RMSNorm):
    """An eps that its attribute does not hold."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class DetachedRMSNorm(RMSNorm):
    """The same result with another gradient."""

    def forward(self, hidden: Tensor) -> Tensor:
        variance = hidden.pow(2).mean(-1, keepdim=True).detach()
        return hidden * torch.rsqrt(variance + self.variance_epsilon) * self.weight


class NoisyRMSNorm(RMSNorm):
    """The same when it is evaluated, not when it is trained."""

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(hidden), 0.1, self.training)


class FirstDimRMSNorm(RMSNorm):
    """Over all dims but the first: the same for matrices alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        dims = tuple(range(1, hidden.dim()))
        variance = hidden.pow(2).mean(dims, keepdim=True)
        return hidden * torch.rsqrt(variance + self.variance_epsilon) * self.weight


class HandmadeLayerNorm(nn.Module):
    """Its parameters and eps have names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.gamma = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.small = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.pow(2).mean(-1, keepdim=True) + self.small).sqrt()
        return centred / deviation * self.gamma + self.beta


class SampleLayerNorm(HandmadeLayerNorm):
    """Divides by n - 1."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.var(-1, keepdim=True) + self.small).sqrt() * self.gamma + self.beta


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
        return 0.5 * x * (1.0 + torch.tanh(inner))


class ErfGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ClippedGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x).clip(-10, 10)


class GatedMLP(nn.Module):
    """Gate and up are equal in shape: only what they do tells them apart."""

    def __init__(self, act: nn.Module | None = None, inner: int = 40) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, WIDTH)
        self.act = nn.SiLU() if act is None else act

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * self.act(self.w3(x)))


class LimitedMLP(GatedMLP):
    """Clips what goes into the activation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x) * self.act(self.w3(x).clamp(max=7.0)))


class ScaledMLP(GatedMLP):
    """Does something after its last layer."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * super().forward(x)


class CountingNorm(RMSNorm):
    """Notes each call in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls.append(tuple(hidden.shape))
        return super().forward(hidden)


class ScaledLinear(nn.Linear):
    """Not torch's: with the root of the width, as where weights are kept at one size."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * WIDTH**-0.5
