"""embedding on the host: torch's gather, and rows added up in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip_cpu.table import Needs, declared

_aten = torch.ops.aten


@declared.forward("embedding", kind="mapped")
def embedding(indices: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.embedding(indices, weight)


@declared.backward("embedding", kind="mapped")
def embedding_backward(
    grad: Tensor, indices: Tensor, weight: Tensor, *, needs: Needs
) -> tuple[Tensor]:
    # Rows that occur more than once are summed, which must not happen in 16 bits.
    total = _aten.embedding_dense_backward(grad.float(), indices, weight.shape[0], -1, False)
    return (total.to(weight.dtype),)
