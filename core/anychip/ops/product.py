"""Products with weights: matrices, convolutions, and the losses behind them."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.linear)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x @ weight.T + bias`` for x (..., K), weight (N, K), bias (N,), all of one dtype.

    The bits of a row may depend on how many rows there are: for 1 to 3 a library takes another
    kernel, as torch does on the host for float32. From 4 rows on they were the same there.

    Args:
        out_dtype: the result's: None for x's, or float32, to which 16-bit products are then
            rounded once. The gradient that comes back is float32 too.
    """
    raise NotImplementedError


@operator(operators.grouped_linear)
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """``x[t] @ weight[g].T`` for each row t of each group g, as a mixture of experts needs it.

    Groups of 1 to 3 rows may have other bits than the same rows in larger ones: :func:`linear`.

    Args:
        x: (T, K) float, sorted by group.
        weight: (G, N, K), x's dtype.
        offsets: (G,) int64 or int32, the end of each group: group g is the rows from
            ``offsets[g - 1]`` (0 for the first) to ``offsets[g] - 1``, and may be empty.
        out_dtype: as of :func:`linear`.

    Returns:
        (T, N); rows from the last offset on are 0.

    Raises:
        ValueError: on a host, offsets that are not sorted or not within 0 to T.
    """
    raise NotImplementedError


@operator(operators.conv1d)
def conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Causal depthwise convolution: ``y[t] = bias + sum of weight[k] x[t + k + 1 - K]``.

    Each channel has a kernel of its own, and sees zeros before the start.

    Args:
        x: (N, C, T) float.
        weight: (C, K), bias: (C,), both x's dtype.

    Source: Gu and Dao 2023, arXiv:2312.00752, where it goes before the state space.
    """
    raise NotImplementedError


@operator(operators.conv2d)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolution over two dims, as ``torch.nn.functional.conv2d``; a pad is a number of zeros.

    Args:
        x: (N, C, H, W) float.
        weight: (O, C / groups, KH, KW), bias: (O,), both x's dtype.
        stride, padding, dilation: for both dims, or for each.
        groups: O / groups outputs see C / groups channels each.
    """
    raise NotImplementedError


@operator(operators.embedding)
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """``weight[indices]`` for int64 indices of any shape and weight (V, H).

    An index outside 0 to V - 1 is an IndexError on a host; on a device it is not looked for.
    """
    raise NotImplementedError


@operator(operators.cross_entropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross entropy of logits (..., V) with class indices target (...), in float32.

    Args:
        ignore_index: rows with this target count for nothing.
        label_smoothing: share of the target that is spread over all classes.
        z_loss: factor of log(sum exp logits)^2 per row.
        reduction: over rows that are not ignored; a mean over none is NaN.

    Returns:
        float32, 0-dim, or the shape of target for ``none``.
    """
    raise NotImplementedError


@operator(operators.linear_cross_entropy)
def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *,
    ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:  # fmt: skip
    """``cross_entropy(linear(x, weight, bias), target)`` that never holds the logits of all rows.

    The logits are float32, also for 16-bit arguments.

    Args:
        x: (..., K) float.
        weight: (V, K), bias: (V,), both x's dtype.
        target: (...) int64.
        ignore_index, label_smoothing, z_loss, reduction: as in :func:`cross_entropy`.

    Returns:
        float32, 0-dim, or the shape of target for ``none``.

    Source: Wijmans et al. 2024, arXiv:2411.09009.
    """
    raise NotImplementedError


@operator(operators.linear_cross_entropy_partials)
def linear_cross_entropy_partials(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, first: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """What a loss needs of a part of the vocabulary: classes ``first`` to ``first + V - 1``.

    Parts are joined by lse: the loss of all classes is ``lse - picked``, where ``lse`` is the
    logsumexp of the parts' and ``picked`` and ``total`` are their sums. Label smoothing takes
    ``total`` over the number of classes, a z-loss ``lse``. By hand, :meth:`backward` takes the lse
    of all classes in the place of the part's, and the gradient of that.

    Args:
        x: (..., K) float.
        weight: (V, K), bias: (V,), both x's dtype.
        target: (...) int64, a number among all classes; one of another part, or of none, counts
            for nothing here.

    Returns:
        lse, log of the sum of exponentials of the logits; picked, the target's logit or 0; total,
        the sum of the logits: all float32 (...).

    Source: Shoeybi et al. 2019, arXiv:1909.08053, section 3; Wijmans et al. 2024, arXiv:2411.09009.
    """
    raise NotImplementedError
