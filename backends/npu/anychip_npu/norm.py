"""Rows of norms: rms_norm, layer_norm, group_norm, and norms of the sum with a residual.

Weights are given in float32, whatever they are kept in. That is exact, CANN takes such a weight
with every dtype of x, and the product with it is not rounded to 16 bits before the result is. What
CANN rounds once more than the specification is given float32 tensors.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from anychip.contract.settings import SameBits
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared

Gradients = tuple[Tensor | None, ...]


def _rows(x: Tensor) -> Tensor:
    """(rows, hidden), contiguous: CANN's gradients take two dims at least."""
    return x.contiguous().view(prod(x.shape[:-1]), x.shape[-1])


def _has_elements(x: Tensor, *_: object, **__: object) -> bool:
    """Pages differ on whether tensors without elements are taken; the reference serves those."""
    return x.numel() > 0 and is_a2_or_a3(x)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = torch.ops.npu.npu_rms_norm(_rows(x), weight.float(), eps)
    return y.view(x.shape), rstd.view(x.shape[:-1])


def _layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shift = None if bias is None else bias.float()
    found = torch.ops.aten.native_layer_norm(_rows(x), weight.shape, weight.float(), shift, eps)
    y, mean, rstd = found
    return y.view(x.shape), mean.view(x.shape[:-1]), rstd.view(x.shape[:-1])


# rms_norm


@declared.forward("rms_norm", calls={"npu::npu_rms_norm": "aclnnRmsNorm"}, accepts=_has_elements)
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """eps is inside of the root; rstd is float32 with a last dim of 1; gamma may be float32.

    https://gitcode.com/cann/ops-nn/blob/master/norm/rms_norm/docs/aclnnRmsNorm.md
    """
    return _rms_norm(x, weight, eps)


@declared.backward(
    "rms_norm",
    calls={"npu::npu_rms_norm_backward": "aclnnRmsNormGrad"},
    accepts=_has_elements,
)
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, needs: Needs
) -> Gradients:
    """The gradient of gamma is float32; it is summed in any order unless determinism is asked for.

    https://gitcode.com/cann/ops-nn/blob/master/norm/rms_norm_grad/docs/aclnnRmsNormGrad.md
    """
    dx, dweight = _rms_gradients(grad.to(x.dtype), x, weight, rstd)
    return (dx if needs[0] else None), (dweight if needs[1] else None)


def _rms_gradients(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    with SameBits():
        dx, dweight = torch.ops.npu.npu_rms_norm_backward(
            _rows(grad), _rows(x), weight.float(), rstd.reshape(-1, 1)
        )
    return dx.view(x.shape), dweight.to(weight.dtype)


# layer_norm


@declared.forward(
    "layer_norm",
    calls={"aten::native_layer_norm": "aclnnLayerNorm"},
    accepts=_has_elements,
)
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weight and bias have x's dtype or are float32, and are alike; mean and rstd are float32.

    https://gitcode.com/cann/ops-nn/tree/master/norm/layer_norm_v4/docs
    """
    return _layer_norm(x, weight, bias, eps)


@declared.backward(
    "layer_norm",
    calls={"aten::native_layer_norm_backward": "aclnnLayerNormBackward"},
    accepts=_has_elements,
)
def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> Gradients:
    """Gradients of weight and bias are float32.

    https://gitcode.com/cann/ops-nn/blob/master/norm/layer_norm_grad_v3/docs/aclnnLayerNormBackward.md
    """
    return _layer_gradients(grad.to(x.dtype), x, weight, mean, rstd, needs)


def _layer_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, needs: Needs
) -> Gradients:
    scale = weight.float()
    statistics = (mean.reshape(-1, 1), rstd.reshape(-1, 1))
    # A bias would have to be of the weight's dtype, and for None torch_npu makes one of x's. Its
    # values are not read.
    given = (_rows(grad), _rows(x), weight.shape, *statistics, scale, scale)
    with SameBits():
        found = torch.ops.aten.native_layer_norm_backward(*given, list(needs))
    dx, dweight, dbias = found
    return (
        dx.view(x.shape) if needs[0] else None,
        dweight.to(weight.dtype) if needs[1] else None,
        dbias.to(weight.dtype) if needs[2] else None,
    )


# add_rms_norm, add_layer_norm


def _stored_sum(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """The sum in the residual's dtype, and the same numbers in x's, or in float32 if they differ.

    CANN rounds a sum of two 16-bit tensors once, from float32.
    """
    total = (x + residual).to(residual.dtype).contiguous()
    return total, total if total.dtype == x.dtype else total.float()


def _is_float32(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.float32 for t in tensors)


def _both_gradients(
    dnorm: Tensor, grad: Tensor, dtotal: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x and residual, two tensors of one number, in the dtypes of y and of the sum."""
    total = dnorm + dtotal
    dx = total.to(grad.dtype) if needs[0] else None
    return dx, total.to(dtotal.dtype, copy=True) if needs[1] else None


@declared.forward(
    "add_rms_norm",
    calls={"npu::npu_add_rms_norm": "aclnnAddRmsNorm", "npu::npu_rms_norm": "aclnnRmsNorm"},
    accepts=_has_elements,
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """One call in float32. With 16 bits CANN's rounds before it multiplies by gamma: two calls.

    https://gitcode.com/cann/ops-nn/blob/master/norm/add_rms_norm/docs/aclnnAddRmsNorm.md
    https://gitcode.com/cann/ops-nn/blob/master/norm/add_rms_norm/op_kernel/add_rms_norm.h
    """
    if _is_float32(x, residual):
        given = (_rows(x), _rows(residual), weight.float(), eps)
        y, rstd, total = torch.ops.npu.npu_add_rms_norm(*given)
        return y.view(x.shape), total.view(x.shape), rstd.view(x.shape[:-1])
    total, normed = _stored_sum(x, residual)
    y, rstd = _rms_norm(normed, weight, eps)
    return y.to(x.dtype), total, rstd


@declared.backward(
    "add_rms_norm",
    calls={"npu::npu_rms_norm_backward": "aclnnRmsNormGrad"},
    accepts=_has_elements,
)
def add_rms_norm_backward(
    grad: Tensor,
    dtotal: Tensor,
    total: Tensor,
    weight: Tensor,
    rstd: Tensor,
    *,
    eps: float,
    needs: Needs,
) -> Gradients:
    """In float32: the norm's gradient is rounded once, after the sum's is added.

    https://gitcode.com/cann/ops-nn/blob/master/norm/rms_norm_grad/docs/aclnnRmsNormGrad.md
    """
    dnorm, dweight = _rms_gradients(grad.float(), total.float(), weight, rstd)
    return *_both_gradients(dnorm, grad, dtotal, needs), dweight if needs[2] else None


@declared.forward(
    "add_layer_norm",
    calls={
        "npu::npu_add_layer_norm": "aclnnAddLayerNorm",
        "aten::native_layer_norm": "aclnnLayerNorm",
    },
    accepts=_has_elements,
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One call in float32. With 16 bits CANN's norms a sum that is not rounded yet: two calls.

    https://gitcode.com/cann/ops-nn/blob/master/norm/add_layer_norm/docs/aclnnAddLayerNorm.md
    https://gitcode.com/cann/ops-nn/tree/master/norm/add_layer_norm/op_kernel
    """
    if _is_float32(x, residual):
        shift = torch.zeros_like(weight) if bias is None else bias
        y, mean, rstd, total = torch.ops.npu.npu_add_layer_norm(
            _rows(x), _rows(residual), weight.float(), shift.float(), eps, True
        )
        rows = x.shape[:-1]
        return y.view(x.shape), total.view(x.shape), mean.view(rows), rstd.view(rows)
    total, normed = _stored_sum(x, residual)
    y, mean, rstd = _layer_norm(normed, weight, bias, eps)
    return y.to(x.dtype), total, mean, rstd


@declared.backward(
    "add_layer_norm",
    calls={"aten::native_layer_norm_backward": "aclnnLayerNormBackward"},
    accepts=_has_elements,
)
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
) -> Gradients:
    """In float32, as of add_rms_norm.

    https://gitcode.com/cann/ops-nn/blob/master/norm/layer_norm_grad_v3/docs/aclnnLayerNormBackward.md
    """
    wanted = (needs[0] or needs[1], *needs[2:])
    dnorm, *dweights = _layer_gradients(grad.float(), total.float(), weight, mean, rstd, wanted)
    if dnorm is None:
        return None, None, *dweights
    return *_both_gradients(dnorm, grad, dtotal, needs), *dweights


# group_norm


def _is_precise(x: Tensor, *_: object, eps: float, **__: object) -> bool:
    """Below 1e-5 the page promises no precision."""
    return eps >= 1e-5 and _has_elements(x)


def _goes_back(grad: Tensor, x: Tensor, *_: object, num_groups: int, **__: object) -> bool:
    channels = x.shape[1]
    return channels <= 240_000 and channels // num_groups <= 8000 and _has_elements(x)


def _group_sizes(x: Tensor, num_groups: int) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[1], prod(x.shape[2:]), num_groups


@declared.forward(
    "group_norm",
    calls={"aten::native_group_norm": "aclnnGroupNorm"},
    accepts=_is_precise,
)
def group_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, num_groups: int, eps: float
) -> tuple[Tensor, ...]:
    """mean and rstd have the dtype of x, as the weight, so that all are given in float32.

    https://gitcode.com/cann/ops-nn/blob/master/norm/group_norm/docs/aclnnGroupNorm.md
    """
    sizes = _group_sizes(x, num_groups)
    rows = x.float().contiguous().view(sizes[:3])
    scale, shift = (None if t is None else t.float().contiguous() for t in (weight, bias))
    y, mean, rstd = torch.native_group_norm(rows, scale, shift, *sizes, eps)
    return y.to(x.dtype).view(x.shape), mean, rstd


@declared.backward(
    "group_norm",
    calls={"aten::native_group_norm_backward": "aclnnGroupNormBackward"},
    accepts=_goes_back,
)
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
) -> Gradients:
    """Up to 240,000 channels, 8000 in a group; summed in any order unless determinism is asked for.

    https://gitcode.com/cann/ops-nn/blob/master/norm/group_norm_grad/docs/aclnnGroupNormBackward.md
    """
    sizes = _group_sizes(x, num_groups)
    slope, rows = (t.float().contiguous().view(sizes[:3]) for t in (grad, x))
    given = (slope, rows, mean, rstd, weight.float().contiguous(), *sizes, [True, True, True])
    with SameBits():
        dx, dweight, dbias = torch.ops.aten.native_group_norm_backward(*given)
    found = (dx.to(x.dtype).view(x.shape), dweight.to(weight.dtype), dbias.to(weight.dtype))
    return tuple(t if need else None for t, need in zip(found, needs, strict=True))
