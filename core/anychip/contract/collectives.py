"""What a chip says about communication between ranks, and the group of one rank.

A training algorithm is given a :class:`Communicator` and calls nothing else: no global group, no
thread-local. This file holds the interface and :class:`SoloCommunicator`; groups of more than one
rank are not part of this version, and asking for one says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Reduction = Literal["sum", "avg", "max", "min"]
"""How values of the ranks are joined; the field's names, as in ncclRedOp_t and HcclReduceOp."""


class Communicator(ABC):
    """Collective calls among ``world_size`` ranks; every rank makes the same calls in one order.

    Tensors are contiguous and on the device of the backend that made the communicator. A call is
    ordered on the current stream: its inputs may be written, and its outputs read, by work queued
    after it. All ranks get bit-equal results.
    """

    rank: int
    world_size: int

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum") -> None:
        """``tensor`` becomes the reduction over all ranks, in place. Like ncclAllReduce."""

    @abstractmethod
    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """``output`` (world_size * n) becomes the ranks' ``tensor`` (n) in rank order."""

    @abstractmethod
    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction = "sum"
    ) -> None:
        """``output`` (n) becomes this rank's part of the reduced ``tensor`` (world_size * n)."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """``tensor`` becomes the source rank's, in place."""

    @abstractmethod
    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        """``outputs[r]`` becomes what rank ``r`` has in ``inputs[rank]``."""

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has come here."""


class SoloCommunicator(Communicator):
    """The group of one rank: each collective is the identity, and checks what a real one checks."""

    rank = 0
    world_size = 1

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction = "sum") -> None:
        _check_reduction(reduction)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        _check_sizes("all_gather", output, tensor)
        output.copy_(tensor.view_as(output))

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction = "sum"
    ) -> None:
        _check_reduction(reduction)
        _check_sizes("reduce_scatter", output, tensor)
        output.copy_(tensor.view_as(output))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        if source != 0:
            raise ValueError(f"broadcast: the group has rank 0 only, got source {source}")

    def all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        if len(outputs) != 1 or len(inputs) != 1:
            raise ValueError(
                f"all_to_all: one tensor per rank (1) expected, got {len(outputs)} outputs and "
                f"{len(inputs)} inputs"
            )
        _check_sizes("all_to_all", outputs[0], inputs[0])
        outputs[0].copy_(inputs[0].view_as(outputs[0]))

    def barrier(self) -> None:
        return None


def _check_reduction(reduction: str) -> None:
    if reduction not in ("sum", "avg", "max", "min"):
        raise ValueError(f"reduction must be sum, avg, max or min, got {reduction!r}")


def _check_sizes(call: str, output: torch.Tensor, tensor: torch.Tensor) -> None:
    if output.numel() != tensor.numel() or output.dtype != tensor.dtype:
        raise ValueError(
            f"{call}: with one rank, output and input have the same size and dtype; got "
            f"{output.numel()} x {output.dtype} and {tensor.numel()} x {tensor.dtype}"
        )
