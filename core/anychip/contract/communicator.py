"""What a chip says about communication between ranks: the interface that training is written to.

An algorithm is given a :class:`Communicator` and calls nothing else: no global group, no
thread-local. Communicators are the core's; a chip may bring the
:class:`~anychip.contract.Transport` that moves their bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import torch

Reduction = Literal["sum", "avg", "max", "min"]
"""How values of the ranks are joined; the field's names, as in torch.distributed.ReduceOp.
The max or min of numbers and NaN is NaN or the numbers' own: chips differ, the ranks do not."""

REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")

CALLS = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "recv",
    "barrier",
)  # fmt: skip
"""Names of the calls, as they stand in capability tables, counts and messages."""


class Work(ABC):
    """A call that may still be under way.

    Its inputs must not be written, and its outputs not be read, until :meth:`wait` has returned.
    """

    @abstractmethod
    def wait(self) -> None:
        """Returns when work queued on the current stream may use the outputs.

        Raises:
            CommunicationError: the call failed, a rank is lost, or the time limit is over.
        """

    @abstractmethod
    def is_done(self) -> bool:
        """True when :meth:`wait` would return, or raise, at once. True again after it."""


class _Done(Work):
    def wait(self) -> None:
        return None

    def is_done(self) -> bool:
        return True


DONE: Work = _Done()
"""Work that was finished before it was handed out."""


class Transfer(NamedTuple):
    """One message of a grouped exchange.

    Attributes:
        kind: ``send`` or ``recv``.
        tensor: contiguous; what is sent, or where the message goes.
        peer: the other rank, counted in the group.
        tag: messages of one pair of ranks are matched by tag, then by order.
    """

    kind: Literal["send", "recv"]
    tensor: torch.Tensor
    peer: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport takes: ZeRO asks before it plans, and users read it in ``anychip doctor``.

    Attributes:
        dtypes: call name to the dtypes that it moves. A call that is not there is not supported.
        reductions: dtype to the reductions that all_reduce and reduce_scatter do on it.
    """

    dtypes: Mapping[str, frozenset[torch.dtype]]
    reductions: Mapping[torch.dtype, frozenset[Reduction]]

    def supports(
        self, call: str, dtype: torch.dtype | None = None, reduction: Reduction | None = None
    ) -> bool:
        """Whether a call works, on a dtype, with a reduction."""
        if call not in self.dtypes:
            return False
        if dtype is not None and dtype not in self.dtypes[call]:
            return False
        if reduction is None or dtype is None:
            return True
        return reduction in self.reductions.get(dtype, frozenset())


@dataclass(slots=True)
class Traffic:
    """What one rank has asked of a communicator since it was made.

    Attributes:
        calls: number of calls by name; each message of a grouped exchange counts.
        nbytes: bytes of payload by name: of the tensor that is reduced, gathered into, scattered
            from, broadcast, sent or received. What goes over the wire follows from the algorithm:
            2 (w - 1) / w times the payload for all_reduce, (w - 1) / w for reduce_scatter and
            all_gather, per rank.
    """

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)

    def add(self, call: str, nbytes: int) -> None:
        """One more call."""
        self.calls[call] += 1
        self.nbytes[call] += nbytes


class Communicator(ABC):
    """Collective calls among ``world_size`` ranks; every rank makes the same calls in one order.

    Tensors are contiguous and on the device of the backend that made the communicator. A call is
    ordered on the current stream: its inputs may be written, and its outputs read, by work queued
    after it (after ``wait``, with ``async_op``). All ranks get bit-equal results. A mistake that
    one rank can see alone raises ValueError, and a dtype or reduction that is not taken
    UnsupportedError, before anything is sent; ranks that disagree in call, shape, dtype or
    reduction, a rank that does not come, and a rank that is lost, end in a
    :class:`~anychip.contract.CommunicationError` on every other rank within the time limit: in this
    call, or in the next one of a rank that was done with it. The communicator can then only be
    closed.

    Attributes:
        rank: of this one, from 0 to ``world_size - 1``.
        world_size: number of ranks in the group.
        name: of the group, for messages: ``world``, or the mesh axis.
        ranks: the members' ranks in the world, in the order of the group.
        timeout_s: seconds after which a call that waits for another rank fails.
        device: torch's device type of the tensors that it takes.
        is_closed: after :meth:`close`, nothing can be called any more.
        description: how it communicates, for reports: transport, order of sums, detours.
        traffic: calls and bytes so far.
    """

    rank: int
    world_size: int
    name: str
    ranks: tuple[int, ...]
    timeout_s: float
    device: str
    is_closed: bool = False
    description: str
    traffic: Traffic

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.world_size})"

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it takes."""

    @abstractmethod
    def all_reduce(
        self, tensor: torch.Tensor, reduction: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        """``tensor`` becomes the reduction over all ranks, in place. Like MPI_Allreduce."""

    @abstractmethod
    def all_gather(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """``output`` becomes the ranks' tensors, flattened, in rank order. Like MPI_Allgatherv.

        Args:
            output: sum(sizes) elements.
            tensor: sizes[rank] elements. May be its own part of ``output``.
            sizes: elements of each rank; all alike when None.
        """

    @abstractmethod
    def reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction = "sum",
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:
        """``output`` becomes this rank's part of the reduced tensor. Like MPI_Reduce_scatter.

        Args:
            output: sizes[rank] elements. May be its own part of ``tensor``.
            tensor: sum(sizes) elements. Its contents are undefined afterwards when the output is
                a part of it, and untouched otherwise.
            sizes: elements of each rank; all alike when None.
        """

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Work:
        """``tensor`` becomes the source rank's, in place. Like MPI_Bcast."""

    @abstractmethod
    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
    ) -> Work:
        """``outputs[r]`` becomes what rank ``r`` has in ``inputs[rank]``. Sizes may differ."""

    @abstractmethod
    def exchange(self, transfers: Sequence[Transfer], *, async_op: bool = False) -> Work:
        """Several sends and receives as one call, which cannot wait for each other.

        Like torch.distributed.batch_isend_irecv; only the ranks that are named take part.
        """

    def send(
        self, tensor: torch.Tensor, destination: int, *, tag: int = 0, async_op: bool = False
    ) -> Work:
        """Gives ``tensor`` to a rank, which calls :meth:`recv`."""
        return self.exchange([Transfer("send", tensor, destination, tag)], async_op=async_op)

    def recv(
        self, tensor: torch.Tensor, source: int, *, tag: int = 0, async_op: bool = False
    ) -> Work:
        """``tensor`` becomes what a rank sends."""
        return self.exchange([Transfer("recv", tensor, source, tag)], async_op=async_op)

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has come here."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
        """The communicator of the group that this rank is in. Every rank gives the same groups.

        Args:
            groups: ranks of this communicator; each rank in exactly one group.
            name: of the new groups, for messages; the mesh axis for instance.

        Raises:
            ValueError: a rank is in no group or in two.
        """

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Makes calls that wait, here and on other ranks, fail with ``reason`` as soon as may be.

        May be called from any thread; the first reason stays.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives up connections and threads, without waiting for other ranks. Twice is allowed.

        What was called and waited for before has its result, unless the job has failed.
        """
