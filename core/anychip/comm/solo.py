"""The group of one rank: each collective is the identity, and checks what a real one checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anychip.contract.communicator import (
    DONE,
    REDUCTIONS,
    Capabilities,
    Communicator,
    Reduction,
    Traffic,
    Transfer,
    Work,
)

if TYPE_CHECKING:
    import torch


class _Everything(Capabilities):
    """Takes what it is given: nothing is moved."""

    def supports(
        self,
        call: str,
        dtype: torch.dtype | None = None,
        reduction: Reduction | None = None,
    ) -> bool:
        return reduction is None or reduction in REDUCTIONS


def alone(*, name: str = "world", world_rank: int = 0, device: str = "cpu") -> Communicator:
    """The communicator of a job, or of a group, that has one rank."""
    solo = SoloCommunicator(name=name, world_rank=world_rank)
    solo.device = device
    return solo


class SoloCommunicator(Communicator):
    """The communicator of a job that has one rank."""

    rank = 0
    world_size = 1
    description = "one rank"

    def __init__(self, *, name: str = "world", world_rank: int = 0) -> None:
        self.name, self.ranks = name, (world_rank,)
        self.traffic = Traffic()

    @property
    def capabilities(self) -> Capabilities:
        return _Everything({}, {})

    def abort(self, reason: str) -> None:
        return None

    def close(self) -> None:
        return None

    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        return DONE

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> Work:
        return _copy(output, tensor)

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work:
        return _copy(output, tensor)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return DONE

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        if outputs[0].numel() != inputs[0].numel():
            raise ValueError(
                f"{self}.all_to_all: rank 0 sends itself {inputs[0].numel()} elements, and has "
                f"room for {outputs[0].numel()}"
            )
        return _copy(outputs[0], inputs[0])

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        return DONE  # transfers are between two ranks, so that there can be none

    def _barrier(self) -> None:
        return None

    def _split(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator:
        return alone(name=name, world_rank=self.ranks[0], device=self.device)


def _copy(output: torch.Tensor, tensor: torch.Tensor) -> Work:
    if output.data_ptr() != tensor.data_ptr():
        output.view(-1).copy_(tensor.view(-1))
    return DONE
