"""What do two neighbouring stages have to agree about? Shape and dtype of what goes between them.

The first output that a stage sends is announced by a small header, from which the next stage knows
what to expect from then on, and that both work by the same schedule.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train.parallel.actions import Action, Schedule

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Of messages; the header has the index."""
MAX_DIMS = 8
HEADER_NUMEL = 3 + MAX_DIMS
"""int64: check sum of the schedule, dtype, number of dims, dims."""


class Form(NamedTuple):
    """Of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype}"


class Link:
    """What one rank knows about the messages to and from its neighbours.

    Attributes:
        inputs, outputs: the form of what the stage takes and gives, once known.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self.device = device
        self.inputs: Form | None = None
        self.outputs: Form | None = None
        self._is_announced = False
        self._num_microbatches = schedule.num_microbatches
        self._digest = zlib.crc32(str(schedule).encode())

    def tag(self, message: Action) -> int:
        """Two per microbatch, so that messages of a pair of ranks cannot be mixed up."""
        return 2 * message.microbatch + (message.kind.endswith("B"))

    @property
    def header_tag(self) -> int:
        """After those of the microbatches."""
        return 2 * self._num_microbatches

    @property
    def tied_tag(self) -> int:
        """After the header's."""
        return self.header_tag + 1

    def check(self, where: object, output: object) -> None:
        """Every output of a stage has the form of the first.

        Raises:
            ValueError: it has not, or is no floating-point tensor.
        """
        if not isinstance(output, Tensor) or output.dtype not in DTYPES:
            got = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"{where}: one floating-point tensor expected as output, got {got}")
        form = Form(tuple(output.shape), output.dtype)
        if len(form.shape) > MAX_DIMS:
            raise ValueError(f"{where}: at most {MAX_DIMS} dims expected, got {form}")
        if self.outputs is None:
            self.outputs = form
        if form != self.outputs:
            raise ValueError(
                f"{where}: an output of {self.outputs} expected, as the first was, got {form}; a "
                "pipeline has one form of microbatch, make another one for another"
            )

    def announce(self, comm: Communicator, peer: int, output: Tensor) -> None:
        """Tells the next stage, before the first message, what messages will be."""
        if self._is_announced:
            return
        shape = list(output.shape)
        header = [self._digest, DTYPES.index(output.dtype), len(shape), *shape]
        header += [0] * (HEADER_NUMEL - len(header))
        tensor = torch.tensor(header, dtype=torch.int64).to(self.device)
        comm.send(tensor, peer, tag=self.header_tag)
        self._is_announced = True

    def listen(self, comm: Communicator, peer: int) -> None:
        """Hears it; waits.

        Raises:
            ValueError: the stage before works by another schedule.
        """
        if self.inputs is not None:
            return
        tensor = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self.device)
        comm.recv(tensor, peer, tag=self.header_tag)
        digest, dtype, dims, *shape = on_host(tensor).tolist()
        if digest != self._digest:
            raise ValueError(
                f"pipeline: rank {comm.rank} and rank {peer} have different schedules; make the "
                "same one on every rank"
            )
        self.inputs = Form(tuple(shape[:dims]), DTYPES[dtype])

    def room(self, message: Action) -> Tensor:
        """An empty tensor for a message that will come."""
        form = self.inputs if message.kind == "RECV_F" else self.outputs
        assert form is not None, f"{message} comes after the form is known"
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)
