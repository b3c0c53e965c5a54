"""Rows of norms: rms_norm, layer_norm, both of the sum with a residual, dropped or not; group_norm.

group_norm is layer_norm's kernel with a group as a row, not torch's, which computes
``x * scale + shift``: of two numbers that lie close to each other that leaves fewer digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.operators.norm import by_channel, channel_sum
from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared


def _rows(x: Tensor) -> tuple[int, int]:
    """How many rows there are along the last dim, and their width."""
    return prod(x.shape[:-1]), x.shape[-1]


class Drop(NamedTuple):
    """What is dropped of x before the sum: rng is int64[2], contiguous, on the device."""

    rng: Tensor
    p: float


def _normed(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    centred: bool,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y, the stored sum, mean and rstd; the sum and the mean as far as there are such."""
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, total = empty_like(x), None if residual is None else empty_like(residual)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    native = kernels.native
    launch = native.norm_forward if drop is None else native.dropout_add_norm_forward
    dropped = () if drop is None else (address(drop.rng), drop.p)
    launch(
        *map(address, (x, residual, weight, bias, y, total, mean, rstd)),
        *_rows(x),
        eps,
        kernels.codes[x.dtype],
        kernels.codes[x.dtype if residual is None else residual.dtype],
        kernels.codes[weight.dtype],
        kernels.codes[weight.dtype if bias is None else bias.dtype],
        *dropped,
        *kernels.place(x),
    )
    return y, total, mean, rstd


def _gradients(
    kernels: Kernels,
    grad: Tensor,
    normed: Tensor,
    dtotal: Tensor | None,
    weight: Tensor,
    statistics: tuple[Tensor | None, Tensor],
    needs: Sequence[bool],
    drop: Drop | None = None,
) -> list[Tensor | None]:
    """Gradients of x, residual, weight and bias, as far as ``needs`` goes."""
    grad, normed, weight = grad.contiguous(), normed.contiguous(), weight.contiguous()
    dtotal = None if dtotal is None else dtotal.contiguous()
    mean, rstd = statistics
    mean, rstd = None if mean is None else mean.contiguous(), rstd.contiguous()
    made = [
        empty_like(like) if need else None
        for need, like in zip(needs, (grad, normed, weight, weight), strict=True)
    ]
    num_rows, hidden = _rows(normed)
    # A block has all threads that the registers of a multiprocessor leave.
    blocks = max(1, min(kernels.multiprocessors(normed), num_rows))
    partials = rstd.new_empty(sum(needs[2:]), blocks, hidden) if any(needs[2:]) else None
    native = kernels.native
    launch = native.norm_backward if drop is None else native.dropout_add_norm_backward
    dropped = () if drop is None else (address(drop.rng), drop.p)
    launch(
        *map(address, (grad, normed, dtotal, weight, mean, rstd, *made, partials)),
        blocks,
        num_rows,
        hidden,
        kernels.codes[grad.dtype],
        kernels.codes[normed.dtype],
        kernels.codes[weight.dtype],
        *dropped,
        *kernels.place(normed),
    )
    return made


@declared.forward("rms_norm")
def rms_norm(kernels: Kernels, x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    y, _, _, rstd = _normed(kernels, x, None, weight, None, eps, centred=False)
    return y, rstd


@declared.backward("rms_norm")
def rms_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    wanted = (needs[0], False, needs[1], False)
    dx, _, dweight, _ = _gradients(kernels, grad, x, None, weight, (None, rstd), wanted)
    return dx, dweight


@declared.forward("layer_norm")
def layer_norm(
    kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    y, _, mean, rstd = _normed(kernels, x, None, weight, bias, eps, centred=True)
    return y, mean, rstd


@declared.backward("layer_norm")
def layer_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    wanted = (needs[0], False, *needs[1:])
    dx, _, *dweights = _gradients(kernels, grad, x, None, weight, (mean, rstd), wanted)
    return dx, *dweights


# Over groups of channels


def _groups(x: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """(N * groups, numbers of a group), and a weight of ones for it."""
    wide = x.float().reshape(x.shape[0] * num_groups, -1)
    return wide, wide.new_ones(wide.shape[1])


def _has_elements(x: Tensor, *_: object, **__: object) -> bool:
    return x.numel() > 0


@declared.forward("group_norm", accepts=_has_elements)
def group_norm(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    normed, mean, rstd = layer_norm(kernels, *_groups(x, num_groups), None, eps=eps)
    assert mean is not None
    y = normed.view(x.shape).mul_(by_channel(x, weight))
    if bias is not None:
        y.add_(by_channel(x, bias))
    return y.to(x.dtype), mean.view(-1, num_groups), rstd.view(-1, num_groups)


@declared.backward("group_norm", accepts=_has_elements)
def group_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    num_groups: int,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    rows, ones = _groups(x, num_groups)
    dx = dweight = dbias = None
    if needs[0]:
        scaled = (grad.float() * by_channel(x, weight)).reshape(rows.shape)
        saved: Any = (scaled, rows, ones, mean.reshape(-1), rstd.reshape(-1))
        found = layer_norm_backward(kernels, *saved, eps=eps, needs=(True, False, False))[0]
        assert found is not None
        dx = found.view(x.shape).to(x.dtype)
    if needs[1]:
        normed = (rows - mean.reshape(-1, 1)).mul_(rstd.reshape(-1, 1)).view(x.shape)
        dweight = channel_sum(normed.mul_(grad)).to(weight.dtype)
    if needs[2]:
        dbias = channel_sum(grad.float()).to(weight.dtype)
    return dx, dweight, dbias


def _has_sum(x: Tensor, residual: Tensor, *_: Tensor | None, **__: object) -> bool:
    """The kernels keep a residual in x's dtype or in float32; other pairs are nobody's stream."""
    return residual.dtype in (x.dtype, torch.float32)


def _has_sum_gradient(grad: Tensor, dtotal: Tensor, *_: Tensor | None, **__: object) -> bool:
    """As :func:`_has_sum`: gradients have the dtypes of x and of the residual."""
    return _has_sum(grad, dtotal)


@declared.forward("add_rms_norm", accepts=_has_sum)
def add_rms_norm(
    kernels: Kernels, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor | None, ...]:
    y, total, _, rstd = _normed(kernels, x, residual, weight, None, eps, centred=False)
    return y, total, rstd


@declared.backward("add_rms_norm", accepts=_has_sum_gradient)
def add_rms_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, total, dtotal, weight, (None, rstd), (*needs, False))
    return tuple(_gradients(kernels, *given)[:3])


@declared.forward("add_layer_norm", accepts=_has_sum)
def add_layer_norm(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    eps: float,
) -> tuple[Tensor | None, ...]:
    return _normed(kernels, x, residual, weight, bias, eps, centred=True)


@declared.backward("add_layer_norm", accepts=_has_sum_gradient)
def add_layer_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    return tuple(_gradients(kernels, grad, total, dtotal, weight, (mean, rstd), needs))


def _has_whole_sum(x: Tensor, residual: Tensor, *rest: Tensor | None, **_: object) -> bool:
    """As :func:`_has_sum`, of a whole tensor: the kernels know no rows of a larger one."""
    return rest[-1] is None and _has_sum(x, residual)


def _has_whole_sum_gradient(*args: Any, **_: object) -> bool:
    return args[5] is None and _has_sum_gradient(*args)


@declared.forward("dropout_add_rms_norm", accepts=_has_whole_sum)
def dropout_add_rms_norm(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: None = None,
    *,
    p: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    given = (x, residual, weight, None, eps)
    y, total, _, rstd = _normed(kernels, *given, centred=False, drop=Drop(rng.contiguous(), p))
    return y, total, rstd


@declared.backward("dropout_add_rms_norm", accepts=_has_whole_sum_gradient)
def dropout_add_rms_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: None,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, total, dtotal, weight, (None, rstd), (*needs, False), Drop(rng.contiguous(), p))
    return tuple(_gradients(kernels, *given)[:3])


@declared.forward("dropout_add_layer_norm", accepts=_has_whole_sum)
def dropout_add_layer_norm(
    kernels: Kernels,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: None = None,
    *,
    p: float,
    eps: float,
) -> tuple[Tensor | None, ...]:
    given = (x, residual, weight, bias, eps)
    return _normed(kernels, *given, centred=True, drop=Drop(rng.contiguous(), p))


@declared.backward("dropout_add_layer_norm", accepts=_has_whole_sum_gradient)
def dropout_add_layer_norm_backward(
    kernels: Kernels,
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: None,
    mean: Tensor,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, total, dtotal, weight, (mean, rstd), needs, Drop(rng.contiguous(), p))
    return tuple(_gradients(kernels, *given))
