"""Normalisation over the last dim, alone and after a residual sum; over groups of channels."""

from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    """Root-mean-square norm over the last dim: ``x / sqrt(mean(x^2) + eps) * weight``.

    Args:
        x: (..., H) float.
        weight: (H,) float, x's dtype or float32.
        eps: added to the mean square.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    raise NotImplementedError


@operator(operators.layer_norm)
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    """Layer norm over the last dim: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: (..., H) float.
        weight, bias: (H,) float, x's dtype or float32.
        eps: added to the (biased) variance.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    raise NotImplementedError


@operator(operators.group_norm)
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, num_groups: int, eps: float = 1e-5
) -> Tensor:
    """Norm over each group of channels: ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Args:
        x: (N, C, ...) float.
        weight, bias: (C,) float, x's dtype or float32.
        num_groups: how many groups of C / num_groups channels that follow each other.
        eps: added to the (biased) variance.

    Source: Wu and He 2018, arXiv:1803.08494.
    """
    raise NotImplementedError


@operator(operators.add_rms_norm)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """RMS norm of the sum ``x + residual``, and the sum itself for the next block.

    The sum is rounded to residual's dtype, and what is normed is the rounded sum.

    Args:
        x: (..., H) float, what a block adds to the residual stream.
        residual: (..., H) float, the stream.
        weight: (H,) float, x's dtype or float32.
        eps: added to the mean square.

    Returns:
        y: (..., H) in x's dtype.
        sum: (..., H) in residual's dtype; gradients flow through both.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    raise NotImplementedError


@operator(operators.add_layer_norm)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Layer norm of the sum ``x + residual``, and the sum itself for the next block.

    The sum is rounded to residual's dtype, and what is normed is the rounded sum.

    Args:
        x: (..., H) float, what a block adds to the residual stream.
        residual: (..., H) float, the stream.
        weight, bias: (H,) float, x's dtype or float32.
        eps: added to the (biased) variance.

    Returns:
        y: (..., H) in x's dtype.
        sum: (..., H) in residual's dtype; gradients flow through both.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    raise NotImplementedError


@operator(operators.dropout_add_rms_norm)
def dropout_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, rows: Tensor | None = None, *,
    p: float = 0.5, eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """RMS norm of the sum ``residual + dropout(x)``, and the sum itself for the next block.

    The sum is that of :func:`bias_dropout_add`, rounded to residual's dtype; what is normed is the
    rounded sum.

    Args:
        x: (..., H) float, what a block adds to the residual stream.
        residual: (..., H) float, the stream.
        weight: (H,) float, x's dtype or float32.
        rng, rows: as in :func:`dropout`, of a whole that is H wide.
        p: probability of dropping an element of x, 0 to 1.
        eps: added to the mean square.

    Returns:
        y: (..., H) in x's dtype.
        sum: (..., H) in residual's dtype; gradients flow through both.

    Source: Srivastava et al. 2014, JMLR 15; Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    raise NotImplementedError


@operator(operators.dropout_add_layer_norm)
def dropout_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, bias: Tensor | None = None,
    rows: Tensor | None = None, *, p: float = 0.5, eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Layer norm of the sum ``residual + dropout(x)``, and the sum itself for the next block.

    The sum is that of :func:`bias_dropout_add`, rounded to residual's dtype; what is normed is the
    rounded sum.

    Args:
        x: (..., H) float, what a block adds to the residual stream.
        residual: (..., H) float, the stream.
        weight, bias: (H,) float, x's dtype or float32.
        rng, rows: as in :func:`dropout`, of a whole that is H wide.
        p: probability of dropping an element of x, 0 to 1.
        eps: added to the (biased) variance.

    Returns:
        y: (..., H) in x's dtype.
        sum: (..., H) in residual's dtype; gradients flow through both.

    Source: Srivastava et al. 2014, JMLR 15; Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """
    raise NotImplementedError
