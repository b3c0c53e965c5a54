"""How close a fused model has to stay to the model as it was, and to float64."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

UNIT = 2.0**-24
LR, STEPS, EPS = 1e-2, 3, 1.0
"""Of AdamW. With eps = 1 a step is Lipschitz in the gradient: see :func:`parameter_bound`."""


def scramble(model: nn.Module) -> None:
    """Weights of the order of 1 / sqrt(width), so that every term matters for the gradients."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            noise = torch.randn(param.shape, generator=generator)
            if param.dim() == 2:
                param.copy_(noise / math.sqrt(param.shape[1]))
            else:
                param.add_(0.3 * noise)


def gradient_bound(layers: int, longest: int) -> float:
    """Bound of ||g - g64|| / ||g64|| for one float32 evaluation of a decoder.

    An operator's result has a normwise relative error of sqrt(n) u in the statistical sense
    (Higham and Mary 2019, SIAM J. Sci. Comput. 41), n its longest reduction. A layer is a chain of
    at most 9 operators forward and 9 backward (q and k norms included), head and embedding count
    as one more; errors of a chain are independent and add in quadrature. Twice that, for
    amplification by softmax and norms.
    """
    return 2 * math.sqrt(18 * (layers + 1) * longest) * UNIT


def parameter_bound(model: nn.Module, gradient: float, largest: float) -> float:
    """Bound of the distance of two parameters after the steps of AdamW.

    A step is lr m / (sqrt(v) + eps), m an average of gradients and sqrt(v) a norm of them. When the
    gradients differ by d, m and sqrt(v) do by at most d each, and |m| is at most 2 sqrt(v) over
    three steps: a step differs by at most lr (1 + 2) d / eps. d = 2 bounds times the largest
    gradient. Twice that, since later gradients are those of parameters that differ already; and
    the parameters themselves are rounded.
    """
    size = max(float(p.detach().norm()) for p in model.parameters())
    return 2 * STEPS * LR * 3 * (2 * gradient * largest) / EPS + STEPS * 2 * UNIT * size


def relative(got: Tensor, want: Tensor) -> float:
    exact = want.detach().double()
    return float((got.detach().double() - exact).norm() / exact.norm())


def furthest(model: nn.Module, other: nn.Module) -> float:
    """Largest distance of a parameter from the other model's."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((ours.detach() - theirs.detach()).norm()) for ours, theirs in pairs)


def train(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> tuple[list[float], float]:
    """Three steps of AdamW; the losses, and the largest norm of a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS)
    losses, largest = [], 0.0
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        largest = max(largest, *(float(p.grad.norm()) for p in model.parameters()))
        optimizer.step()
        losses.append(value.item())
    return losses, largest
