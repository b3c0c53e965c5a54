"""Rows for attention: of 16 bits by kernels that torch brings, which keep no score; of float32.

16-bit tensors go forward through cuDNN where torch itself prefers it, else through flash attention,
and backward through flash attention in its deterministic mode; what is to have a float32 result
goes through the memory-efficient kernel. That multiplies float32 numbers as three products of parts
of 11 bits: exact where they were 16-bit ones, else up to 2^-20 off, so that float32 itself goes by
blocks of scores. All leave the same lse. None has torch's mask for causal, which is aligned to the
first key: these kernels align it to the last.

Source: Dao 2023, arXiv:2307.08691; the conditions are those of torch's ``sdp_utils.cpp``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anychip.contract.settings import SameBits
from anychip.operators.attention import widened
from anychip_cuda.attention_blocks import Part, attend_backward_by_blocks, attend_by_blocks
from anychip_cuda.products import LINE, aligned, capability
from anychip_cuda.table import Needs, declared

_aten = torch.ops.aten

HALVES = {torch.bfloat16, torch.float16}
HEAD_DIMS = range(1, 257)
_STEP = 8
"""Elements: a head_dim between two multiples is filled up with zeros, which change no score."""
_LSE_STEP = 32
"""Elements: the memory-efficient kernel pads each head's lse to a multiple."""
_CAUSAL_TO_LAST = 2  # sdp::CustomMaskType::CausalFromBottomRight
_CUDNN = 91500
"""torch prefers cuDNN's kernel from the version after this one."""


def takes(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, **_: Any) -> bool:
    """Whether any of the kernels takes a call: they divide by sizes, and fold the scale in."""
    some = q.numel() > 0 and k.numel() > 0
    return some and q.dtype == k.dtype == v.dtype and (scale is None or scale > 0.0)


def takes_flash(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    """Whether flash attention takes a call: its result has the type of its operands."""
    return takes_efficient(q, k, v, **attrs) and attrs["out_dtype"] in (None, q.dtype)


def takes_efficient(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> bool:
    """Whether the memory-efficient kernel takes a call, widened to float32."""
    return takes(q, k, v, **attrs) and capability(q) >= (8, 0)


def flash_goes_back(q: Tensor) -> bool:
    """Whether flash attention has a backward: some devices lack the shared memory for wide heads.

    Compute capability 8.6 to 8.9 and 12.x take up to 192, and above 224.
    """
    major, minor = capability(q)
    small = (major == 8 and minor >= 6) or major == 12
    return not small or q.shape[-1] <= 192 or q.shape[-1] > 224


def _takes_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **attrs: Any) -> bool:
    if not takes_flash(q, k, v, **attrs) or capability(q)[0] not in (9, 10):
        return False
    square = q.shape[1] == k.shape[1] or not causal  # its mask is aligned to the first key
    version = torch.backends.cudnn.version() if torch.backends.cudnn.enabled else None
    return (
        square
        and k.shape[1] > 1
        and q.shape[3] % _STEP == 0
        and q.shape[3] <= 128
        and (version or 0) > _CUDNN
    )


def filled(x: Tensor) -> Tensor:
    """As the kernels read it, with zeros at the end of each head up to a multiple of _STEP."""
    missing = -x.shape[-1] % _STEP
    return readable(pad(x, (0, missing)) if missing else x)  # pad keeps channels last


def readable(x: Tensor) -> Tensor:
    """x itself where the kernels can read it by its strides, 16 bytes at a time; else a copy.

    So q, k and v that lie side by side, as a packed projection leaves them, are not moved.
    """
    *strides, last = x.stride()
    own = last == 1 and all(stride > 0 and stride % _STEP == 0 for stride in strides)
    return x if own and x.data_ptr() % LINE == 0 else aligned(x)


def true_scale(q: Tensor, scale: float | None) -> float:
    """The scale of the true head_dim, which the kernels do not see when it is filled up."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale


def _blind(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many queries, the first ones, see no key."""
    return max(q.shape[1] - k.shape[1], 0) if causal else 0


def _with_blind(y: Tensor, lse: Tensor, blind: int) -> tuple[Tensor, Tensor]:
    """Both with the first ``blind`` queries in front, which have the output 0 and the lse -inf."""
    if not blind:
        return y.contiguous(), lse.contiguous()
    return pad(y, (0, 0, 0, 0, blind, 0)), pad(lse, (blind, 0), value=-math.inf)


# 16 bits


@declared.forward("attention", kind="mapped", dtypes=HALVES, accepts=_takes_cudnn)
def attention_by_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    by_head = (readable(t).transpose(1, 2) for t in (q, k, v))
    found = _aten._scaled_dot_product_cudnn_attention(
        *by_head, None, True, 0.0, causal, False, scale=true_scale(q, scale)
    )
    batch, length, heads, _dim = q.shape
    return found[0].transpose(1, 2).contiguous(), found[1].reshape(batch, heads, length)


@declared.forward(
    "attention", kind="mapped", dtypes=HALVES, limits={"head_dim": HEAD_DIMS}, accepts=takes_flash
)
def attention_by_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    blind, dim = _blind(q, k, causal), q.shape[-1]
    own = filled(q[:, blind:])
    found = _aten._flash_attention_forward(
        own,
        filled(k),
        filled(v),
        None,
        None,
        own.shape[1],
        k.shape[1],
        0.0,
        causal,
        False,
        scale=true_scale(q, scale),
    )
    return _with_blind(found[0][..., :dim], found[1], blind)


def no_rng(device: torch.device) -> tuple[Tensor, Tensor]:
    """What flash attention's backward takes for the state of a dropout that there was not."""
    state = torch.empty(2, dtype=torch.uint64, device=device)
    return state, torch.empty(0, dtype=torch.uint64, device=device)


def _goes_back_by_flash(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, **attrs: Any
) -> bool:
    return q.dtype in HALVES and takes_flash(q, k, v, **attrs) and flash_goes_back(q)


# A backward row's dtypes are over all its arguments, and the lse is float32.
@declared.backward(
    "attention", kind="mapped", limits={"head_dim": HEAD_DIMS}, accepts=_goes_back_by_flash
)
def attention_backward_by_flash(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor, ...]:
    blind, dim = _blind(q, k, causal), q.shape[-1]
    own_grad, own_q, own_y = (filled(t[:, blind:]) for t in (grad, q, y))
    with SameBits():
        dq, dk, dv = _aten._flash_attention_backward(
            own_grad,
            own_q,
            filled(k),
            filled(v),
            own_y,
            lse[..., blind:].contiguous(),
            None,
            None,
            own_q.shape[1],
            k.shape[1],
            0.0,
            causal,
            *no_rng(q.device),
            scale=true_scale(q, scale),
        )
    dq = pad(dq, (0, 0, 0, 0, blind, 0)) if blind else dq
    return tuple(t[..., :dim].contiguous() for t in (dq, dk, dv))


# 16 bits with a float32 result


def _goes_efficient(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, **attrs: Any) -> bool:
    is_widened = q.dtype in HALVES and attrs["out_dtype"] == torch.float32
    return is_widened and takes_efficient(q, k, v, **attrs)


def _by_query_head(x: Tensor, heads: int) -> Tensor:
    """(B, S, Hk, D) as (B, S, H, D), each key head repeated: the kernel has no groups."""
    groups = heads // x.shape[2]
    return x if groups == 1 else x.repeat_interleave(groups, dim=2)


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    batch, length, heads, dim = grad.shape
    if heads == kv_heads:
        return grad.contiguous()
    return grad.reshape(batch, length, kv_heads, heads // kv_heads, dim).sum(3)


@declared.forward("attention", kind="mapped", accepts=_goes_efficient)
def attention_by_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = widened(q, out_dtype, q, k, v)
    blind, dim, heads = _blind(q, k, causal), q.shape[-1], q.shape[2]
    own = filled(q[:, blind:])
    found = _aten._efficient_attention_forward(
        own,
        _by_query_head(filled(k), heads),
        _by_query_head(filled(v), heads),
        None,
        None,
        None,
        None,
        None,
        0.0,
        _CAUSAL_TO_LAST if causal else 0,
        True,
        scale=true_scale(q, scale),
    )
    return _with_blind(found[0][..., :dim], found[1][..., : own.shape[1]], blind)


@declared.backward(
    "attention",
    kind="mapped",
    accepts=lambda grad, q, k, v, y, lse, **attrs: _goes_efficient(q, k, v, **attrs),
)
def attention_backward_by_efficient(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor, ...]:
    dtype = q.dtype
    grad, q, k, v, y = widened(q, out_dtype, grad, q, k, v, y)
    blind, dim, heads = _blind(q, k, causal), q.shape[-1], q.shape[2]
    own_grad, own_q, own_y = (filled(t[:, blind:]) for t in (grad, q, y))
    length = own_q.shape[1]
    # Rows that there are not weigh exp(score - inf) = 0.
    own_lse = pad(lse[..., blind:], (0, -length % _LSE_STEP), value=math.inf)
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _bias = _aten._efficient_attention_backward(
        own_grad,
        own_q,
        _by_query_head(filled(k), heads),
        _by_query_head(filled(v), heads),
        None,
        own_y,
        None,
        None,
        length,
        k.shape[1],
        own_lse,
        0.0,
        unused,
        unused,
        _CAUSAL_TO_LAST if causal else 0,
        False,
        scale=true_scale(q, scale),
        num_splits_key=1,  # more of them add up by atomics, in any order
    )
    dq = pad(dq, (0, 0, 0, 0, blind, 0)) if blind else dq
    dk, dv = (_sum_groups(t, k.shape[2]) for t in (dk, dv))
    return tuple(t[..., :dim].to(dtype).contiguous() for t in (dq, dk, dv))


# float32


def _no_factor(part: Part) -> None:
    """Nothing is dropped."""


@declared.forward("attention", kind="mapped", dtypes={torch.float32})
def attention_by_products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    return attend_by_blocks(q, k, v, causal, scale, _no_factor)


@declared.backward("attention", kind="mapped", dtypes={torch.float32})
def attention_backward_by_products(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor, Tensor, Tensor]:
    return attend_backward_by_blocks(grad, q, k, v, y, lse, causal, scale, _no_factor)
