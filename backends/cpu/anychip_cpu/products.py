"""Products with weights on the host, by torch: linear and grouped_linear."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from anychip.operators.ragged import refuse_unsorted
from anychip_cpu.table import Needs, declared


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
