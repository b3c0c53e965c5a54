"""Norms on the host: over rows, over groups of channels, and after the residual's sum.

Rows hand addresses to ``csrc/cpu``; they make read tensors contiguous and allocate outputs with
torch. What lies between two kernels stays float32, so that results are rounded once, as the
reference rounds them. group_norm is not torch's, which computes ``x * scale + shift``: of two
numbers that lie close to each other that leaves fewer digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.dropout import bias_dropout_add
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, has_elements, rows_of, wanted

_kernels: Any = native.kernels


@declared.forward("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _kernels.rms_norm_forward(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        rstd.data_ptr(),
        *rows_of(x),
        eps,
        CODES[x.dtype],
        CODES[weight.dtype],
    )
    return y, rstd


@declared.backward("rms_norm")
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, x, weight, rstd = (t.contiguous() for t in (grad, x, weight, rstd))
    dx, dx_address = wanted(needs[0], x)
    dweight, dweight_address = wanted(needs[1], weight)
    _kernels.rms_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        rstd.data_ptr(),
        dx_address,
        dweight_address,
        *rows_of(x),
        CODES[x.dtype],
        CODES[weight.dtype],
    )
    return dx, dweight


@declared.forward("layer_norm")
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if bias is not None and bias.dtype != weight.dtype:
        # The kernel takes one dtype for both; the narrower one would lose digits of the other.
        weight, bias = weight.float(), bias.float()
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, mean = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    rstd = torch.empty_like(mean)
    _kernels.layer_norm_forward(
        x.data_ptr(),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        *rows_of(x),
        eps,
        CODES[x.dtype],
        CODES[weight.dtype],
    )
    return y, mean, rstd


@declared.backward("layer_norm")
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    grad, x, weight, mean, rstd = (t.contiguous() for t in (grad, x, weight, mean, rstd))
    dx, dx_address = wanted(needs[0], x)
    dweight, dweight_address = wanted(needs[1], weight)
    dbias, dbias_address = wanted(needs[2], weight)
    _kernels.layer_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        dx_address,
        dweight_address,
        dbias_address,
        *rows_of(x),
        CODES[x.dtype],
        CODES[weight.dtype],
    )
    return dx, dweight, dbias


# Over groups of channels


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int, int]:
    """Batch, groups, channels, and numbers of a channel."""
    batch, channels = x.shape[:2]
    return batch, groups, channels, x.numel() // (batch * channels)


@declared.forward("group_norm", accepts=has_elements)
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if bias is not None and bias.dtype != weight.dtype:
        # The kernel takes one dtype for both; the narrower one would lose digits of the other.
        weight, bias = weight.float(), bias.float()
    x, weight = x.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    y, mean = torch.empty_like(x), x.new_empty((x.shape[0], num_groups), dtype=torch.float32)
    rstd = torch.empty_like(mean)
    codes = CODES[x.dtype], CODES[weight.dtype]
    given = map(address, (x, weight, bias, y, mean, rstd))
    _kernels.group_norm_forward(*given, *_sizes(x, num_groups), eps, *codes)
    return y, mean, rstd


@declared.backward("group_norm", accepts=has_elements)
def group_norm_backward(
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
    saved = [t.contiguous() for t in (grad, x, weight, mean, rstd)]
    made = [
        torch.empty_like(like, memory_format=torch.contiguous_format) if need else None
        for need, like in zip(needs, (x, weight, weight), strict=True)
    ]
    codes = CODES[x.dtype], CODES[weight.dtype]
    _kernels.group_norm_backward(*map(address, (*saved, *made)), *_sizes(x, num_groups), *codes)
    return tuple(made)


# The residual's sum and a norm


def _normed_sum(
    kernel: Any,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    biases: Sequence[Tensor | None],
    num_statistics: int,
    eps: float,
) -> tuple[Tensor, ...]:
    """y, the sum and the statistics of the rows, for a kernel of either norm."""
    if any(b is not None and b.dtype != weight.dtype for b in biases):
        # The kernel takes one dtype for both; the narrower one would lose digits of the other.
        weight, biases = weight.float(), [None if b is None else b.float() for b in biases]
    weight, biases = weight.contiguous(), [None if b is None else b.contiguous() for b in biases]
    x, residual = x.contiguous(), residual.contiguous()
    y, total = torch.empty_like(x), torch.empty_like(residual)
    statistics = [x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(num_statistics)]
    kernel(
        *map(address, (x, weight, *biases, y, *statistics)),
        *rows_of(x),
        eps,
        CODES[x.dtype],
        CODES[weight.dtype],
        residual.data_ptr(),
        total.data_ptr(),
        CODES[residual.dtype],
    )
    return y, total, *statistics


def _normed_sum_gradients(
    kernel: Any,
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    statistics: Sequence[Tensor],
    needs: Needs,
    drop: Sequence[float] = (),
) -> list[Tensor | None]:
    """Gradients of x, residual, and weight and bias as far as ``needs`` goes.

    drop: of x, as the kernels take it; where they are.
    """
    saved = [t.contiguous() for t in (grad, total, weight, *statistics)]
    dtotal = dtotal.contiguous()
    like = (grad, total, weight, weight)
    made = [
        torch.empty_like(t, memory_format=torch.contiguous_format) if need else None
        for need, t in zip(needs, like, strict=False)
    ]
    dx, dresidual, *dweights = made
    kernel(
        *map(address, (*saved, dx, *dweights)),
        *rows_of(total),
        CODES[grad.dtype],
        CODES[weight.dtype],
        dtotal.data_ptr(),
        address(dresidual),
        CODES[total.dtype],
        *drop,
    )
    return made


@declared.forward("add_rms_norm")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, ...]:
    return _normed_sum(_kernels.rms_norm_forward, x, residual, weight, (), 1, eps)


@declared.backward("add_rms_norm")
def add_rms_norm_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, dtotal, total, weight, (rstd,), needs)
    return tuple(_normed_sum_gradients(_kernels.rms_norm_backward, *given))


@declared.forward("add_layer_norm")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, ...]:
    return _normed_sum(_kernels.layer_norm_forward, x, residual, weight, (bias,), 2, eps)


@declared.backward("add_layer_norm")
def add_layer_norm_backward(
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
    given = (grad, dtotal, total, weight, (mean, rstd), needs)
    return tuple(_normed_sum_gradients(_kernels.layer_norm_backward, *given))


# Dropout before them


def _dropped_sum(
    x: Tensor, residual: Tensor, rng: Tensor, rows: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """The stored sum, and the same as a norm whose result is rounded to x's dtype takes it."""
    total = bias_dropout_add(x, residual, rng, None, rows, p=p, width=x.shape[-1])
    return total, total if total.dtype == x.dtype else total.float()


def _dropped_gradients(
    kernel: Any,
    grad: Tensor,
    dtotal: Tensor,
    saved: Sequence[Tensor],
    drop: tuple[Tensor, Tensor | None],
    p: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, residual, and weight and bias as far as ``needs`` goes.

    saved: the sum, the weight and the rows' statistics; drop: rng and rows.
    """
    total, weight, *statistics = saved
    rng, rows = (None if t is None else t.contiguous() for t in drop)
    place = (address(rng), p, address(rows), grad.shape[-1])
    given = (grad, dtotal, total, weight, statistics, needs)
    return tuple(_normed_sum_gradients(kernel, *given, place if needs[0] else ()))


@declared.forward("dropout_add_rms_norm")
def dropout_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: Tensor | None,
    *,
    p: float,
    eps: float,
) -> tuple[Tensor, ...]:
    total, normed = _dropped_sum(x, residual, rng, rows, p)
    y, rstd = rms_norm(normed, weight, eps=eps)
    return y.to(x.dtype), total, rstd


@declared.backward("dropout_add_rms_norm")
def dropout_add_rms_norm_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: Tensor | None,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, dtotal, (total, weight, rstd), (rng, rows), p, needs)
    return _dropped_gradients(_kernels.rms_norm_backward, *given)


@declared.forward("dropout_add_layer_norm")
def dropout_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    *,
    p: float,
    eps: float,
) -> tuple[Tensor, ...]:
    total, normed = _dropped_sum(x, residual, rng, rows, p)
    y, mean, rstd = layer_norm(normed, weight, bias, eps=eps)
    return y.to(x.dtype), total, mean, rstd


@declared.backward("dropout_add_layer_norm")
def dropout_add_layer_norm_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rng: Tensor,
    rows: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    *,
    p: float,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    given = (grad, dtotal, (total, weight, mean, rstd), (rng, rows), p, needs)
    return _dropped_gradients(_kernels.layer_norm_backward, *given)
