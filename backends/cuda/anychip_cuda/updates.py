"""Rows of update rules: adamw, adamw_8bit, sgd, lion, lamb and lamb_sums_of_squares.

A step is one launch of a single thread, which turns the scalars on the device into factors and
counts the step, and then one launch per 64 tensors. Nothing is read by the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.squares import WIDTH
from anychip_cuda.lists import addresses, by_copies, codes, contiguous, described
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
        sums = _measured(kernels, measured, len(params), factors, numbers)
        trust = factors.new_empty((len(params),), dtype=torch.float32)
        kernels.native.ratios_of_sums(sums.data_ptr(), len(params), trust.data_ptr(), *place)
    trust = trust.contiguous()
    kernels.native.lamb(update, factors.data_ptr(), trust.data_ptr(), *numbers, *place)


def _measured(
    kernels: Kernels, update: Any, count: int, factors: Tensor, numbers: tuple[float, ...]
) -> Tensor:
    """(2, count, WIDTH): exact sums of squares of parameters and of steps, not carried."""
    rows = factors.new_zeros((2, count, WIDTH), dtype=torch.int64)
    kernels.native.lamb_sums_of_squares(
        update, factors.data_ptr(), *numbers, rows.data_ptr(), *kernels.place(factors)
    )
    return rows


@declared.forward("lamb_sums_of_squares")
def lamb_sums_of_squares(
    kernels: Kernels,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    given = (params, grads, exp_avgs, exp_avg_sqs)
    params, grads, *moments = (contiguous(tensors) for tensors in given)
    factors = _begin(
        kernels,
        *(None, step, scale, clip, None),
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        counts=False,
    )
    update = _update(kernels, params, grads, moments, None)
    numbers = (beta1, beta2, eps, weight_decay)
    sums = _measured(kernels, update, len(params), factors, numbers)
    kernels.native.carry_sums(sums.data_ptr(), 2 * len(params), *kernels.place(step))
    return sums


declared.forward("adamw")(by_copies(adamw, reads=_GRADS))
declared.forward("adamw_8bit")(by_copies(adamw_8bit, reads=_GRADS))
declared.forward("sgd")(by_copies(sgd, reads=_GRADS))
declared.forward("lion")(by_copies(lion, reads=_GRADS))
declared.forward("lamb")(by_copies(lamb, reads=_GRADS))
