"""What a chip says about communication between ranks: the interface that training is written to.

An algorithm is given a :class:`Communicator` and calls nothing else: no global group, no
thread-local. The public methods check and count; transports implement the ``_`` methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from anychip.contract.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Reduction = Literal["sum", "avg", "max", "min"]
"""How values of the ranks are joined; the field's names, as in torch.distributed.ReduceOp."""

REDUCTIONS: tuple[Reduction, ...] = ("sum", "avg", "max", "min")

CALLS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
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
    one rank can see alone raises ValueError before anything is sent; ranks that disagree in call,
    shape, dtype or reduction, a rank that does not come, and a rank that is lost, end in a
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
    name: str = "world"
    ranks: tuple[int, ...] = (0,)
    timeout_s: float = 600.0
    device: str = "cpu"
    is_closed: bool = False
    description: str = ""
    traffic: Traffic

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, rank {self.rank} of {self.world_size})"

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this transport takes."""

    def all_reduce(
        self, tensor: torch.Tensor, reduction: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        """``tensor`` becomes the reduction over all ranks, in place. Like MPI_Allreduce.

        Raises:
            UnsupportedError: this transport does not reduce the dtype in this way.
        """
        self._check("all_reduce", tensor, reduction)
        return self._start("all_reduce", tensor, self._all_reduce(tensor, reduction), async_op)

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
        self._check("all_gather", tensor)
        sizes = self._sizes("all_gather", output, tensor, sizes)
        return self._start("all_gather", output, self._all_gather(output, tensor, sizes), async_op)

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
        self._check("reduce_scatter", tensor, reduction)
        sizes = self._sizes("reduce_scatter", tensor, output, sizes)
        work = self._reduce_scatter(output, tensor, reduction, sizes)
        return self._start("reduce_scatter", tensor, work, async_op)

    def broadcast(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Work:
        """``tensor`` becomes the source rank's, in place. Like MPI_Bcast."""
        self._check("broadcast", tensor)
        self._check_rank("broadcast", "source", source)
        return self._start("broadcast", tensor, self._broadcast(tensor, source), async_op)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
    ) -> Work:
        """``outputs[r]`` becomes what rank ``r`` has in ``inputs[rank]``. Sizes may differ."""
        if len(outputs) != self.world_size or len(inputs) != self.world_size:
            raise ValueError(
                f"{self}.all_to_all: one tensor per rank ({self.world_size}) expected, got "
                f"{len(outputs)} outputs and {len(inputs)} inputs"
            )
        for tensor in (*outputs, *inputs):
            self._check("all_to_all", tensor)
        if len({tensor.dtype for tensor in (*outputs, *inputs)}) > 1:
            dtypes = sorted({str(tensor.dtype) for tensor in (*outputs, *inputs)})
            raise ValueError(f"{self}.all_to_all: one dtype expected, got {', '.join(dtypes)}")
        work = self._all_to_all(outputs, inputs)
        return self._start("all_to_all", inputs, work, async_op)

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

    def exchange(self, transfers: Sequence[Transfer], *, async_op: bool = False) -> Work:
        """Several sends and receives as one call, which cannot wait for each other.

        Like torch.distributed.batch_isend_irecv; only the ranks that are named take part.
        """
        for kind, tensor, peer, _ in transfers:
            self._check(kind, tensor)
            self._check_rank(kind, "peer", peer)
            if peer == self.rank:
                raise ValueError(f"{self}.{kind}: another rank expected, got {peer}, this one")
        work = self._exchange(transfers)
        for kind, tensor, _, _ in transfers:
            self.traffic.add(kind, tensor.nbytes)
        if async_op:
            self._proceed(work)
        else:
            work.wait()
        return work

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        self.traffic.add("barrier", 0)
        self._barrier()

    def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
        """The communicator of the group that this rank is in. Every rank gives the same groups.

        Args:
            groups: ranks of this communicator; each rank in exactly one group.
            name: of the new groups, for messages; the mesh axis for instance.

        Raises:
            ValueError: a rank is in no group or in two.
        """
        members = sorted(rank for group in groups for rank in group)
        if members != list(range(self.world_size)):
            raise ValueError(
                f"{self}.split: groups that hold each rank from 0 to {self.world_size - 1} once "
                f"expected, got {[list(group) for group in groups]}"
            )
        return self._split([tuple(group) for group in groups], name)

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

    # What a transport implements: arguments have been checked; work is not waited for.

    @abstractmethod
    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work: ...

    @abstractmethod
    def _all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]
    ) -> Work: ...

    @abstractmethod
    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work: ...

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work: ...

    @abstractmethod
    def _all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Work: ...

    @abstractmethod
    def _exchange(self, transfers: Sequence[Transfer]) -> Work: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _split(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator: ...

    def _proceed(self, work: Work) -> None:
        """Sees to it that work gets on before it is waited for; by default it does by itself."""
        return None

    def _start(
        self, call: str, payload: torch.Tensor | Sequence[torch.Tensor], work: Work, async_op: bool
    ) -> Work:
        tensors = payload if isinstance(payload, Sequence) else (payload,)
        self.traffic.add(call, sum(tensor.nbytes for tensor in tensors))
        if async_op:
            self._proceed(work)
        else:
            work.wait()
        return work

    def _check(self, call: str, tensor: torch.Tensor, reduction: Reduction | None = None) -> None:
        if reduction is not None and reduction not in REDUCTIONS:
            raise ValueError(
                f"{self}.{call}: reduction must be one of {', '.join(REDUCTIONS)}, got "
                f"{reduction!r}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{self}.{call}: a contiguous tensor expected, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        if not self.capabilities.supports(call, tensor.dtype, reduction):
            how = "" if reduction is None else f" with reduction {reduction!r}"
            raise UnsupportedError(
                f"{self}.{call}: this transport does not take {tensor.dtype}{how}"
            )

    def _check_rank(self, call: str, what: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{self}.{call}: {what} from 0 to {self.world_size - 1} expected, got {rank}"
            )

    def _sizes(
        self,
        call: str,
        whole: torch.Tensor,
        part: torch.Tensor,
        sizes: Sequence[int] | None,
    ) -> Sequence[int]:
        """Elements of each rank, after a check that they are those of the tensors."""
        found = tuple(sizes) if sizes is not None else (part.numel(),) * self.world_size
        fits = len(found) == self.world_size and found[self.rank] == part.numel()
        if not fits or sum(found) != whole.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"{self}.{call}: parts of {list(found)} elements are {sum(found)} in all, of one "
                f"dtype; got {whole.numel()} x {whole.dtype} for all and "
                f"{part.numel()} x {part.dtype} for rank {self.rank}"
            )
        if not whole.is_contiguous() or not part.is_contiguous():
            raise ValueError(f"{self}.{call}: contiguous tensors expected")
        return found
