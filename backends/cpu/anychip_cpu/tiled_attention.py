"""attention and attention_varlen on the host by a native kernel: csrc/cpu/attention.cpp.

Queries, keys and values are read where they lie, those of packed sequences too, and keys are not
repeated for the query heads that share them. What is hidden is left out, not masked. Calls for
which torch's kernel was quicker are left to the rows of :mod:`.attention` and :mod:`.varlen`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from anychip.operators.varlen import refuse_no_packing
from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import FLOATS, Needs, address, declared, wanted

_kernels: Any = native.kernels

_FEWEST_ROWS = 16
"""Of a key head: with fewer queries most lanes of the kernel are idle."""
_MOST_GROUPS = 96
"""Query heads of a key head that a tile holds."""


def _has_fused_products() -> bool:
    """Whether the processor multiplies and adds in one instruction, as far as was compiled for it.

    Not whether the kernels in use do: those give the same bits without, many times as slowly.
    """
    return native.kernels is not None and native.kernels.available_isas()[-1] != "baseline"


_FUSED = _has_fused_products()


def _takes(q: Tensor, k: Tensor, v: Tensor, rows: int) -> bool:
    """``rows``: how many queries there are at least for each head, of a sequence as is usual."""
    groups = q.shape[-2] // k.shape[-2]
    some = q.numel() > 0 and k.numel() > 0
    enough = rows * groups >= _FEWEST_ROWS and groups <= _MOST_GROUPS
    return _FUSED and some and enough and q.dtype == k.dtype == v.dtype


def _takes_forward(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> bool:
    return _takes(q, k, v, q.shape[1])


def _takes_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, *_: Any) -> bool:
    return grad.dtype == y.dtype and y.dtype in CODES and _takes(q, k, v, q.shape[1])


def _takes_packed(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, *_: Any) -> bool:
    return _takes(q, k, v, q.shape[0] // max(ends.numel() - 1, 1))


def _takes_packed_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor, ends: Tensor, *_: Any
) -> bool:
    return grad.dtype == y.dtype and y.dtype in CODES and _takes_packed(q, k, v, ends)


def _read(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """What the kernel reads, and how: packed heads are those of one batch."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    strides = x.stride()[:-1]
    return x, (x.data_ptr(), *((0, *strides) if x.dim() == 3 else strides))


def _shape(
    q: Tensor, k: Tensor, y: Tensor, ends: tuple[Tensor, ...], causal: bool, scale: float | None
) -> tuple[Any, ...]:
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape[-3:], k.shape[-3:]
    batch = ends[0].numel() - 1 if ends else q.shape[0]
    factor = 1.0 / math.sqrt(head_dim) if scale is None else scale
    sizes = (batch, queries, keys, heads, kv_heads, head_dim)
    places = tuple(map(address, ends)) or (0, 0)
    return (*sizes, *places, factor, causal, CODES[q.dtype], CODES[y.dtype])


def _wide_ends(*ends: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(torch.int64).contiguous() for t in ends)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *ends: Tensor,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    y = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    *batch, queries, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, queries), dtype=torch.float32)
    (q, of_q), (k, of_k), (v, of_v) = map(_read, (q, k, v))
    shape = _shape(q, k, y, ends, causal, scale)
    _kernels.attention_forward(*of_q, *of_k, *of_v, y.data_ptr(), lse.data_ptr(), *shape)
    return y, lse


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *ends: Tensor,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None,
    needs: Needs,
) -> tuple[Tensor | None, ...]:
    shape = _shape(q, k, y, ends, causal, scale)
    made = [wanted(need, like) for need, like in zip(needs, (q, k, v), strict=True)]
    read, lse = [_read(t) for t in (grad, q, k, v, y)], lse.contiguous()
    places = [number for _, of in read for number in of]
    _kernels.attention_backward(*places, lse.data_ptr(), *(a for _, a in made), *shape)
    return tuple(gradient for gradient, _ in made)


@declared.forward("attention", accepts=_takes_forward)
def attention(q: Tensor, k: Tensor, v: Tensor, **attrs: Any) -> tuple[Tensor, Tensor]:
    return _forward(q, k, v, **attrs)


@declared.backward(
    "attention",
    dtypes=FLOATS,
    accepts=lambda *args, **_: _takes_backward(*args),
)
def attention_backward(*args: Tensor, **attrs: Any) -> tuple[Tensor | None, ...]:
    return _backward(*args, **attrs)


@declared.forward(
    "attention_varlen", dtypes=FLOATS, accepts=lambda *args, **_: _takes_packed(*args)
)
def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **attrs: Any
) -> tuple[Tensor, Tensor]:
    refuse_no_packing(q, k, cu_seqlens_q, cu_seqlens_k)
    return _forward(q, k, v, *_wide_ends(cu_seqlens_q, cu_seqlens_k), **attrs)


@declared.backward(
    "attention_varlen", dtypes=FLOATS, accepts=lambda *args, **_: _takes_packed_backward(*args)
)
def attention_varlen_backward(*args: Tensor, **attrs: Any) -> tuple[Tensor | None, ...]:
    *tensors, cu_seqlens_q, cu_seqlens_k = args
    return _backward(*tensors, *_wide_ends(cu_seqlens_q, cu_seqlens_k), **attrs)
