"""Activations, element by element; dropout, whose mask is the same on every chip."""

from typing import Literal

from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.gelu)
def gelu(x: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Gaussian error linear unit, exact or with the tanh approximation.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    raise NotImplementedError


@operator(operators.silu)
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, also named swish.

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118.
    """
    raise NotImplementedError


@operator(operators.relu)
def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``; NaN stays NaN, and the gradient at 0 is 0."""
    raise NotImplementedError


@operator(operators.relu2)
def relu2(x: Tensor) -> Tensor:
    """``max(x, 0)^2``, the square of relu.

    Source: So et al. 2021, arXiv:2109.08668.
    """
    raise NotImplementedError


@operator(operators.sigmoid)
def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    raise NotImplementedError


@operator(operators.tanh)
def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    raise NotImplementedError


@operator(operators.softplus)
def softplus(x: Tensor, *, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """``log(1 + exp(beta x)) / beta``, and x itself where ``beta x`` is above the threshold.

    Args:
        beta: above 0.
    """
    raise NotImplementedError


@operator(operators.bias_gelu)
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``gelu(x + bias)``, exact or with the tanh approximation; the sum is not rounded.

    Args:
        x: (..., H) float.
        bias: (H,) float.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    raise NotImplementedError


@operator(operators.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``gate * sigmoid(gate) * up``, both of one shape.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    raise NotImplementedError


@operator(operators.geglu)
def geglu(gate: Tensor, up: Tensor, *, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """``gelu(gate) * up``, both of one shape; exact or with the tanh approximation.

    Source: Shazeer 2020, arXiv:2002.05202.
    """
    raise NotImplementedError


@operator(operators.dropout)
def dropout(
    x: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    p: float = 0.5,
    width: int = 0,
    column: int = 0,
) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p).

    The mask is a function of ``rng`` and the element's index alone: word ``i % 4`` of the
    Philox4x32-10 block at counter ``offset + i // 4``. The same on every chip. With rows it is that
    of a part of a whole tensor: element j of row i has the index ``rows[i] * width + column + j``,
    so that shards, however they are cut, and recomputed parts have the mask of the whole.

    Args:
        x: float, any shape; with rows at least one dim.
        rng: int64[2] (seed, offset). The call uses ``ceil(numel / 4)`` counters from offset on,
            with rows those of the whole.
        rows: int64, of x's shape without the last dim: the number of each row in the whole. A
            negative one is not looked for; it draws the words before offset, the same everywhere.
        p: from 0 to 1.
        width: of the whole's rows, at least ``column + x.shape[-1]``; 0 without rows.
        column: of the whole, at which x begins.
    """
    raise NotImplementedError


@operator(operators.bias_dropout_add)
def bias_dropout_add(
    x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None = None,
    rows: Tensor | None = None, *, p: float = 0.5, width: int = 0, column: int = 0,
) -> Tensor:  # fmt: skip
    """``residual + dropout(x + bias, rng, p)`` in residual's dtype, rounded once.

    Args:
        x: (..., H) float.
        residual: (..., H), x's dtype or float32.
        rng, rows, width, column: as in :func:`dropout`.
        bias: (H,) float.
        p: from 0 to 1.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 5.4.
    """
    raise NotImplementedError
