"""Rows of activations: of one tensor, bias_gelu, swiglu, geglu.

torch's own gelu is the tanh form on a 910B, whatever is asked for; npu_gelu keeps the two apart.
The gated ones take both operands side by side in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared, left_to_reference

_aten = torch.ops.aten


def _has_elements(x: Tensor, *_: object, **__: object) -> bool:
    """Pages differ on tensors without elements; the reference serves those."""
    return x.numel() > 0 and is_a2_or_a3(x)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """Of any number of dims: CANN takes 8."""
    y: Tensor = torch.ops.npu.npu_gelu(x.contiguous().view(-1), approximate=approximate)
    return y.view(x.shape)


def _gelu_gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    given = (grad.contiguous().view(-1), x.contiguous().view(-1))
    dx: Tensor = torch.ops.npu.npu_gelu_backward(*given, approximate=approximate)
    return dx.view(x.shape)


# gelu, bias_gelu


@declared.forward("gelu", calls={"npu::npu_gelu": "aclnnGeluV2"}, accepts=_has_elements)
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    """Both forms.

    https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/torch_npu-npu_gelu.md
    """
    return _gelu(x, approximate)


@declared.backward(
    "gelu",
    calls={"npu::npu_gelu_backward": "aclnnGeluBackwardV2"},
    accepts=_has_elements,
)
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str, needs: Needs) -> tuple[Tensor]:
    """Both forms.

    https://gitcode.com/cann/ops-nn/blob/master/activation/gelu_grad_v2/docs/aclnnGeluBackwardV2.md
    """
    return (_gelu_gradient(grad.to(x.dtype), x, approximate),)


@declared.forward("bias_gelu", calls={"npu::npu_gelu": "aclnnGeluV2"}, accepts=_has_elements)
def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str) -> Tensor:
    """gelu of the sum in float32, which is not rounded in between.

    https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/torch_npu-npu_gelu.md
    """
    return _gelu(x.float() + bias.float(), approximate).to(x.dtype)


@declared.backward(
    "bias_gelu",
    calls={"npu::npu_gelu_backward": "aclnnGeluBackwardV2"},
    accepts=_has_elements,
)
def bias_gelu_backward(
    grad: Tensor, x: Tensor, bias: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """In float32, so that the bias' gradient sums what is not rounded.

    https://gitcode.com/cann/ops-nn/blob/master/activation/gelu_grad_v2/docs/aclnnGeluBackwardV2.md
    """
    slope = _gelu_gradient(grad.float(), x.float() + bias.float(), approximate)
    dx = slope.to(x.dtype) if needs[0] else None
    dbias = slope.view(-1, slope.shape[-1]).sum(0).to(bias.dtype) if needs[1] else None
    return dx, dbias


# silu, relu, sigmoid, tanh, softplus


def _flat(x: Tensor) -> Tensor:
    """Of one dim: CANN takes 8."""
    return x.contiguous().view(-1)


@declared.forward("silu", calls={"aten::silu": "aclnnSilu"}, accepts=_has_elements)
def silu(x: Tensor) -> Tensor:
    """https://gitcode.com/cann/ops-nn/blob/master/activation/swish/docs/aclnnSilu.md"""
    return torch.nn.functional.silu(_flat(x)).view(x.shape)


@declared.backward(
    "silu",
    calls={"aten::silu_backward": "aclnnSiluBackward"},
    accepts=_has_elements,
)
def silu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    """https://gitcode.com/cann/ops-nn/blob/master/activation/silu_grad/docs/aclnnSiluBackward.md"""
    return (_aten.silu_backward(_flat(grad), _flat(x)).view(x.shape),)


@declared.forward("relu", calls={"aten::relu": "aclnnRelu"}, accepts=_has_elements)
def relu(x: Tensor) -> Tensor:
    """The page:

    https://gitcode.com/cann/ops-nn/blob/master/activation/relu/docs/aclnnRelu&aclnnInplaceRelu.md
    """
    return torch.relu(_flat(x)).view(x.shape)


@declared.backward(
    "relu",
    calls={"aten::threshold_backward": "aclnnThresholdBackward"},
    accepts=_has_elements,
)
def relu_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    """The page:

    https://gitcode.com/cann/ops-nn/blob/master/activation/threshold_grad_v2_d/docs/aclnnThresholdBackward.md
    """
    return (_aten.threshold_backward(_flat(grad), _flat(x), 0).view(x.shape),)


@declared.forward("sigmoid", calls={"aten::sigmoid": "aclnnSigmoid"}, accepts=_has_elements)
def sigmoid(x: Tensor) -> Tensor:
    """The page:

    https://gitcode.com/cann/ops-nn/blob/master/activation/sigmoid/docs/aclnnSigmoid&aclnnInplaceSigmoid.md
    """
    return torch.sigmoid(_flat(x)).view(x.shape)


@declared.backward(
    "sigmoid",
    calls={"aten::sigmoid": "aclnnSigmoid", "aten::sigmoid_backward": "aclnnSigmoidBackward"},
    accepts=_has_elements,
)
def sigmoid_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    """Takes y, of which 16 bits would not do.

    https://gitcode.com/cann/ops-nn/blob/master/activation/sigmoid_grad/docs/aclnnSigmoidBackward.md
    """
    y = torch.sigmoid(_flat(x).float())
    return (_aten.sigmoid_backward(_flat(grad).float(), y).to(x.dtype).view(x.shape),)


@declared.forward("tanh", calls={"aten::tanh": "aclnnTanh"}, accepts=_has_elements)
def tanh(x: Tensor) -> Tensor:
    """https://gitcode.com/cann/ops-math/blob/master/math/tanh/docs/aclnnTanh&aclnnInplaceTanh.md"""
    return torch.tanh(_flat(x)).view(x.shape)


@declared.backward(
    "tanh",
    calls={"aten::tanh": "aclnnTanh", "aten::tanh_backward": "aclnnTanhBackward"},
    accepts=_has_elements,
)
def tanh_backward(grad: Tensor, x: Tensor, *, needs: Needs) -> tuple[Tensor]:
    """Takes y, of which 16 bits would not do.

    https://gitcode.com/cann/ops-math/blob/master/math/tanh_grad/docs/aclnnTanhBackward.md
    """
    y = torch.tanh(_flat(x).float())
    return (_aten.tanh_backward(_flat(grad).float(), y).to(x.dtype).view(x.shape),)


def _exp_is_finite(x: Tensor, *_: Tensor, beta: float, threshold: float, **__: object) -> bool:
    """The page's formula takes exp(beta x) up to the threshold."""
    return threshold <= 80.0 and _has_elements(x)


@declared.forward("softplus", calls={"aten::softplus": "aclnnSoftplus"}, accepts=_exp_is_finite)
def softplus(x: Tensor, *, beta: float, threshold: float) -> Tensor:
    """https://gitcode.com/cann/ops-nn/blob/master/activation/softplus_v2/docs/aclnnSoftplus.md"""
    return torch.nn.functional.softplus(_flat(x), beta, threshold).view(x.shape)


@declared.backward(
    "softplus",
    calls={"aten::softplus_backward": "aclnnSoftplusBackward"},
    accepts=_exp_is_finite,
)
def softplus_backward(
    grad: Tensor, x: Tensor, *, beta: float, threshold: float, needs: Needs
) -> tuple[Tensor]:
    """The page:

    https://gitcode.com/cann/ops-nn/blob/master/activation/softplus_v2_grad/docs/aclnnSoftplusBackward.md
    """
    return (_aten.softplus_backward(_flat(grad), _flat(x), beta, threshold).view(x.shape),)


left_to_reference(
    "relu2", reason="CANN has no square of relu: the reference is aclnnRelu and a product"
)


# swiglu, geglu


def _side_by_side(gate: Tensor, up: Tensor) -> Tensor:
    """(rows, 2 N), contiguous: the tensor itself of which the two are halves, or a copy."""
    size = gate.shape[-1] if gate.dim() else 1
    shape = (*gate.shape[:-1], 2 * size)
    # From the last dim to the first.
    strides = tuple(accumulate((1, *shape[:0:-1]), mul))[::-1]
    are_halves = (
        gate.stride() == up.stride() == strides
        and up.storage_offset() - gate.storage_offset() == size
        and up.untyped_storage().data_ptr() == gate.untyped_storage().data_ptr()
    )
    if are_halves:
        return gate.as_strided(shape, strides).view(-1, 2 * size)
    return torch.cat((gate.reshape(-1, size), up.reshape(-1, size)), -1)


def _of_one_dtype(*tensors: Tensor) -> Sequence[Tensor]:
    """The tensors, in float32 if they differ."""
    if all(t.dtype == tensors[0].dtype for t in tensors):
        return tensors
    return [t.float() for t in tensors]


def _halves(both: Tensor, needs: Needs, *like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Copies of the halves that are needed, of the shapes and dtypes of ``like``."""
    first, second = (
        half.to(x.dtype, copy=True, memory_format=torch.contiguous_format).view(x.shape)
        if need
        else None
        for half, need, x in zip(both.chunk(2, -1), needs, like, strict=True)
    )
    return first, second


@declared.forward("swiglu", calls={"npu::npu_swiglu": "aclnnSwiGlu"}, accepts=_has_elements)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(first half) * second half, one rounding; contiguous, not empty.

    https://gitcode.com/cann/ops-nn/blob/master/activation/swi_glu/docs/aclnnSwiGlu.md
    """
    both = _side_by_side(*_of_one_dtype(gate, up))
    y: Tensor = torch.ops.npu.npu_swiglu(both, -1)
    return y.to(gate.dtype).view(gate.shape)


@declared.backward(
    "swiglu",
    calls={"npu::npu_swiglu_backward": "aclnnSwiGluGrad"},
    accepts=_has_elements,
)
def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients side by side, one rounding.

    https://gitcode.com/cann/ops-nn/blob/master/activation/swi_glu_grad/docs/aclnnSwiGluGrad.md
    """
    slope, *given = _of_one_dtype(grad, gate, up)
    both = _side_by_side(*given)
    rows = slope.reshape(both.shape[0], -1).contiguous()
    return _halves(torch.ops.npu.npu_swiglu_backward(rows, both, -1), needs, gate, up)


_GEGLU_FORMS = {"none": 0, "tanh": 1}


@declared.forward("geglu", calls={"npu::npu_geglu": "aclnnGeGluV3"}, accepts=_has_elements)
def geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    """In float32, the first half activated: with float16 CANN's multiplies a gelu that is rounded.

    https://gitcode.com/cann/ops-nn/blob/master/activation/ge_glu_v2/docs/aclnnGeGluV3.md
    https://gitcode.com/cann/ops-nn/tree/master/activation/ge_glu_v2/op_kernel
    """
    both = _side_by_side(gate.float(), up.float())
    y: Tensor = torch.ops.npu.npu_geglu(both, -1, _GEGLU_FORMS[approximate], True)[0]
    return y.to(gate.dtype).view(gate.shape)


@declared.backward(
    "geglu",
    calls={"npu::npu_geglu_grad": "aclnnGeGluV3Backward", "npu::npu_gelu": "aclnnGeluV2"},
    accepts=_has_elements,
)
def geglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, approximate: str, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    """In float32; it takes the gelu of the forward, which is computed again.

    https://gitcode.com/cann/ops-nn/blob/master/activation/ge_glu_grad_v2/docs/aclnnGeGluV3Backward.md
    """
    wide = gate.float()
    both = _side_by_side(wide, up.float())
    active = _gelu(wide, approximate).view(both.shape[0], -1)
    rows = grad.float().reshape(active.shape).contiguous()
    given = (rows, both, active, -1, _GEGLU_FORMS[approximate], True)
    return _halves(torch.ops.npu.npu_geglu_grad(*given), needs, gate, up)
