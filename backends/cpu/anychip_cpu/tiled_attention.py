"""How the operators of attention call the native kernel: csrc/cpu/attention.cpp.

Queries, keys and values are read where they lie, those of packed sequences too, and keys are not
repeated for the query heads that share them. What is hidden is left out, not masked. Calls for
which torch's kernel is quicker are left to it.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip_cpu import native
from anychip_cpu.native import CODES
from anychip_cpu.table import Needs, address, wanted

_kernels: Any = native.kernels

_FEWEST_ROWS, _FEWEST_GROUPS = 8, 4
"""Of a key head: with fewer queries most lanes of the kernel are idle, but torch's repeats keys."""
_MOST_GROUPS = 96
"""Query heads of a key head that a tile holds: kAttentionRows in csrc/cpu/kernel_table.h."""


def _has_fused_products() -> bool:
    """Whether the processor multiplies and adds in one instruction, as far as was compiled for it.

    Not whether the kernels in use do: those give the same bits without, many times as slowly.
    """
    return native.kernels is not None and native.kernels.available_isas()[-1] != "baseline"


_FUSED = _has_fused_products()


def takes(q: Tensor, k: Tensor, v: Tensor, *, queries: int) -> bool:
    """Whether the kernel computes this, and as quickly as torch's.

    Args:
        queries: of a sequence, on average.
    """
    groups = q.shape[-2] // k.shape[-2]
    some = q.numel() > 0 and k.numel() > 0
    enough = queries * groups >= _FEWEST_ROWS or groups >= _FEWEST_GROUPS
    fits = groups <= _MOST_GROUPS and q.dtype == k.dtype == v.dtype
    return _FUSED and some and enough and fits


def takes_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, *, queries: int
) -> bool:
    """The same for the gradients, which takes ``grad`` as ``y`` was stored."""
    return grad.dtype == y.dtype and y.dtype in CODES and takes(q, k, v, queries=queries)


class Drop(NamedTuple):
    """Which weights are dropped. Tensors are contiguous.

    Attributes:
        rng: int64[2], (seed, offset).
        p: the probability.
        rows: (batch, heads, queries) int64, which row of the whole's weights each row is.
        keys: of the whole.
        key_index: (keys,) int64, where in the whole; None: 0, 1, 2 ...
    """

    rng: Tensor
    p: float
    rows: Tensor
    keys: int
    key_index: Tensor | None


def _dropped(drop: Drop | None) -> tuple[Any, ...]:
    """What the kernel takes for it."""
    if drop is None:
        return ()
    return address(drop.rng), drop.p, address(drop.rows), drop.keys, 0, address(drop.key_index)


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


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *ends: Tensor,
    causal: bool,
    scale: float | None,
    out_dtype: torch.dtype | None = None,
    drop: Drop | None = None,
) -> tuple[Tensor, Tensor]:
    """y and lse, as in :mod:`anychip.operators.attention`.

    Args:
        ends: the cu_seqlens of queries and keys of (tokens, heads, head_dim), sorted; or none.
        drop: which weights are dropped, where no sequences are packed; None: none.
    """
    ends = tuple(t.to(torch.int64).contiguous() for t in ends)
    y = torch.empty_like(q, dtype=out_dtype, memory_format=torch.contiguous_format)
    *batch, queries, heads, _ = q.shape
    lse = q.new_empty((*batch, heads, queries), dtype=torch.float32)
    (q, of_q), (k, of_k), (v, of_v) = map(_read, (q, k, v))
    shape = _shape(q, k, y, ends, causal, scale)
    given = (*of_q, *of_k, *of_v, y.data_ptr(), lse.data_ptr())
    _kernels.attention_forward(*given, *shape, *_dropped(drop))
    return y, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    *ends: Tensor,
    causal: bool,
    scale: float | None,
    needs: Needs,
    out_dtype: torch.dtype | None = None,
    drop: Drop | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of q, k and v that are needed; arguments as of :func:`forward`."""
    ends = tuple(t.to(torch.int64).contiguous() for t in ends)
    shape = _shape(q, k, y, ends, causal, scale)
    made = [wanted(need, like) for need, like in zip(needs, (q, k, v), strict=True)]
    read, lse = [_read(t) for t in (grad, q, k, v, y)], lse.contiguous()
    places = [number for _, of in read for number in of]
    places += [lse.data_ptr(), *(a for _, a in made)]
    _kernels.attention_backward(*places, *shape, *_dropped(drop))
    return made[0][0], made[1][0], made[2][0]
