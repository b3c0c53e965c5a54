"""Products with weights on the host: linear and grouped_linear, by torch's products or by ours.

Ours is for float32 on processors for which torch's library is not made; elsewhere nothing but
torch's runs, and what its library has beside its operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anychip.operators.ragged import refuse_unsorted
from anychip_cpu import native
from anychip_cpu.device import vendor
from anychip_cpu.table import Needs, address, declared

_kernels: Any = native.kernels
_pad = torch.nn.functional.pad

IN_TILES = frozenset({torch.bfloat16} if torch.cpu._is_amx_tile_supported() else ())
"""Dtypes whose products the processor makes by tiles (AMX): torch's own take a half to a fifth of
the time that those of float32 take."""


def _own_below() -> dict[torch.dtype, float]:
    """Below how many rows torch's product in 16 bits is quicker than one of float32.

    Where the processor has no instructions for it, converting to float32 and back is 2.4 to 3.8
    times as fast (measured on AVX-512 without bfloat16). With AVX-512's for bfloat16, on an Intel
    processor whose AMX could not be used, it is 1.1 to 1.7 times as fast from 64 rows on, 0.3 to
    1.05 times below. On AMD's only torch's own was measured. A rule, not a measurement at start:
    the bits depend on it, which a busy moment must not change.
    """
    found: dict[torch.dtype, float] = dict.fromkeys(IN_TILES, math.inf)
    if torch.bfloat16 not in found and torch.cpu._is_avx512_bf16_supported():
        found[torch.bfloat16] = 64 if vendor() == "GenuineIntel" else math.inf
    if torch.cpu._is_amx_fp16_supported():
        found[torch.float16] = math.inf
    return found


OWN_BELOW = {torch.float32: math.inf, **_own_below()}


INTO_FLOAT32 = frozenset(
    dtype
    for dtype in {torch.bfloat16}
    if OWN_BELOW.get(dtype) == math.inf and _kernels and _kernels.has_block_products()
)
"""16-bit dtypes whose products have float32 results here: 3 to 6 times as quick as float32 by AMX.

By AVX-512's instructions for bfloat16, on AMD's processors, they were not measured: torch's own
products, which are quick there, have the same kernel."""


_LARGE = 1 << 31
"""From so many multiplications on a weight's 16-bit gradient is made with float32 sums: by AMX it
takes 0.68 to 1.06 of torch's time from there, as much or more below."""
_WIDE = 512
"""And from so many rows and columns of it: of fewer the other factor is copied for too little."""


def _widening(x: Tensor, other: torch.dtype | None = None) -> Callable[[Tensor], Tensor]:
    """What the operands of a product of the rows of ``x`` (..., K) go through.

    Args:
        other: dtype of the result or of another operand, if it is not that of ``x``: torch has no
            product of 16-bit operands with a float32 tensor here.
    """
    if other in (None, x.dtype) and x.shape[:-1].numel() < OWN_BELOW.get(x.dtype, 0):
        # torch's 16-bit product of strided operands adds up in 16 bits, so they are contiguous.
        return Tensor.contiguous
    return Tensor.float


def _has_own_product() -> bool:
    """Whether the native product is quicker than torch's, if it is not small.

    On AMD's processors without AVX-512 (measured on one, Zen 3) it is 0.97 to 1.2 times as fast. A
    rule, like that of 16 bits.
    """
    is_built = native.kernels is not None and vendor() == "AuthenticAMD"
    return is_built and _kernels.build_info()["isa"] == "avx2"


OWN_PRODUCT_FROM = 1 << 23 if _has_own_product() else math.inf
"""How many multiplications a product has at least that the native kernel is given."""
_NARROW = 64
"""And how many rows, columns and terms: narrower ones are none for tiles and panels."""


class Panels:
    """The right factor of several products (depth, columns), bfloat16, as they read it."""

    def __init__(self, right: Tensor) -> None:
        self.shape = right.shape
        right, is_transposed = _in_memory(right)
        depth, columns = self.shape
        self.memory = right.new_empty(_kernels.packed_numel(columns, depth))
        _kernels.bfloat16_panels(
            address(right), address(self.memory), columns, depth, is_transposed
        )


_TERMS = 32
"""Of a product by tiles, that are multiplied at once."""


def _leaks(rows: Tensor) -> bool:
    """Whether torch's product of these rows (..., K) lets one see the next one's numbers.

    oneDNN by AMX multiplies them by 0 where K is not whole tiles, which makes NaN of a NaN or an
    infinity (its issue 5717; torch 2.13: of K = 15, 34 or 100, in a quarter of random calls).
    """
    return rows.dtype in IN_TILES and rows.shape[-1] % _TERMS > 0 and rows.shape[:-1].numel() > 1


def multiply(
    left: Tensor,
    right: Tensor | Panels,
    out: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    adds: bool = False,
) -> Tensor:
    """``left @ right`` of matrices of one dtype, each of which may be a transposed view.

    Args:
        right: panels are of INTO_FLOAT32, as ``left`` is.
        out: contiguous; is written, or with ``adds`` added to. None: a new one. Of the matrices'
            dtype, or float32 where that is in INTO_FLOAT32.
        bias: for each column, added to every row, in the dtype of ``out``; not with ``adds``.
    """
    if isinstance(right, Panels) or (out is not None and out.dtype != left.dtype):
        assert out is not None, "panels are for several products into what is there"
        return _multiply_in_float32(left, right, out, bias, adds=adds)
    (rows, depth), columns = left.shape, right.shape[1]
    is_own = rows * depth * columns >= OWN_PRODUCT_FROM and left.dtype == torch.float32
    if not is_own or min(rows, depth, columns) < _NARROW:
        if left.is_contiguous() and _leaks(left):
            rest = -depth % _TERMS
            left, right = _pad(left, (0, rest)), _pad(right, (0, 0, 0, rest))
        if adds:
            assert out is not None, "there is something to add to"
            return out.addmm_(left, right)
        if bias is not None:
            return torch.addmm(bias, left, right, out=out)
        return torch.mm(left, right, out=out)
    if out is None:
        out = left.new_empty(rows, columns)
    assert out.is_contiguous(), "rows are written"
    left, left_transposed = _in_memory(left)
    right, right_transposed = _in_memory(right)
    bias = None if bias is None else bias.contiguous()  # which is there until the kernel ends
    given = map(address, (left, right, bias, out))
    _kernels.product(*given, rows, columns, depth, left_transposed, right_transposed, adds)
    return out


def _multiply_in_float32(
    left: Tensor, right: Tensor | Panels, out: Tensor, bias: Tensor | None, *, adds: bool
) -> Tensor:
    rows, columns = out.shape
    left, left_transposed = _in_memory(left)
    right_transposed = False
    if isinstance(right, Tensor):
        right, right_transposed = _in_memory(right)
    given = (left, None, right.memory) if isinstance(right, Panels) else (left, right, None)
    bias = None if bias is None else bias.contiguous()
    _kernels.bfloat16_product(
        *map(address, (*given, bias, out)), rows, columns, left.shape[0 if left_transposed else 1],
        left_transposed, right_transposed, adds,
    )  # fmt: skip
    return out


def _in_memory(matrix: Tensor) -> tuple[Tensor, bool]:
    """It, or what it is the transposed view of, and whether it is one; contiguous."""
    is_transposed = not matrix.is_contiguous() and matrix.t().is_contiguous()
    return (matrix.t() if is_transposed else matrix.contiguous()), is_transposed


def _rows(x: Tensor) -> Tensor:
    """(..., N) as (rows, N), also where N is 0."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


@declared.forward("linear", kind="mapped")
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    if out_dtype == torch.float32 and x.dtype in INTO_FLOAT32:
        y = x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)
        multiply(_rows(x), weight.t(), _rows(y), bias=None if bias is None else bias.float())
        return y
    wide = _widening(x, out_dtype)
    given = wide(x), wide(weight), None if bias is None else wide(bias)
    if x.numel() * weight.shape[0] < OWN_PRODUCT_FROM and not _leaks(given[0]):
        y = torch.nn.functional.linear(*given)
    else:
        y = multiply(_rows(given[0]), given[1].t(), bias=given[2])
        y = y.view(*x.shape[:-1], weight.shape[0])
    return y.to(out_dtype or x.dtype)


@declared.backward("linear", kind="mapped")
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide = _widening(x, grad.dtype)
    rows = wide(_rows(grad))
    dx = dweight = dbias = None
    if needs[0]:
        dx = multiply(rows, wide(weight)).to(x.dtype).view(x.shape)
    if needs[1]:
        dweight = _of_weight(rows, wide(_rows(x))).to(weight.dtype)
    if needs[2]:
        # torch's sum of 16-bit numbers is one of float32 inside; with a copy it takes ten times as
        # long.
        dbias = (rows if rows.dtype == weight.dtype else rows.float()).sum(0).to(weight.dtype)
    return dx, dweight, dbias


def _of_weight(slope: Tensor, rows: Tensor) -> Tensor:
    """``slope^T rows``, which torch adds up slowly where both lie by rows."""
    width, is_large = min(slope.shape[1], rows.shape[1]), slope.numel() * rows.shape[1] >= _LARGE
    if not is_large or width < _WIDE or rows.dtype not in INTO_FLOAT32:
        return multiply(slope.t(), rows)
    out = rows.new_empty((slope.shape[1], rows.shape[1]), dtype=torch.float32)
    return multiply(slope.t(), rows, out)


def _counts(offsets: Tensor, rows: int) -> list[int]:
    """Rows of each group, and of what is behind the last one."""
    ends = [0, *offsets.tolist(), rows]
    return [end - start for start, end in itertools.pairwise(ends)]


def _write(product: Tensor, left: Tensor, right: Tensor) -> None:
    """``left @ right`` into a part of a result, which may be of another dtype."""
    if left.dtype == product.dtype:
        multiply(left, right, product)
    else:
        product.copy_(left @ right)


@declared.forward("grouped_linear", kind="mapped")
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    refuse_unsorted("grouped_linear", "offsets", offsets, x.shape[0])
    y = x.new_empty((x.shape[0], weight.shape[1]), dtype=out_dtype)
    counts = _counts(offsets, x.shape[0])
    *outs, behind = y.split(counts)
    for out, rows, of_group in zip(outs, x.split(counts), weight.unbind(), strict=False):
        wide = _widening(rows, out_dtype)
        _write(out, wide(rows), wide(of_group).t())
    behind.zero_()
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
    dx = x.new_empty(x.shape) if needs[0] else None
    dweight = weight.new_empty(weight.shape) if needs[1] else None
    counts = _counts(offsets, x.shape[0])
    rows_of_dx = None if dx is None else dx.split(counts)
    parts = zip(grad.split(counts), x.split(counts), weight.unbind(), strict=False)
    for group, (slope, rows, of_group) in enumerate(parts):
        wide = _widening(rows, grad.dtype)
        slope = wide(slope)
        if rows_of_dx is not None:
            _write(rows_of_dx[group], slope, wide(of_group))
        if dweight is not None:
            _write(dweight[group], slope.t(), wide(rows))
    if rows_of_dx is not None:
        rows_of_dx[-1].zero_()
    return dx, dweight
