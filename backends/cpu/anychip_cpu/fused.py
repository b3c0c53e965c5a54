"""The host's rows for fused operators: native kernels with torch's additions and products between.

Each keeps what lies between two kernels in float32, so that results are rounded once, as the
reference rounds them. softmax is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from anychip import operators as specs
from anychip_cpu import native, operators
from anychip_cpu.table import FLOATS, Needs, table

_aten = torch.ops.aten
F = TypeVar("F", bound=Callable[..., Any])


def _composed(operator: str, direction: str) -> Callable[[F], F]:
    """Adds a row that calls native kernels, or nothing when they are not there."""
    if native.kernels is None:
        return lambda function: function
    add = table.forward if direction == "forward" else table.backward
    return add(operator, kind="native", dtypes=FLOATS)


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


def _stored_sum(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The sum in the residual's dtype, and what the norm takes so that y is rounded once to x's."""
    total = torch.add(x, residual).to(residual.dtype).contiguous()
    return total, (total if x.dtype == total.dtype else total.float())


def _both_gradients(
    dnorm: Tensor | None, grad: Tensor, dtotal: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    if dnorm is None:
        return None, None
    total = dnorm.add_(dtotal)
    dx = total.to(grad.dtype) if needs[0] else None
    return dx, (total.to(dtotal.dtype, copy=needs[0]) if needs[1] else None)


@_composed("add_rms_norm", "forward")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = _stored_sum(x, residual)
    y, rstd = operators.rms_norm(normed, weight, eps=eps)
    return y.to(x.dtype), total, rstd


@_composed("add_rms_norm", "backward")
def add_rms_norm_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    inner = (needs[0] or needs[1], needs[2])
    dnorm, dweight = operators.rms_norm_backward(
        grad.float(), total.float(), weight, rstd, eps=eps, needs=inner
    )
    return *_both_gradients(dnorm, grad, dtotal, needs), dweight


@_composed("add_layer_norm", "forward")
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total, normed = _stored_sum(x, residual)
    y, mean, rstd = operators.layer_norm(normed, weight, bias, eps=eps)
    return y.to(x.dtype), total, mean, rstd


@_composed("add_layer_norm", "backward")
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    inner = (needs[0] or needs[1], needs[2], needs[3])
    dnorm, dweight, dbias = operators.layer_norm_backward(
        grad.float(), total.float(), weight, mean, rstd, eps=eps, needs=inner
    )
    return *_both_gradients(dnorm, grad, dtotal, needs), dweight, dbias


# Dropout


@_composed("bias_dropout_add", "forward")
def bias_dropout_add(
    x: Tensor, residual: Tensor, rng: Tensor, bias: Tensor | None, *, p: float
) -> Tensor:
    inner = x.float() if bias is None else x.float() + bias
    dropped = operators.dropout(inner, rng, p=p)
    return dropped.add_(residual).to(residual.dtype)


@_composed("bias_dropout_add", "backward")
def bias_dropout_add_backward(
    grad: Tensor, rng: Tensor, *, p: float, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx = dresidual = dbias = None
    if needs[0] or needs[2]:
        dropped = operators.dropout(grad.float(), rng, p=p)
        dx = dropped.to(grad.dtype) if needs[0] else None
        dbias = _column_sum(dropped) if needs[2] else None
    if needs[1]:
        dresidual = grad.clone(memory_format=torch.contiguous_format)
    return dx, dresidual, dbias


# Activations


@_composed("bias_gelu", "forward")
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    def compute(x: Tensor) -> tuple[Tensor]:
        return (operators.gelu(x.float() + bias, approximate=approximate),)

    (y,) = _rowwise(compute, (x,), (x,))
    assert y is not None
    return y


@_composed("bias_gelu", "backward")
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


@_composed("geglu", "forward")
def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    def compute(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (operators.gelu(gate.float(), approximate=approximate).mul_(up),)

    (y,) = _rowwise(compute, (gate, up), (gate,))
    assert y is not None
    return y


@_composed("geglu", "backward")
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


@table.forward("softmax", kind="mapped", dtypes=FLOATS)
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


@table.backward("softmax", kind="mapped", dtypes=FLOATS)
def softmax_backward(
    grad: Tensor, y: Tensor, *, scale: float, causal: bool, needs: Needs
) -> tuple[Tensor]:
    def compute(grad: Tensor, y: Tensor) -> tuple[Tensor]:
        dscores = _aten._softmax_backward_data(grad.float(), y.float(), -1, torch.float32)
        return (dscores.mul_(scale).contiguous(),)

    (dx,) = _rowwise(compute, (grad, y), (y,))
    assert dx is not None
    return (dx,)
