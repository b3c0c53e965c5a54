"""The host's operators: native rows where memory is the limit, mapped ones where torch is best.

Native rows hand addresses to ``csrc/cpu``; they make read tensors contiguous and allocate outputs
with torch. Without the native module only the mapped rows are there, and the reference serves the
rest. Rows of products, attention and lists of tensors are in modules of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anychip_cpu import attention, native, products  # noqa: F401 - the two add rows to the table
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, declared
from anychip_cpu.table import rows_of as _rows

_kernels: Any = native.kernels


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _wanted(need: bool, like: Tensor) -> tuple[Tensor | None, int]:
    """A gradient to be written and its address; (None, 0) when it is not wanted."""
    if not need:
        return None, 0
    made = _empty_like(like)
    return made, made.data_ptr()


# Norms


@declared.forward("rms_norm")
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    _kernels.rms_norm_forward(
        x.data_ptr(),
        weight.data_ptr(),
        y.data_ptr(),
        rstd.data_ptr(),
        *_rows(x),
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
    dx, dx_address = _wanted(needs[0], x)
    dweight, dweight_address = _wanted(needs[1], weight)
    _kernels.rms_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        rstd.data_ptr(),
        dx_address,
        dweight_address,
        *_rows(x),
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
        *_rows(x),
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
    dx, dx_address = _wanted(needs[0], x)
    dweight, dweight_address = _wanted(needs[1], weight)
    dbias, dbias_address = _wanted(needs[2], weight)
    _kernels.layer_norm_backward(
        grad.data_ptr(),
        x.data_ptr(),
        weight.data_ptr(),
        mean.data_ptr(),
        rstd.data_ptr(),
        dx_address,
        dweight_address,
        dbias_address,
        *_rows(x),
        CODES[x.dtype],
        CODES[weight.dtype],
    )
    return dx, dweight, dbias


# Element-wise


@declared.forward("dropout")
def dropout(
    x: Tensor,
    rng: Tensor,
    rows: Tensor | None = None,
    *,
    p: float,
    width: int = 0,
    column: int = 0,
) -> Tensor:
    x, rng = x.contiguous(), rng.contiguous()
    y = torch.empty_like(x)
    rows = None if rows is None else rows.contiguous()
    place = () if rows is None else (rows.data_ptr(), x.shape[-1], width, column)
    addresses = (x.data_ptr(), rng.data_ptr(), y.data_ptr())
    _kernels.dropout(*addresses, x.numel(), p, CODES[x.dtype], *place)
    return y


@declared.backward("dropout")
def dropout_backward(
    grad: Tensor, rng: Tensor, rows: Tensor | None, *, needs: Needs, **attrs: Any
) -> tuple[Tensor]:
    return (dropout(grad, rng, rows, **attrs),)


@declared.forward("gelu")
def gelu(x: Tensor, *, approximate: str) -> Tensor:
    x = x.contiguous()
    y, tanh = torch.empty_like(x), approximate == "tanh"
    _kernels.gelu_forward(x.data_ptr(), y.data_ptr(), x.numel(), tanh, CODES[x.dtype])
    return y


@declared.backward("gelu")
def gelu_backward(grad: Tensor, x: Tensor, *, approximate: str, needs: Needs) -> tuple[Tensor]:
    grad, x = grad.contiguous(), x.contiguous()
    dx, tanh = torch.empty_like(x), approximate == "tanh"
    addresses = (grad.data_ptr(), x.data_ptr(), dx.data_ptr())
    _kernels.gelu_backward(*addresses, x.numel(), tanh, CODES[x.dtype])
    return (dx,)


def _one_dtype(gate: Tensor, up: Tensor) -> bool:
    return gate.dtype == up.dtype


@declared.forward("swiglu", accepts=_one_dtype)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    addresses = (gate.data_ptr(), up.data_ptr(), y.data_ptr())
    _kernels.swiglu_forward(*addresses, gate.numel(), CODES[gate.dtype])
    return y


@declared.backward("swiglu", accepts=lambda grad, gate, up, **_: _one_dtype(gate, up))
def swiglu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, *, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dgate_address = _wanted(needs[0], gate)
    dup, dup_address = _wanted(needs[1], up)
    addresses = (grad.data_ptr(), gate.data_ptr(), up.data_ptr(), dgate_address, dup_address)
    _kernels.swiglu_backward(*addresses, gate.numel(), CODES[gate.dtype])
    return dgate, dup


def _rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool
) -> tuple[Tensor, Tensor]:
    rotary_dim = 2 * cos.shape[1]
    if rotary_dim < q.shape[3]:
        # The kernel turns whole heads.
        parts = (q[..., :rotary_dim], k[..., :rotary_dim])
        turned = _rotated(*parts, cos, sin, interleaved, inverse)
        rests = (q[..., rotary_dim:], k[..., rotary_dim:])
        q_whole, k_whole = (torch.cat(p, -1) for p in zip(turned, rests, strict=True))
        return q_whole, k_whole
    q, k, cos, sin = (t.contiguous() for t in (q, k, cos, sin))
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    batch, seq, heads, head_dim = q.shape
    tensors = (q, k, cos, sin, q_out, k_out)
    _kernels.rope(
        *(t.data_ptr() for t in tensors),
        batch,
        seq,
        heads,
        k.shape[2],
        head_dim,
        interleaved,
        inverse,
        CODES[q.dtype],
    )
    return q_out, k_out


@declared.forward("rope", accepts=lambda q, k, *_, **__: _one_dtype(q, k))
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    return _rotated(q, k, cos, sin, interleaved, False)


@declared.backward("rope", accepts=lambda dq, dk, *_, **__: _one_dtype(dq, dk))
def rope_backward(
    dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, needs: Needs
) -> tuple[Tensor, Tensor]:
    return _rotated(dq, dk, cos, sin, interleaved, True)


# Loss


def _reduction(name: str) -> int:
    codes = {
        "none": _kernels.REDUCTION_NONE,
        "mean": _kernels.REDUCTION_MEAN,
        "sum": _kernels.REDUCTION_SUM,
    }
    return int(codes[name])


@declared.forward("cross_entropy")
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    logits, target = logits.contiguous(), target.contiguous()
    lse = target.new_empty(target.shape, dtype=torch.float32)
    loss = torch.empty_like(lse) if reduction == "none" else lse.new_empty(())
    _kernels.cross_entropy_forward(
        logits.data_ptr(),
        target.data_ptr(),
        loss.data_ptr(),
        lse.data_ptr(),
        target.numel(),
        logits.shape[-1],
        ignore_index,
        label_smoothing,
        z_loss,
        _reduction(reduction),
        CODES[logits.dtype],
    )
    return loss, lse


@declared.backward("cross_entropy")
def cross_entropy_backward(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    needs: Needs,
) -> tuple[Tensor]:
    grad, logits, target, lse = (t.contiguous() for t in (grad, logits, target, lse))
    dlogits = torch.empty_like(logits)
    _kernels.cross_entropy_backward(
        grad.data_ptr(),
        logits.data_ptr(),
        target.data_ptr(),
        lse.data_ptr(),
        dlogits.data_ptr(),
        target.numel(),
        logits.shape[-1],
        ignore_index,
        label_smoothing,
        z_loss,
        _reduction(reduction),
        CODES[logits.dtype],
    )
    return (dlogits,)
