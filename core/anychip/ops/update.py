"""Updates of parameters, and what comes before them, over lists of tensors."""

from collections.abc import Sequence

from torch import Tensor

from anychip import operators
from anychip.dispatch.operator import operator


@operator(operators.l2_norm)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Euclidean norm over all entries of all tensors: 0-dim float32. Not differentiable."""
    raise NotImplementedError


@operator(operators.sums_of_squares)
def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Exact sums of squares, for norms that have the same bits however tensors are cut.

    Args:
        tensors: at least one, of any float dtypes; each the whole, or any part of one.

    Returns:
        (len(tensors), 21) int64: digits in base 2^32 of the sum as a multiple of 2^-298, the lowest
        first, the number of infinities, and that of NaN. Rows of parts add up to that of the whole,
        in any order; ``anychip.operators.squares.root`` makes norms of rows or of their sums.
    """
    raise NotImplementedError


@operator(operators.clip)
def clip(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float = 1.0) -> None:
    """Scales the tensors in place by ``min(1, max_norm / (norm + 1e-6))``; norm 0-dim float32."""
    raise NotImplementedError


@operator(operators.unscale_and_check)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    """Divides gradients in place by ``scale``; sets ``found_inf`` to 1 if one is not finite.

    Args:
        scale, found_inf: 0-dim float32. found_inf is never set back to 0.
    """
    raise NotImplementedError


@operator(operators.adamw)
def adamw(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], lr: Tensor, step: Tensor, scale: Tensor | None = None,
    clip: Tensor | None = None, found_inf: Tensor | None = None,
    low_precision: Sequence[Tensor] | None = None, *, beta1: float = 0.9, beta2: float = 0.999,
    eps: float = 1e-8, weight_decay: float = 0.01,
) -> None:  # fmt: skip
    """One AdamW step over lists of tensors, in place and in one pass.

    Args:
        params: float, written. grads: float. exp_avgs, exp_avg_sqs: float32, written.
        lr: 0-dim float32.
        step: 0-dim float32, updates done so far; written, plus one.
        scale: 0-dim float32 loss scale; gradients are divided by it.
        clip: 0-dim float32 coefficient; gradients are multiplied by it.
        found_inf: 0-dim float32; when it is not 0, nothing is written, step included.
        low_precision: written with the new params in their own dtype.

    Raises:
        OverlapError: two arguments share memory. Nothing was written.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    raise NotImplementedError


@operator(operators.adamw_8bit)
def adamw_8bit(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor], lr: Tensor, step: Tensor, scale: Tensor | None = None,
    clip: Tensor | None = None, found_inf: Tensor | None = None,
    low_precision: Sequence[Tensor] | None = None, *, beta1: float = 0.9, beta2: float = 0.999,
    eps: float = 1e-8, weight_decay: float = 0.01,
) -> None:  # fmt: skip
    """:func:`adamw` with both averages in 8 bits, decoded and encoded in the same pass.

    The parameters move by the averages before they are rounded. A number that is not finite
    spoils the averages of its block of 256 elements, from the next step on.

    Args:
        exp_avgs, exp_avg_sqs: uint8 codes in the shape of params, written; zeros at the start.
        exp_avg_scales, exp_avg_sq_scales: float32, one per 256 elements of each flattened
            parameter, (ceil(numel / 256),), written; zeros at the start.
        params, grads, lr, step, scale, clip, found_inf, low_precision: see :func:`adamw`.

    Raises:
        OverlapError: two arguments share memory. Nothing was written.

    Source: Dettmers et al. 2022, arXiv:2110.02861, section 2; the codes are described in
    :mod:`anychip.operators.adamw_8bit`.
    """
    raise NotImplementedError


@operator(operators.sgd)
def sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], momentum_buffers: Sequence[Tensor],
    lr: Tensor, step: Tensor, scale: Tensor | None = None, clip: Tensor | None = None,
    found_inf: Tensor | None = None, low_precision: Sequence[Tensor] | None = None, *,
    momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0,
    decoupled: bool = False,
) -> None:  # fmt: skip
    """One step of gradient descent over lists of tensors, in place; as torch.optim.SGD.

    Args:
        momentum_buffers: float32, written; zeros before the first step. Empty without momentum.
        weight_decay: added to the gradient, times the parameter; with ``decoupled`` the parameter
            is multiplied by ``1 - lr * weight_decay`` instead.
        params, grads, lr, step, scale, clip, found_inf, low_precision: see :func:`adamw`.

    Source: Sutskever et al. 2013, PMLR 28(3):1139.
    """
    raise NotImplementedError


@operator(operators.lion)
def lion(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], lr: Tensor,
    step: Tensor, scale: Tensor | None = None, clip: Tensor | None = None,
    found_inf: Tensor | None = None, low_precision: Sequence[Tensor] | None = None, *,
    beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.0,
) -> None:  # fmt: skip
    """One Lion step over lists of tensors, in place: each element moves by lr, or not at all.

    Args:
        exp_avgs: float32, written.
        params, grads, lr, step, scale, clip, found_inf, low_precision: see :func:`adamw`.

    Source: Chen et al. 2023, arXiv:2302.06675, algorithm 2.
    """
    raise NotImplementedError


@operator(operators.lamb_sums_of_squares)
def lamb_sums_of_squares(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], step: Tensor, scale: Tensor | None = None,
    clip: Tensor | None = None, *, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6,
    weight_decay: float = 0.01,
) -> Tensor:  # fmt: skip
    """Sums of squares of parameters (row 0) and of LAMB's steps (row 1); nothing is written.

    Args:
        params, grads, exp_avgs, exp_avg_sqs, step, scale, clip: as :func:`lamb` is given them.

    Returns:
        (2, len(params), 21) int64 as of :func:`sums_of_squares`.
        ``anychip.operators.lamb.trust_ratios`` makes it the ``trust`` of :func:`lamb`, once it is
        added up over all shards.
    """
    raise NotImplementedError


@operator(operators.lamb)
def lamb(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], lr: Tensor, step: Tensor, scale: Tensor | None = None,
    clip: Tensor | None = None, found_inf: Tensor | None = None,
    low_precision: Sequence[Tensor] | None = None, trust: Tensor | None = None, *,
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-6, weight_decay: float = 0.01,
) -> None:  # fmt: skip
    """One LAMB step over lists of tensors, in place: AdamW's step times ``||w|| / ||u||``.

    Args:
        trust: float32, one ratio per tensor; None: computed here, from tensors that are whole.
        params, grads, exp_avgs, exp_avg_sqs, lr, step, scale, clip, found_inf, low_precision: see
            :func:`adamw`.

    Source: You et al. 2019, arXiv:1904.00962, algorithm 2.
    """
    raise NotImplementedError
