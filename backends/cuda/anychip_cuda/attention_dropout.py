"""Rows for attention with dropout: torch's products, block by block, and our kernel for the mask.

The kernels that torch brings have a dropout of their own, whose mask no other chip has. Here it is
that of the operator: word i of the stream for element i of (batch, head, query, key).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anychip.operators.attention import weight_rows
from anychip_cuda.attention_blocks import (
    Factor,
    Part,
    attend_backward_by_blocks,
    attend_by_blocks,
)
from anychip_cuda.dropout import dropout
from anychip_cuda.native import Kernels
from anychip_cuda.table import Needs, declared


def _factor(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    rng: Tensor,
    index: Sequence[Tensor | None],
    *,
    p: float,
    keys: int,
    **sizes: int,
) -> Factor:
    """What the weights of each part are multiplied by."""
    rows, width = weight_rows(q, index[:3], **sizes), keys or k.shape[1]

    def factor(part: Part) -> Tensor:
        own, key_index = rows[part.batches, part.heads], index[3]
        if key_index is not None:
            # These need not follow each other: each is a row of one column.
            each = own.unsqueeze(-1) * width + key_index
            ones = torch.ones(*each.shape, 1, device=k.device)
            return dropout(kernels, ones, rng, each, width=1, p=p).squeeze(-1)
        ones = torch.ones(*own.shape, k.shape[1], device=k.device)
        return dropout(kernels, ones, rng, own, width=width, p=p)

    return factor


@declared.forward("attention_dropout", kind="mapped")
def attention_dropout(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor]:
    factor = _factor(kernels, q, k, rng, index, p=p, keys=keys, **sizes)
    return attend_by_blocks(q, k, v, causal, scale, factor)


@declared.backward("attention_dropout", kind="mapped")
def attention_dropout_backward(
    kernels: Kernels,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    rng: Tensor,
    *index: Tensor | None,
    p: float,
    causal: bool,
    scale: float | None,
    needs: Needs,
    keys: int = 0,
    **sizes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    factor = _factor(kernels, q, k, rng, index, p=p, keys=keys, **sizes)
    return attend_backward_by_blocks(grad, q, k, v, y, lse, causal, scale, factor)
