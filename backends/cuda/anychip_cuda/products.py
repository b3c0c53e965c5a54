"""Rows of products with weights, mapped to torch's: linear and grouped_linear.

Matrix products are cuBLAS's, with float32 sums whatever the process-wide switches say. The grouped
product is torch's kernel for devices of compute capability 9.0 and 10.x, which looks at no value on
the host; elsewhere it is one product per group, whose sizes the host has to read.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from anychip_cuda.columns import column_sums
from anychip_cuda.native import Kernels
from anychip_cuda.numerics import exact_products
from anychip_cuda.table import Needs, declared

_GROUPED_MAJORS = (9, 10)
_WHOLE = 1 << 20
"""Elements of a result that keeps a device busy. For a smaller one cuBLAS may split the sums, and
round to 16 bits before it adds the bias, whatever the switches say."""
_LONG = 1 << 20
"""Elements of a gradient that take longer than a second launch: their sums are of our kernel."""
LINE = 16
"""Bytes to which torch's kernels want addresses aligned; the grouped one rows too."""


def _has_product(x: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether torch has the product: with a float32 result of 16-bit operands cuBLAS's alone is."""
    return out_dtype in (None, x.dtype) or (x.is_cuda and not torch.version.hip)


def _may_split(rows: Tensor, weight: Tensor) -> bool:
    """Whether cuBLAS may round the sums of 16-bit numbers before their bias is added."""
    return (
        rows.dtype != torch.float32
        and 0 < len(rows) * len(weight) < _WHOLE
        and rows.shape[1] > 0
        and _has_product(rows, torch.float32)
    )


@declared.forward(
    "linear",
    kind="mapped",
    accepts=lambda x, weight, bias, *, out_dtype: _has_product(x, out_dtype),
)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    with exact_products:
        if out_dtype not in (None, x.dtype) or (bias is not None and _may_split(rows, weight)):
            y = torch.mm(rows, weight.t(), out_dtype=torch.float32)
            y = (y if bias is None else y.add_(bias)).to(out_dtype or x.dtype)
        else:
            y = torch.nn.functional.linear(rows, weight, bias).contiguous()
    return y.view(*x.shape[:-1], weight.shape[0])


@declared.backward(
    "linear", accepts=lambda grad, *_, needs, **__: needs[2] and grad.numel() >= _LONG
)
def linear_backward_with_long_bias(
    kernels: Kernels,
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    others = (needs[0], needs[1], False)
    dx, dweight, _ = linear_backward(grad, x, weight, out_dtype=out_dtype, needs=others)
    rows = grad.reshape(-1, grad.shape[-1])
    return dx, dweight, column_sums(kernels, rows, weight.dtype)


@declared.backward("linear", kind="mapped")
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = grad.reshape(x.shape[:-1].numel(), grad.shape[-1])
    dx = dweight = dbias = None
    # A float32 gradient meets operands of 16 bits, which no product takes: both in float32.
    with exact_products:
        if needs[0]:
            dx = (rows @ weight.to(rows.dtype)).to(x.dtype).view(x.shape)
        if needs[1]:
            other = x.reshape(rows.shape[0], x.shape[-1]).to(rows.dtype)
            dweight = (rows.t() @ other).to(weight.dtype)
    if needs[2]:
        dbias = rows.sum(0, dtype=torch.float32).to(weight.dtype)
    return dx, dweight, dbias


# The grouped product by torch's kernel


def _is_grouped(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> bool:
    """Whether torch has its kernel for this device and these shapes."""
    return (
        x.dtype == torch.bfloat16
        and out_dtype in (None, x.dtype)
        and x.numel() > 0
        and weight.numel() > 0
        and x.shape[1] * x.element_size() % LINE == 0
        and weight.shape[1] * x.element_size() % LINE == 0
        and capability(x) >= (_GROUPED_MAJORS[0], 0)
        and capability(x)[0] in _GROUPED_MAJORS
    )


def capability(tensor: Tensor) -> tuple[int, int]:
    """Compute capability of a tensor's device; (0, 0) for a host and for a device of ROCm."""
    if tensor.device.type != "cuda" or torch.version.hip:
        return 0, 0
    return _capability(tensor.get_device())


@cache
def _capability(index: int) -> tuple[int, int]:
    # Asked on every call, and torch takes microseconds to answer.
    return torch.cuda.get_device_capability(index)


def aligned(x: Tensor) -> Tensor:
    """Contiguous, from an address that torch's kernels take: they read 16 bytes at a time."""
    x = x.contiguous()
    return x if x.data_ptr() % LINE == 0 else x.clone()


def _without_group(x: Tensor, offsets: Tensor) -> Tensor:
    """(T, 1) bool: the rows that belong to no group, of which the kernel writes nothing."""
    return (torch.arange(x.shape[0], device=x.device) >= offsets[-1])[:, None]


@declared.forward("grouped_linear", kind="mapped", dtypes={torch.bfloat16}, accepts=_is_grouped)
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    turned = aligned(weight).transpose(-2, -1)
    y = torch._grouped_mm(aligned(x), turned, offs=offsets.to(torch.int32))
    return y.masked_fill_(_without_group(x, offsets), 0.0).contiguous()


@declared.backward(
    "grouped_linear",
    kind="mapped",
    dtypes={torch.bfloat16},
    accepts=lambda grad, x, weight, offsets, *, out_dtype, **_: _is_grouped(
        x, weight, offsets, out_dtype=out_dtype
    ),
)
def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    grad, ends = aligned(grad), offsets.to(torch.int32)
    dx = dweight = None
    if needs[0]:
        dx = torch._grouped_mm(grad, aligned(weight), offs=ends)
        dx = dx.masked_fill_(_without_group(x, offsets), 0.0).contiguous()
    if needs[1]:
        dweight = torch._grouped_mm(grad.t(), aligned(x), offs=ends).contiguous()
        # A sum over no rows: nobody says what the kernel writes then.
        empty = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0
        dweight.masked_fill_(empty[:, None, None], 0.0)
    return dx, dweight


# The grouped product by one product per group


def _by_group(x: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether torch has the product and the host may wait: not while a graph is recorded."""
    is_recorded = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return out_dtype in (None, x.dtype) and not is_recorded


def _groups(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    """The groups that have rows. The host waits for the device."""
    start = 0
    for group, end in enumerate(offsets.tolist()):
        if start < end:
            yield group, slice(start, end)
        start = end


@declared.forward(
    "grouped_linear",
    kind="mapped",
    accepts=lambda x, weight, offsets, *, out_dtype: _by_group(x, out_dtype),
)
def grouped_linear_by_group(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    y = x.new_zeros(x.shape[0], weight.shape[1])
    with exact_products:
        for group, rows in _groups(offsets):
            torch.mm(x[rows], weight[group].t(), out=y[rows])
    return y


@declared.backward(
    "grouped_linear",
    kind="mapped",
    accepts=lambda grad, x, weight, offsets, *, out_dtype, **_: _by_group(x, out_dtype),
)
def grouped_linear_backward_by_group(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    dx = x.new_zeros(x.shape) if needs[0] else None
    dweight = weight.new_zeros(weight.shape) if needs[1] else None
    with exact_products:
        for group, rows in _groups(offsets):
            if dx is not None:
                torch.mm(grad[rows], weight[group], out=dx[rows])
            if dweight is not None:
                torch.mm(grad[rows].t(), x[rows], out=dweight[group])
    return dx, dweight
