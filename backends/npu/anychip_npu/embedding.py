"""Rows of embedding: a gather, and a gradient that is summed in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip.contract.settings import SameBits
from anychip_npu.soc import is_a2_or_a3
from anychip_npu.table import Needs, declared


def _has_elements(*tensors: Tensor) -> bool:
    return all(t.numel() > 0 for t in tensors) and is_a2_or_a3(tensors[0])


@declared.forward(
    "embedding",
    calls={"aten::embedding": "aclnnEmbedding"},
    accepts=lambda indices, weight: _has_elements(indices, weight),
)
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    """A copy of rows, exact.

    https://gitcode.com/cann/ops-nn/blob/master/index/embedding/docs/aclnnEmbedding.md
    """
    y: Tensor = torch.ops.aten.embedding(weight.contiguous(), indices.contiguous())
    return y


@declared.backward(
    "embedding",
    calls={"aten::embedding_dense_backward": "aclnnEmbeddingDenseBackward"},
    accepts=lambda grad, indices, weight, **_: _has_elements(grad, weight),
)
def embedding_backward(
    grad: Tensor, indices: Tensor, weight: Tensor, *, needs: Needs
) -> tuple[Tensor]:
    """Of a float32 gradient: sums are not rounded in between. In any order, unless asked for.

    https://gitcode.com/cann/ops-nn/blob/master/index/embedding_dense_grad_v2/docs/aclnnEmbeddingDenseBackward.md
    """
    rows = grad.float().contiguous()
    with SameBits():
        found = torch.ops.aten.embedding_dense_backward(
            rows, indices.contiguous(), weight.shape[0], -1, False
        )
    return (found.to(weight.dtype),)
