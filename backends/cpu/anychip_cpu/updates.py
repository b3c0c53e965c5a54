"""Update rules on the host: addresses of all tensors, in one native call.

A rule writes in place, so that what is not contiguous goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.lamb import trust_ratios
from anychip.operators.squares import WIDTH
from anychip.operators.update import bias_corrections
from anychip_cpu import native
from anychip_cpu.lists import addresses, described
from anychip_cpu.table import address, declared

_kernels: Any = native.kernels


def _update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    lr: Tensor | None,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    *,
    scales: Sequence[Sequence[Tensor]] = ((), ()),
) -> Any:
    """What every rule is given, as the kernels take it; the rule has two states at most."""
    first, second = (*states, (), ())[:2]
    param_addresses, numels, param_dtypes = described(params)
    grad_addresses, _, grad_dtypes = described(grads)
    low_addresses, _, low_dtypes = described(low_precision or ())
    return _kernels.Update(
        params=param_addresses,
        grads=grad_addresses,
        first_states=addresses(first),
        second_states=addresses(second),
        low_precision=low_addresses,
        numels=numels,
        param_dtypes=param_dtypes,
        grad_dtypes=grad_dtypes,
        low_dtypes=low_dtypes,
        lr=address(lr),
        step=address(step),
        scale=address(scale),
        clip=address(clip),
        found_inf=address(found_inf),
        first_scales=addresses(scales[0]),
        second_scales=addresses(scales[1]),
    )


@declared.forward("adamw", contiguous=True)
def adamw(
    params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **attrs: Any
) -> None:
    _kernels.adamw(_update(params, grads, (exp_avgs, exp_avg_sqs), *rest), **attrs)


@declared.forward("adamw_8bit", contiguous=True)
def adamw_8bit(
    params: Any,
    grads: Any,
    exp_avgs: Any,
    exp_avg_scales: Any,
    exp_avg_sqs: Any,
    exp_avg_sq_scales: Any,
    *rest: Any,
    **attrs: Any,
) -> None:
    scales = (exp_avg_scales, exp_avg_sq_scales)
    update = _update(params, grads, (exp_avgs, exp_avg_sqs), *rest, scales=scales)
    _kernels.adamw_8bit(update, **attrs)


@declared.forward("sgd", contiguous=True)
def sgd(params: Any, grads: Any, momentum_buffers: Any, *rest: Any, **attrs: Any) -> None:
    _kernels.sgd(_update(params, grads, (momentum_buffers,), *rest), **attrs)


@declared.forward("lion", contiguous=True)
def lion(params: Any, grads: Any, exp_avgs: Any, *rest: Any, **attrs: Any) -> None:
    _kernels.lion(_update(params, grads, (exp_avgs,), *rest), **attrs)


@declared.forward("lamb", contiguous=True)
def lamb(
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
    **attrs: Any,
) -> None:
    moments = (exp_avgs, exp_avg_sqs)
    if trust is None and params:
        given = (params, grads, *moments, step, scale, clip)
        trust = trust_ratios(lamb_sums_of_squares(*given, **attrs))
    corrections = bias_corrections(step + 1.0, attrs["beta1"], attrs["beta2"])
    _kernels.lamb(
        _update(params, grads, moments, lr, step, scale, clip, found_inf, low_precision),
        address(trust),
        *addresses(corrections),
        **attrs,
    )


@declared.forward("lamb_sums_of_squares")
def lamb_sums_of_squares(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    **attrs: Any,
) -> Tensor:
    given = (params, grads, exp_avgs, exp_avg_sqs)
    whole_params, whole_grads, *states = ([t.contiguous() for t in tensors] for tensors in given)
    found = torch.empty(2, len(params), WIDTH, dtype=torch.int64)
    corrections = bias_corrections(step + 1.0, attrs["beta1"], attrs["beta2"])
    _kernels.lamb_sums_of_squares(
        _update(whole_params, whole_grads, states, None, step, scale, clip, None, None),
        found.data_ptr(),
        *addresses(corrections),
        **attrs,
    )
    return found
