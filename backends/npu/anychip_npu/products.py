"""Rows of products with weights: linear through CANN's products, grouped_linear by one call.

The grouped product takes where the groups end from the device, so that the host does not wait.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_npu.numerics import exact_products
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared, left_to_reference

_PRODUCT = {"aten::mm": "aclnnMm"}
_BY_ROWS, _BY_COLUMNS = 0, 2  # group_type
_ONE_RESULT = 3  # split_item
_WIDTHS = range(1, 65536)
_GROUPS = range(1, 1025)


def _has_elements(*tensors: Tensor) -> bool:
    return all(t.numel() > 0 for t in tensors)


def _is_one_type(x: Tensor, out_dtype: torch.dtype | None) -> bool:
    return out_dtype in (None, x.dtype)


# linear


@declared.forward(
    "linear",
    calls={**_PRODUCT, "aten::addmm": "aclnnAddmm"},
    accepts=lambda x, weight, bias, *, out_dtype: (
        _has_elements(x, weight) and _is_one_type(x, out_dtype)
    ),
)
def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, out_dtype: torch.dtype | None
) -> Tensor:
    """Sums are float32; HF32, which the process may allow, is off:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnMm.md
    """
    rows, turned = x.reshape(-1, x.shape[-1]), weight.t()
    with exact_products:
        y = torch.mm(rows, turned) if bias is None else torch.addmm(bias, rows, turned)
    return y.view(*x.shape[:-1], weight.shape[0])


@declared.backward(
    "linear",
    calls={**_PRODUCT, "aten::sum.dim_IntList": "aclnnReduceSum"},
    accepts=lambda grad, x, weight, *, out_dtype, **_: (
        _has_elements(x, weight) and _is_one_type(x, out_dtype)
    ),
)
def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, *, out_dtype: torch.dtype | None, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Sums are float32; HF32, which the process may allow, is off:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/83RC1alpha003/API/aolapi/context/aclnnMm.md
    """
    rows = grad.reshape(-1, grad.shape[-1])
    dx = dweight = dbias = None
    with exact_products:
        if needs[0]:
            dx = torch.mm(rows, weight).view(x.shape)
        if needs[1]:
            dweight = torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
    if needs[2]:
        dbias = rows.sum(0, dtype=torch.float32).to(weight.dtype)
    return dx, dweight, dbias


# grouped_linear


_GROUPED = {"npu::npu_grouped_matmul": "aclnnGroupedMatmulV5"}
_SIZES = {"in": _WIDTHS, "out": _WIDTHS, "groups": _GROUPS, "rows": range(1, 2**31)}


def _product(x: Tensor, weight: Tensor, ends: Tensor, group_type: int) -> Tensor:
    found: list[Tensor] = torch.ops.npu.npu_grouped_matmul(
        [x], [weight], group_list=ends, split_item=_ONE_RESULT, group_type=group_type
    )
    return found[0]


def _all_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """The ends with the last one at the last row: the kernel wants every row in a group."""
    ends = offsets.to(torch.int64, copy=True)
    ends[-1] = x.shape[0]
    return ends


def _without_group(x: Tensor, offsets: Tensor) -> Tensor:
    """(T, 1) bool: the rows that belong to no group."""
    return (torch.arange(x.shape[0], device=x.device) >= offsets[-1])[:, None]


@declared.forward(
    "grouped_linear",
    calls=_GROUPED,
    limits=_SIZES,
    accepts=lambda x, weight, offsets, *, out_dtype: is_a2_or_a3(x) and _is_one_type(x, out_dtype),
)
def grouped_linear(
    x: Tensor, weight: Tensor, offsets: Tensor, *, out_dtype: torch.dtype | None
) -> Tensor:
    """By rows (group_type 0), weights transposed. Limits of groups and widths:
    https://gitcode.com/Ascend/op-plugin/blob/master/docs/zh/custom_APIs/torch_npu/torch_npu-npu_grouped_matmul.md
    """
    turned, ends = weight.contiguous().transpose(1, 2), _all_rows(x, offsets)
    y = _product(x.contiguous(), turned, ends, _BY_ROWS)
    return y.masked_fill_(_without_group(x, offsets), 0.0)


def _takes_backward(
    grad: Tensor, x: Tensor, *_: Any, out_dtype: torch.dtype | None, **__: Any
) -> bool:
    return is_a2_or_a3(x) and _is_one_type(x, out_dtype)


@declared.backward("grouped_linear", calls=_GROUPED, limits=_SIZES, accepts=_takes_backward)
def grouped_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    """By rows for x and by columns (group_type 2, x transposed) for the weights. Limits:
    https://www.hiascend.com/document/detail/zh/CANNCommunityEdition/latest/API/aolapi/context/ops-transformer/aclnnGroupedMatmulV5.md
    """
    outside, ends = _without_group(x, offsets), _all_rows(x, offsets)
    dx = dweight = None
    if needs[0]:
        dx = _product(grad.contiguous(), weight.contiguous(), ends, _BY_ROWS)
        dx = dx.masked_fill_(outside, 0.0)
    if needs[1]:
        # Rows of no group are in the sum of the last one, and may hold anything.
        own_grad, own_x = grad.masked_fill(outside, 0.0), x.masked_fill(outside, 0.0)
        turned = own_grad.contiguous().t()
        dweight = _product(turned, own_x.contiguous(), ends, _BY_COLUMNS)
        # A sum over no rows: nobody says what the kernel writes then.
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        dweight = dweight.masked_fill_((ends == starts)[:, None, None], 0.0)
    return dx, dweight


_WIDE = "out_dtype=float32 of 16-bit operands"
left_to_reference(
    "linear",
    part=_WIDE,
    reason="run on the emulator, torch_npu's mm with an out_dtype had rounded to 16 bits before",
)
left_to_reference("grouped_linear", part=_WIDE, reason="npu_grouped_matmul was not tried for it")
for _operator in ("conv1d", "conv2d"):
    left_to_reference(
        _operator,
        reason=(
            "its float32 products may be HF32's, of 11 bits, by a switch of their own, "
            "torch_npu.npu.conv.allow_hf32"
        ),
        page="https://gitcode.com/cann/ops-nn/blob/master/conv/convolution_forward/docs/aclnnConvolution.md",
    )
