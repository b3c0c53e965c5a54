"""How close a fused model has to stay to the model as it was, and to float64."""

import math

import torch
from torch import Tensor, nn

UNIT = 2.0**-24


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


def relative(got: Tensor, want: Tensor) -> float:
    exact = want.detach().double()
    return float((got.detach().double() - exact).norm() / exact.norm())
