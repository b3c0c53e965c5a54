"""Update rules and norms over lists on the host: addresses of all tensors, in one native call.

A rule writes in place, so that what is not contiguous goes to the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.operators.lamb import trust_ratios
from anychip.operators.partials import BLOCK, grid_places
from anychip.operators.update import bias_corrections
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import address, declared

_kernels: Any = native.kernels


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [t.data_ptr() for t in tensors]


def _tensors(tensors: Sequence[Tensor]) -> tuple[list[int], list[int], list[int]]:
    """Addresses, elements, and dtypes."""
    return (
        _addresses(tensors),
        [t.numel() for t in tensors],
        [CODES[t.dtype] for t in tensors],
    )


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
) -> Any:
    """What every rule is given, as the kernels take it; the rule has two states at most."""
    first, second = (*states, (), ())[:2]
    param_addresses, numels, param_dtypes = _tensors(params)
    grad_addresses, _, grad_dtypes = _tensors(grads)
    low_addresses, _, low_dtypes = _tensors(low_precision or ())
    return _kernels.Update(
        params=param_addresses,
        grads=grad_addresses,
        first_states=_addresses(first),
        second_states=_addresses(second),
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
    )


@declared.forward("adamw", contiguous=True)
def adamw(
    params: Any, grads: Any, exp_avgs: Any, exp_avg_sqs: Any, *rest: Any, **attrs: Any
) -> None:
    _kernels.adamw(_update(params, grads, (exp_avgs, exp_avg_sqs), *rest), **attrs)


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
        partials = lamb_partials(
            params,
            grads,
            *moments,
            step,
            scale,
            clip,
            offsets=None,
            sizes=None,
            block=BLOCK,
            **attrs,
        )
        trust = trust_ratios(partials, [p.numel() for p in params])
    corrections = bias_corrections(step + 1.0, attrs["beta1"], attrs["beta2"])
    _kernels.lamb(
        _update(params, grads, moments, lr, step, scale, clip, found_inf, low_precision),
        address(trust),
        *_addresses(corrections),
        **attrs,
    )


@declared.forward("lamb_partials")
def lamb_partials(
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
    **attrs: Any,
) -> Tensor:
    given = (params, grads, exp_avgs, exp_avg_sqs)
    whole_params, whole_grads, *states = ([t.contiguous() for t in tensors] for tensors in given)
    first, total = _places(params, offsets, sizes, block)
    found = torch.zeros(2, total, dtype=torch.float32)
    if not total:  # a tensor without elements has no address
        return found
    corrections = bias_corrections(step + 1.0, attrs["beta1"], attrs["beta2"])
    _kernels.lamb_partials(
        _update(whole_params, whole_grads, states, None, step, scale, clip, None, None),
        first,
        block,
        total,
        found.data_ptr(),
        *_addresses(corrections),
        **attrs,
    )
    return found


# Norms, clipping, unscaling


def _places(
    tensors: Sequence[Tensor],
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> tuple[list[int], int]:
    """Where each tensor's first block is among the blocks of all whole tensors; their number."""
    first, total = [], 0
    for place, count in grid_places(tensors, offsets, sizes, block):
        first.append(total + place)
        total += count
    return first, total


@declared.forward("l2_norm_partials")
def l2_norm_partials(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Tensor:
    whole = [t.contiguous() for t in tensors]
    first, total = _places(tensors, offsets, sizes, block)
    found = torch.zeros(total, dtype=torch.float32)
    if total:  # a tensor without elements has no address
        _kernels.l2_norm_partials(*_tensors(whole), first, block, found.data_ptr())
    return found


@declared.forward("l2_norm", contiguous=True, accepts=lambda tensors: len(tensors) > 0)
def l2_norm(tensors: Sequence[Tensor]) -> Tensor:
    total = torch.empty((), dtype=torch.float32)
    _kernels.l2_norm(*_tensors(tensors), total.data_ptr())
    return total


@declared.forward("clip", contiguous=True)
def clip(tensors: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
    _kernels.clip(*_tensors(tensors), norm.data_ptr(), max_norm)


@declared.forward("unscale_and_check", contiguous=True)
def unscale_and_check(grads: Sequence[Tensor], scale: Tensor, found_inf: Tensor) -> None:
    _kernels.unscale_and_check(*_tensors(grads), scale.data_ptr(), found_inf.data_ptr())
