"""Rows of norms: rms_norm, layer_norm, both of the sum with a residual, dropped or not; group_norm.

group_norm is layer_norm with a group as a row, not torch's, which computes ``x * scale + shift``:
of two numbers that lie close to each other that leaves fewer digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip_cuda.native import Kernels, address, empty_like
from anychip_cuda.table import Needs, declared

_MOST_ROWS, _MOST_COLUMNS = 2**31 - 1, 2**30
"""Of group_norm, whose rows are divided in 32 bits; the number of a column is an int."""
_NUMBERS_PER_PART = 1024
"""Of a channel, at least: partial results are few against what is read."""


def _rows(x: Tensor) -> tuple[int, int]:
    """How many rows there are along the last dim, and their width."""
    return prod(x.shape[:-1]), x.shape[-1]


class Drop(NamedTuple):
    """What is dropped of x before the sum: rng is int64[2], contiguous, on the device."""

    rng: Tensor
    p: float


Groups = tuple[int, int, int]
"""How many there are, and the channels and the numbers per channel of each."""


def _family(drop: Drop | None, groups: Groups | None) -> tuple[str, tuple[float, ...]]:
    """What the kernels' names begin with, and which numbers they take besides those of a norm."""
    if groups is not None:
        return "group_norm", groups
    return ("norm", ()) if drop is None else ("dropout_add_norm", (address(drop.rng), drop.p))


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
    groups: Groups | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """y, the stored sum, mean and rstd; the sum and the mean as far as there are such.

    With ``groups`` x is (N * groups, numbers of a group).
    """
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if residual is None else residual.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, total = empty_like(x), None if residual is None else empty_like(residual)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    mean = torch.empty_like(rstd) if centred else None
    name, more = _family(drop, groups)
    getattr(kernels.native, f"{name}_forward")(
        *map(address, (x, residual, weight, bias, y, total, mean, rstd)),
        *_rows(x),
        eps,
        kernels.codes[x.dtype],
        kernels.codes[x.dtype if residual is None else residual.dtype],
        kernels.codes[weight.dtype],
        kernels.codes[weight.dtype if bias is None else bias.dtype],
        *more,
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
    groups: Groups | None = None,
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
    name, more = _family(drop, groups)
    count, _, spatial = groups or (1, 1, 1)
    # A block has all threads that the registers of a multiprocessor leave, and rows of one group.
    multiprocessors = kernels.multiprocessors(normed)
    parts = max(1, min(multiprocessors // count, num_rows // count))
    blocks, columns = count * parts, count * hidden // spatial
    if spatial > 1:
        # As many warps as it holds, each with a channel's numbers or a part of them.
        wanted = 64 * multiprocessors // columns
        parts = max(1, min(wanted, normed.numel() // columns // _NUMBERS_PER_PART))
    kinds = sum(needs[2:]) if spatial == 1 else 2
    partials = rstd.new_empty(kinds, parts, columns) if any(needs[2:]) else None
    getattr(kernels.native, f"{name}_backward")(
        *map(address, (grad, normed, dtotal, weight, mean, rstd, *made, partials)),
        blocks,
        num_rows,
        hidden,
        kernels.codes[grad.dtype],
        kernels.codes[normed.dtype],
        kernels.codes[weight.dtype],
        *more,
        *(() if groups is None else (parts,)),
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


def _groups(x: Tensor, num_groups: int) -> Groups:
    return num_groups, x.shape[1] // num_groups, prod(x.shape[2:])


def _by_group(x: Tensor, num_groups: int) -> Tensor:
    """(N * groups, numbers of a group)."""
    return x.contiguous().view(x.shape[0] * num_groups, -1)


def _has_groups(x: Tensor, *_: object, num_groups: int, **__: object) -> bool:
    """As many rows, and as long ones, as the kernels count; one without a number has no mean."""
    rows = x.shape[0] * num_groups
    return x.numel() > 0 and rows <= _MOST_ROWS and x.numel() // rows <= _MOST_COLUMNS


@declared.forward("group_norm", accepts=_has_groups)
def group_norm(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    num_groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    given = (_by_group(x, num_groups), None, weight, bias, eps)
    y, _, mean, rstd = _normed(kernels, *given, centred=True, groups=_groups(x, num_groups))
    assert mean is not None
    return y.view(x.shape), mean.view(-1, num_groups), rstd.view(-1, num_groups)


@declared.backward("group_norm", accepts=_has_groups)
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
    grads, rows = (_by_group(t, num_groups) for t in (grad, x))
    given = (grads, rows, None, weight, (mean, rstd), (needs[0], False, *needs[1:]))
    dx, _, *dweights = _gradients(kernels, *given, groups=_groups(x, num_groups))
    return None if dx is None else dx.view(x.shape), *dweights


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
