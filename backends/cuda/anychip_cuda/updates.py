"""Rows of update rules: adamw, adamw_8bit, sgd, lion, lamb and lamb_partials.

A step is one launch of a single thread, which turns the scalars on the device into factors and
counts the step, and then one launch per 64 tensors. Nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor

from anychip.operators.partials import BLOCK, num_blocks
from anychip_cuda.lists import (
    MOST_BLOCK,
    addresses,
    by_copies,
    codes,
    contiguous,
    described,
    partials_like,
    placed,
)
from anychip_cuda.native import Kernels, address
from anychip_cuda.table import declared

_NO_BETA = 0.0
_GRADS = (1,)


def _update(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    low_precision: Sequence[Tensor] | None,
) -> Any:
    """The lists as the kernels take them; a rule has two states at most."""
    first, second = (*states, (), ())[:2]
    low = low_precision or ()
    return kernels.native.Update(
        *described(kernels, params),
        addresses(grads),
        codes(kernels, grads),
        addresses(first),
        addresses(second),
        addresses(low),
        codes(kernels, low),
    )


def _begin(
    kernels: Kernels,
    lr: Tensor | None,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    *,
    beta1: float = _NO_BETA,
    beta2: float = _NO_BETA,
    weight_decay: float,
    counts: bool = True,
) -> Tensor:
    """Queues the launch that counts the step, and returns where it leaves its factors."""
    factors = step.new_empty((kernels.native.STEP_FACTORS,))
    kernels.native.begin_step(
        address(lr),
        step.data_ptr(),
        address(scale),
        address(clip),
        address(found_inf),
        beta1,
        beta2,
        weight_decay,
        counts,
        factors.data_ptr(),
        *kernels.place(step),
    )
    return factors


@declared.forward("adamw", contiguous=True)
def adamw(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    update = _update(kernels, params, grads, (exp_avgs, exp_avg_sqs), low_precision)
    scalars = (lr, step, scale, clip, found_inf)
    factors = _begin(kernels, *scalars, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    kernels.native.adamw(update, factors.data_ptr(), beta1, beta2, eps, *kernels.place(step))


@declared.forward("adamw_8bit", contiguous=True)
def adamw_8bit(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_scales: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    exp_avg_sq_scales: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    low = low_precision or ()
    update = kernels.native.CodedUpdate(
        *described(kernels, params),
        addresses(grads),
        codes(kernels, grads),
        addresses(exp_avgs),
        addresses(exp_avg_scales),
        addresses(exp_avg_sqs),
        addresses(exp_avg_sq_scales),
        addresses(low),
        codes(kernels, low),
    )
    scalars = (lr, step, scale, clip, found_inf)
    factors = _begin(kernels, *scalars, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    kernels.native.adamw_8bit(update, factors.data_ptr(), beta1, beta2, eps, *kernels.place(step))


@declared.forward("sgd", contiguous=True)
def sgd(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    momentum: float,
    nesterov: bool,
    weight_decay: float,
    decoupled: bool,
) -> None:
    update = _update(kernels, params, grads, (momentum_buffers,), low_precision)
    factors = _begin(kernels, lr, step, scale, clip, found_inf, weight_decay=weight_decay)
    kernels.native.sgd(
        update,
        factors.data_ptr(),
        momentum,
        nesterov,
        weight_decay,
        decoupled,
        *kernels.place(step),
    )


@declared.forward("lion", contiguous=True)
def lion(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    update = _update(kernels, params, grads, (exp_avgs,), low_precision)
    factors = _begin(kernels, lr, step, scale, clip, found_inf, weight_decay=weight_decay)
    kernels.native.lion(update, factors.data_ptr(), beta1, beta2, *kernels.place(step))


@declared.forward("lamb", contiguous=True)
def lamb(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    trust: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    moments = (exp_avgs, exp_avg_sqs)
    update = _update(kernels, params, grads, moments, low_precision)
    scalars = (lr, step, scale, clip, found_inf)
    factors = _begin(kernels, *scalars, beta1=beta1, beta2=beta2, weight_decay=weight_decay)
    numbers = (beta1, beta2, eps, weight_decay)
    place = kernels.place(step)
    if trust is None:
        measured = update if not low_precision else _update(kernels, params, grads, moments, None)
        trust = _measured_trust(kernels, measured, params, factors, numbers)
    trust = trust.contiguous()
    kernels.native.lamb(update, factors.data_ptr(), trust.data_ptr(), *numbers, *place)


def _measured_trust(
    kernels: Kernels,
    update: Any,
    params: Sequence[Tensor],
    factors: Tensor,
    numbers: tuple[float, ...],
) -> Tensor:
    """Trust ratios of whole tensors, the same bits as from lamb_partials and trust_ratios."""
    starts = list(accumulate((num_blocks(p.numel()) for p in params), initial=0))
    total, place = starts[-1], kernels.place(factors)
    partials = factors.new_empty((2, total))
    trust = factors.new_empty((len(params),))
    kernels.native.lamb_partials(
        update, factors.data_ptr(), *numbers, starts[:-1], BLOCK, total, partials.data_ptr(), *place
    )
    kernels.native.trust_ratios(partials.data_ptr(), starts, trust.data_ptr(), *place)
    return trust


@declared.forward("lamb_partials", accepts=lambda *_, block, **__: block <= MOST_BLOCK)
def lamb_partials(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    """By blocks of at most MOST_BLOCK elements."""
    given = (params, grads, exp_avgs, exp_avg_sqs)
    params, grads, *moments = (contiguous(tensors) for tensors in given)
    first, total = placed(params, offsets, sizes, block)
    found = partials_like(step, (2, total), offsets, sizes)
    factors = _begin(
        kernels,
        *(None, step, scale, clip, None),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        counts=False,
    )
    kernels.native.lamb_partials(
        _update(kernels, params, grads, moments, None),
        factors.data_ptr(),
        *(beta1, beta2, eps, weight_decay),
        first,
        block,
        total,
        found.data_ptr(),
        *kernels.place(step),
    )
    return found


declared.forward("adamw")(by_copies(adamw, reads=_GRADS))
declared.forward("adamw_8bit")(by_copies(adamw_8bit, reads=_GRADS))
declared.forward("sgd")(by_copies(sgd, reads=_GRADS))
declared.forward("lion")(by_copies(lion, reads=_GRADS))
declared.forward("lamb")(by_copies(lamb, reads=_GRADS))
