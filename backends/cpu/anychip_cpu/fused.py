"""The host's rows for fused operators: native kernels, some with torch's operations between.

Each keeps what lies between two kernels in float32, so that results are rounded once, as the
reference rounds them. softmax is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cpu import native, operators
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, declared, rows_of

_aten = torch.ops.aten
_kernels: Any = native.kernels

_BLOCK = 1 << 16
"""Elements per thread of a block: a quarter of a mebibyte in float32, which a cache holds."""


def _rowwise(
    compute: Callable[..., Sequence[Tensor | None]],
    inputs: Sequence[Tensor],
    like: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Float32 results of ``compute``, which looks at each row alone, in the dtypes of ``like``.

    With 16-bit tensors it goes block by block: what is float32 in between then stays in a cache,
    where whole tensors take two to four times as long (measured for 4096 x 1024, one thread).
    """
    if all(t.dtype == torch.float32 for t in inputs):
        return list(compute(*inputs))
    width = inputs[0].shape[-1] if inputs[0].numel() and inputs[0].dim() else 1
    rows = inputs[0].numel() // width
    step = max(1, _BLOCK * torch.get_num_threads() // width)
    found = [None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
             for t in like]  # fmt: skip
    flat_inputs = [t.contiguous().view(rows, width) for t in inputs]
    flat_found = [None if t is None else t.view(rows, width) for t in found]
    for start in range(0, rows, step):
        block = slice(start, start + step)
        made = compute(*(t[block] for t in flat_inputs))
        for whole, part in zip(flat_found, made, strict=True):
            if whole is not None and part is not None:
                whole[block] = part
    return found


def _column_sum(values: Tensor) -> Tensor:
    # Not reshape(-1, H), which cannot tell the number of rows when H is 0.
    return values.unsqueeze(0).flatten(0, -2).sum(0)


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
) -> list[Tensor | None]:
    """Gradients of x, residual, and weight and bias as far as ``needs`` goes."""
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


# Dropout


@declared.forward("bias_dropout_add")
def bias_dropout_add(
    x: Tensor,
    residual: Tensor,
    rng: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    **attrs: Any,
) -> Tensor:
    inner = x.float() if bias is None else x.float() + bias
    dropped = operators.dropout(inner, rng, rows, **attrs)
    return dropped.add_(residual).to(residual.dtype)


@declared.backward("bias_dropout_add")
def bias_dropout_add_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None, *, needs: Needs, **attrs: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dresidual = dbias = None
    if needs[0] or needs[2]:
        dropped = operators.dropout(grad.float(), rng, rows, **attrs)
        dx = dropped.to(grad.dtype) if needs[0] else None
        dbias = _column_sum(dropped) if needs[2] else None
    if needs[1]:
        dresidual = grad.clone(memory_format=torch.contiguous_format)
    return dx, dresidual, dbias


# Dropout before the residual's sum and a norm


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
    if not needs[0]:
        given = (grad, dtotal, total, weight, statistics, needs)
        return tuple(_normed_sum_gradients(kernel, *given))
    # As of a residual in float32, so that dropout has what is not rounded yet.
    wide = (grad, dtotal.float(), total.float(), weight, statistics, (False, True, *needs[2:]))
    _, whole, *dweights = _normed_sum_gradients(kernel, *wide)
    assert whole is not None
    dx = operators.dropout(whole, *drop, p=p, width=whole.shape[-1]).to(grad.dtype)
    return dx, (whole.to(dtotal.dtype) if needs[1] else None), *dweights


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
    y, rstd = operators.rms_norm(normed, weight, eps=eps)
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
    y, mean, rstd = operators.layer_norm(normed, weight, bias, eps=eps)
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


# Activations


@declared.forward("bias_gelu")
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    def compute(x: Tensor) -> tuple[Tensor]:
        return (operators.gelu(x.float() + bias, approximate=approximate),)

    (y,) = _rowwise(compute, (x,), (x,))
    assert y is not None
    return y


@declared.backward("bias_gelu")
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    # Not by blocks: the bias's gradient sums over all rows, in an order that must not depend on
    # the number of threads.
    (total,) = operators.gelu_backward(
        grad.float(), x.float() + bias, approximate=approximate, needs=(True,)
    )
    dx = total.to(x.dtype) if needs[0] else None
    return dx, (_column_sum(total).to(bias.dtype) if needs[1] else None)


@declared.forward("geglu")
def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    def compute(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (operators.gelu(gate.float(), approximate=approximate).mul_(up),)

    (y,) = _rowwise(compute, (gate, up), (gate,))
    assert y is not None
    return y


@declared.backward("geglu")
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    def compute(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor | None, Tensor | None]:
        wide, slope = gate.float(), grad.float()
        dgate = dup = None
        if needs[0]:
            (dgate,) = operators.gelu_backward(
                slope * up, wide, approximate=approximate, needs=(True,)
            )
        if needs[1]:
            dup = operators.gelu(wide, approximate=approximate).mul_(slope)
        return dgate, dup

    like = (gate if needs[0] else None, up if needs[1] else None)
    dgate, dup = _rowwise(compute, (grad, gate, up), like)
    return dgate, dup


# Softmax


def _offset(x: Tensor, mask: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor | None:
    """What is added to the scores: the bias, and -inf for what is hidden."""
    offset = None if bias is None else bias.float()
    if mask is not None:
        hidden = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        offset = hidden if offset is None else offset + hidden
    if causal:
        queries, keys = x.shape[-2:]
        later = torch.full((queries, keys), -torch.inf).triu_(keys - queries + 1)
        offset = later if offset is None else offset + later
    return offset


@declared.forward("softmax", kind="mapped")
def softmax(
    x: Tensor, mask: Tensor | None, bias: Tensor | None, *, scale: float, causal: bool
) -> Tensor:
    offset = _offset(x, mask, bias, causal)
    scores = x.float() * scale if offset is None else torch.add(offset, x, alpha=scale)
    y = torch.softmax(scores, -1)
    if y[..., :1].isnan().any():
        # A row without a visible key, which is NaN throughout; or one with a NaN, or with an Inf or
        # NaN that is hidden and must not count.
        y.masked_fill_((scores == -torch.inf).all(-1, keepdim=True), 0.0)
        if y[..., :1].isnan().any():
            exact: Tensor = specs.softmax.forward(x, mask, bias, scale=scale, causal=causal)
            return exact
    return y.to(x.dtype).contiguous()


def _score_gradients(grad: Tensor, y: Tensor) -> Tensor:
    dscores: Tensor = _aten._softmax_backward_data(grad.float(), y.float(), -1, torch.float32)
    return dscores


@declared.backward("softmax", kind="mapped")
def softmax_backward(
    grad: Tensor, y: Tensor, bias: Tensor | None, *, scale: float, causal: bool, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    if bias is not None and needs[1]:
        # Not by blocks: the sums for the bias go across rows, and are float32.
        dscores = _score_gradients(grad, y)
        dbias = dscores.sum_to_size(bias.shape).to(bias.dtype).contiguous()
        return ((dscores * scale).to(y.dtype).contiguous() if needs[0] else None), dbias

    def compute(grad: Tensor, y: Tensor) -> tuple[Tensor]:
        return (_score_gradients(grad, y).mul_(scale).contiguous(),)

    (dx,) = _rowwise(compute, (grad, y), (y,))
    return dx, None
