"""The host's rows for products with weights: linear, grouped_linear, embedding, and the fused loss.

Products are torch's; the loss between the products of linear_cross_entropy is the native one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from anychip import operators
from anychip.contract.operator import Function
from anychip.operators.linear_cross_entropy import chunks
from anychip.operators.loss import check_targets
from anychip.operators.ragged import refuse_unsorted
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared

_aten = torch.ops.aten
_kernels: Any = native.kernels


def _matrix_dtypes() -> set[torch.dtype]:
    """Dtypes that this processor has matrix or vector product instructions for."""
    found = {torch.float32}
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        found.add(torch.bfloat16)
    if torch.cpu._is_amx_fp16_supported():
        found.add(torch.float16)
    return found


_MATRIX_DTYPES = _matrix_dtypes()


def _widened(tensor: Tensor) -> Tensor:
    # torch's 16-bit product of strided operands adds up in 16 bits, so they are made contiguous.
    # Without 16-bit units, torch's own 16-bit product is slower than converting to float32 and
    # back (2.4 to 3.8 times, measured on AVX-512 without bf16), and no more exact.
    return tensor.contiguous() if tensor.dtype in _MATRIX_DTYPES else tensor.float()


def _widening(x: Tensor, other: torch.dtype | None) -> Callable[[Tensor], Tensor]:
    """What operands go through: torch has no product of 16-bit ones with a float32 tensor here."""
    return _widened if other in (None, x.dtype) else Tensor.float


@declared.forward("linear", kind="mapped")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    wide = _widening(x, out_dtype)
    y = torch.nn.functional.linear(wide(x), wide(weight), None if bias is None else wide(bias))
    return y.to(out_dtype or x.dtype)


@declared.backward("linear", kind="mapped")
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide = _widening(x, grad.dtype)
    rows = wide(grad.reshape(x.shape[:-1].numel(), grad.shape[-1]))
    dx = dweight = dbias = None
    if needs[0]:
        dx = (rows @ wide(weight)).to(x.dtype).view(x.shape)
    if needs[1]:
        dweight = (rows.t() @ wide(x.reshape(rows.shape[0], x.shape[-1]))).to(weight.dtype)
    if needs[2]:
        dbias = rows.float().sum(0).to(weight.dtype)
    return dx, dweight, dbias


@declared.forward("embedding", kind="mapped")
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, weight)


@declared.backward("embedding", kind="mapped")
def embedding_backward(
    grad: Tensor, indices: Tensor, weight: Tensor, *, needs: Needs
) -> tuple[Tensor]:
    # Rows that occur more than once are summed, which must not happen in 16 bits.
    total = _aten.embedding_dense_backward(grad.float(), indices, weight.shape[0], -1, False)
    return (total.to(weight.dtype),)


def _groups(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows."""
    for group, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if start < end:
            yield group, slice(start, end)


@declared.forward("grouped_linear", kind="mapped")
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    refuse_unsorted("grouped_linear", "offsets", offsets, x.shape[0])
    ends = offsets.tolist()
    y = x.new_empty((x.shape[0], weight.shape[1]), dtype=out_dtype)
    y[ends[-1] if ends else 0 :] = 0.0
    wide = _widening(x, out_dtype)
    for group, rows in _groups(ends):
        y[rows] = torch.nn.functional.linear(wide(x[rows]), wide(weight[group]))
    return y


@declared.backward("grouped_linear", kind="mapped")
def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    ends, wide = offsets.tolist(), _widening(x, grad.dtype)
    dx = x.new_empty(x.shape) if needs[0] else None
    dweight = weight.new_zeros(weight.shape) if needs[1] else None
    if dx is not None:
        dx[ends[-1] if ends else 0 :] = 0.0
    for group, rows in _groups(ends):
        slope = wide(grad[rows])
        if dx is not None:
            dx[rows] = slope @ wide(weight[group])
        if dweight is not None:
            dweight[group] = slope.t() @ wide(x[rows])
    return dx, dweight


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    # Always in float32: torch has no product of 16-bit factors with a float32 result on a host.
    wide = rows.float()
    return wide @ weight.t() if bias is None else torch.addmm(bias, wide, weight.t())


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    num_classes = weight.shape[0]
    check_targets("linear_cross_entropy", target, num_classes, ignore_index)
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1).contiguous()
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    loss, lse = wide.new_empty(target.shape), wide.new_empty(target.shape)
    for chunk in chunks(rows.shape[0], num_classes):
        logits = _logits(rows[chunk], wide, wide_bias)
        _kernels.cross_entropy_forward(
            logits.data_ptr(),
            labels[chunk].data_ptr(),
            loss.view(-1)[chunk].data_ptr(),
            lse.view(-1)[chunk].data_ptr(),
            logits.shape[0],
            num_classes,
            ignore_index,
            label_smoothing,
            z_loss,
            _kernels.REDUCTION_NONE,
            CODES[torch.float32],
        )
    if reduction == "none":
        return loss, lse
    total = loss.sum() if reduction == "sum" else loss.sum() / (labels != ignore_index).sum()
    return total, lse


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows, labels = x.reshape(target.numel(), x.shape[-1]), target.reshape(-1).contiguous()
    wide, wide_bias = weight.float(), None if bias is None else bias.float()
    lse = lse.contiguous()
    slope = grad / (labels != ignore_index).sum() if reduction == "mean" else grad
    slope = slope.expand(target.shape).reshape(-1).contiguous()
    dx = rows.new_empty(rows.shape) if needs[0] else None
    dweight = torch.zeros_like(wide) if needs[1] else None
    dbias = wide.new_zeros(wide.shape[0]) if needs[2] else None
    for chunk in chunks(rows.shape[0], wide.shape[0]):
        logits = _logits(rows[chunk], wide, wide_bias)
        dlogits = torch.empty_like(logits)
        _kernels.cross_entropy_backward(
            slope[chunk].data_ptr(),
            logits.data_ptr(),
            labels[chunk].data_ptr(),
            lse.view(-1)[chunk].data_ptr(),
            dlogits.data_ptr(),
            logits.shape[0],
            wide.shape[0],
            ignore_index,
            label_smoothing,
            z_loss,
            _kernels.REDUCTION_NONE,
            CODES[torch.float32],
        )
        if dx is not None:
            dx[chunk] = dlogits @ wide
        if dweight is not None:
            dweight.addmm_(dlogits.t(), rows[chunk].float())
        if dbias is not None:
            dbias += dlogits.sum(0)
    return (
        None if dx is None else dx.view(x.shape),
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None else dbias.to(weight.dtype),
    )


if native.kernels is not None:
    declared.forward("linear_cross_entropy", kind="mapped")(linear_cross_entropy)
    declared.backward("linear_cross_entropy", kind="mapped")(linear_cross_entropy_backward)

# torch's products and sums, as of the reference: there is no native part that would be faster.
_partials = operators.linear_cross_entropy_partials
declared.forward(_partials.name, kind="mapped")(_partials.forward)
declared.backward(_partials.name, kind="mapped")(cast(Function, _partials.backward))
