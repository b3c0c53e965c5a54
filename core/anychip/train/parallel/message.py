"""What do two neighbouring stages have to agree about? Shape and dtype of what goes between them.

The first output that a stage sends is announced by a small header, from which the next stage knows
what to expect from then on, and that both work by the same schedule.
"""

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
        inputs, outputs: the form of what each stage here takes and gives, once known.
    """

    def __init__(self, schedule: Schedule, device: torch.device) -> None:
        self.device = device
        self.inputs: dict[int, Form] = {}
        self.outputs: dict[int, Form] = {}
        self._announced: set[int] = set()
        self._num_stages, self._num_microbatches = schedule.num_stages, schedule.num_microbatches
        self._digest = zlib.crc32(str(schedule).encode())

    def tag(self, message: Action) -> int:
        """Two per boundary and microbatch, so that messages of a pair cannot be mixed up."""
        boundary = min(message.stage, message.counterpart().stage)
        index = boundary * self._num_microbatches + message.microbatch
        return 2 * index + message.kind.endswith("B")

    @property
    def tied_tag(self) -> int:
        """After those of the microbatches."""
        return 2 * self._num_stages * self._num_microbatches

    def header_tag(self, stage: int) -> int:
        """After that one; of the stage whose output is announced."""
        return self.tied_tag + 1 + stage

    def check(self, where: object, stage: int, output: object) -> None:
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
        first = self.outputs.setdefault(stage, form)
        if form != first:
            raise ValueError(
                f"{where}: an output of {first} expected, as the first was, got {form}; a "
                "pipeline has one form of microbatch, make another one for another"
            )

    def announce(self, comm: Communicator, peer: int, stage: int, output: Tensor) -> None:
        """Tells the next stage, before the first message, what messages will be."""
        if stage in self._announced:
            return
        shape = list(output.shape)
        header = [self._digest, DTYPES.index(output.dtype), len(shape), *shape]
        header += [0] * (HEADER_NUMEL - len(header))
        tensor = torch.tensor(header, dtype=torch.int64).to(self.device)
        comm.send(tensor, peer, tag=self.header_tag(stage))
        self._announced.add(stage)

    def listen(self, comm: Communicator, peer: int, stage: int) -> None:
        """Hears it, for the stage that takes them; waits.

        Raises:
            ValueError: the stage before works by another schedule.
        """
        if stage in self.inputs:
            return
        tensor = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self.device)
        comm.recv(tensor, peer, tag=self.header_tag(stage - 1))
        digest, dtype, dims, *shape = on_host(tensor).tolist()
        if digest != self._digest:
            raise ValueError(
                f"pipeline: rank {comm.rank} and rank {peer} have different schedules; make the "
                "same one on every rank"
            )
        self.inputs[stage] = Form(tuple(shape[:dims]), DTYPES[dtype])

    def room(self, message: Action) -> Tensor:
        """An empty tensor for a message that will come."""
        form = (self.inputs if message.kind == "RECV_F" else self.outputs)[message.stage]
        return torch.empty(form.shape, dtype=form.dtype, device=self.device)
