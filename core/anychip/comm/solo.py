"""The group of one rank: each collective is the identity, and checks what a real one checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anychip.contract import (
    DONE,
    REDUCTIONS,
    Capabilities,
    CollectiveCall,
    Membership,
    Reduction,
    Transfer,
    Transport,
    Work,
)

if TYPE_CHECKING:
    import torch


class _Everything(Capabilities):
    """Takes what it is given: nothing is moved."""

    def supports(
        self, call: str, dtype: torch.dtype | None = None, reduction: Reduction | None = None
    ) -> bool:
        return reduction is None or reduction in REDUCTIONS


class Solo(Transport):
    """Moves nothing but a rank's own tensors."""

    capabilities = _Everything({}, {})
    description = "one rank"

    def __init__(self, device: str) -> None:
        self.device = device

    def _copy(self, call: CollectiveCall) -> Work:
        for output, tensor in zip(call.outputs, call.inputs, strict=False):
            if output.numel() != tensor.numel():
                raise ValueError(
                    f"{call.name}: rank 0 sends itself {tensor.numel()} elements, and has room "
                    f"for {output.numel()}"
                )
            if output.data_ptr() != tensor.data_ptr():
                output.view(-1).copy_(tensor.view(-1))
        return DONE

    all_reduce = all_gather = reduce_scatter = broadcast = all_to_all = barrier = _copy

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        raise AssertionError("transfers are between two ranks")

    def part(self, group: Membership) -> Transport:
        return self

    def abort(self) -> None:
        return None

    close = abort
