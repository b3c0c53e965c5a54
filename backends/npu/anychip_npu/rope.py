"""Rows of rope: q and k one after the other, in float32.

torch_npu casts cos and sin to the dtype of what they turn. With 16 bits that would cost most of
their digits, so q and k are given in float32 and the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared

_MODES = {False: "half", True: "interleave"}
_MOST_COUNT, _MOST_DIM = 1000, 896
"""Batches and heads, or their product when interleaved, and the head's size: each is less."""


def _is_covered(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, **_: object
) -> bool:
    heads, batch = max(q.shape[2], k.shape[2]), q.shape[0]
    count = batch * heads if interleaved else max(batch, heads)
    fits = count < _MOST_COUNT and 2 * cos.shape[1] < _MOST_DIM
    return fits and min(q.numel(), k.numel(), cos.numel()) > 0 and is_a2_or_a3(q)


def _turned(x: Tensor, size: int, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """The first dims of each head turned, in float32, and the others as they are."""
    y = turn(x[..., :size].float().contiguous()).to(x.dtype)
    return y if size == x.shape[-1] else torch.cat((y, x[..., size:]), -1)


def _tables(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Of (S, D / 2), (1, S, 1, D): an angle for each element of a head."""
    pairs = [(t, t) for t in (cos, sin)]
    # Not repeat_interleave, which torch_npu has no aclnn function for.
    wide = [torch.stack(p, -1).flatten(-2) if interleaved else torch.cat(p, -1) for p in pairs]
    first, second = (t[None, :, None].contiguous() for t in wide)
    return first, second


@declared.forward(
    "rope",
    calls={"npu::npu_rotary_mul": "aclnnRotaryPositionEmbeddingV2"},
    accepts=_is_covered,
)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """x cos + turned(x) sin; layout BSND with tables 1S1D; cos and sin from -1 to 1.

    https://gitcode.com/Ascend/op-plugin/blob/26.1.0/docs/en/custom_APIs/torch_npu/torch_npu-npu_rotary_mul.md
    """
    tables = _tables(cos, sin, interleaved)

    def turn(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.npu.npu_rotary_mul(x, *tables, _MODES[interleaved])
        return y

    size = 2 * cos.shape[1]
    return _turned(q, size, turn), _turned(k, size, turn)


@declared.backward(
    "rope",
    calls={"npu::npu_rotary_mul_backward": "aclnnRotaryPositionEmbeddingGrad"},
    accepts=_is_covered,
)
def rope_backward(
    dq: Tensor,
    dk: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
    needs: Needs,
) -> tuple[Tensor, Tensor]:
    """Of x only its dtype is read, since cos and sin need no gradient: it is the gradient here.

    https://gitcode.com/cann/ops-transformer/blob/master/posembedding/rotary_position_embedding_grad/docs/aclnnRotaryPositionEmbeddingGrad.md
    """
    tables = _tables(cos, sin, interleaved)

    def turn(grad: Tensor) -> Tensor:
        given = (grad, grad, *tables, _MODES[interleaved])
        y: Tensor = torch.ops.npu.npu_rotary_mul_backward(*given)[0]
        return y

    size = 2 * cos.shape[1]
    return _turned(dq, size, turn), _turned(dk, size, turn)
