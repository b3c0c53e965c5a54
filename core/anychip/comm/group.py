"""The communicator: what is the same on every transport, before and after it moves the bytes.

A group checks arguments, counts, compares its calls with the other ranks' and makes one error of
what went wrong, which names the ranks at fault. It is composed of a membership, a transport and,
unless it has one rank only, its part in the job.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from anychip.comm.job import Job, LastCall
from anychip.comm.ledger import MESSAGE_TAGS, STEP_TAGS, Check, Ends, Failure, Note
from anychip.comm.solo import Solo
from anychip.comm.store import part_of
from anychip.contract import (
    DONE,
    HOST,
    REDUCTIONS,
    AnychipError,
    Capabilities,
    CollectiveCall,
    CommunicationError,
    Communicator,
    Membership,
    Reduction,
    Traffic,
    Transfer,
    Transport,
    TransportError,
    UnsupportedError,
    Work,
)

if TYPE_CHECKING:
    import torch


def alone(*, name: str = "world", world_rank: int = 0, device: str = HOST) -> Communicator:
    """The communicator of a job, or of a group, that has one rank."""
    return Group(Membership((world_rank,), 0, name=name), Solo(device))


class Group(Communicator):
    """One rank's end of a group.

    Further than the interface promises: the ranks of a call that is not the same on all exchange
    nothing, unless the job's ``check`` is ``off``. A failure in one group ends all groups of the
    job, on all ranks.

    Args:
        job: None for a group of one rank, which has nobody to agree with.
    """

    def __init__(self, group: Membership, transport: Transport, job: Job | None = None) -> None:
        self.rank, self.world_size = group.rank, len(group.ranks)
        self.name, self.ranks, self._number = group.name, group.ranks, group.number
        self.transport, self.job = transport, job
        self.device, self.description = transport.device, transport.description
        self.traffic, self.timeout_s, self._splits = Traffic(), 600.0, 0
        self.failing = threading.Lock()
        self._taken: set[tuple[str, torch.dtype, Reduction | None]] = set()
        if job is not None:
            job.hold(transport)
            self.timeout_s, self._store = job.timeout_s, part_of(job.store, f"group/{group.number}")
            check: Check = job.check
            if check == "step" and transport.num_tags < STEP_TAGS:
                check = "always"
            self._ledger = job.ledger(group, check)
            self.description += f"; calls compared: {check}"

    @property
    def capabilities(self) -> Capabilities:
        return self.transport.capabilities

    def all_reduce(
        self, tensor: torch.Tensor, reduction: Reduction = "sum", *, async_op: bool = False
    ) -> Work:
        self._check("all_reduce", tensor, reduction)
        call = CollectiveCall("all_reduce", (tensor,), (tensor,), reduction)
        work = self._call(call, f"{reduction} {_shape(tensor)}")
        return self._start("all_reduce", call.inputs, work, async_op)

    def all_gather(
        self, output: torch.Tensor, tensor: torch.Tensor, *, sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work:  # fmt: skip
        self._check("all_gather", tensor)
        found = self._sizes("all_gather", output, tensor, sizes)
        call = CollectiveCall("all_gather", (tensor,), (output,), sizes=found)
        work = self._call(call, f"{list(found)} {tensor.dtype}")
        return self._start("all_gather", call.outputs, work, async_op)

    def reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, reduction: Reduction = "sum", *,
        sizes: Sequence[int] | None = None, async_op: bool = False,
    ) -> Work:  # fmt: skip
        self._check("reduce_scatter", tensor, reduction)
        found = self._sizes("reduce_scatter", tensor, output, sizes)
        call = CollectiveCall("reduce_scatter", (tensor,), (output,), reduction, found)
        work = self._call(call, f"{reduction} {list(found)} {tensor.dtype}")
        return self._start("reduce_scatter", call.inputs, work, async_op)

    def broadcast(self, tensor: torch.Tensor, source: int, *, async_op: bool = False) -> Work:
        self._check("broadcast", tensor)
        self._check_rank("broadcast", "source", source)
        given, taken = ((tensor,), ()) if source == self.rank else ((), (tensor,))
        call = CollectiveCall("broadcast", given, taken, source=source)
        work = self._call(call, f"from rank {self.ranks[source]} {_shape(tensor)}")
        return self._start("broadcast", (tensor,), work, async_op)

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        *,
        async_op: bool = False,
    ) -> Work:
        if len(outputs) != self.world_size or len(inputs) != self.world_size:
            raise ValueError(
                f"{self}.all_to_all: one tensor per rank ({self.world_size}) expected, got "
                f"{len(outputs)} outputs and {len(inputs)} inputs"
            )
        dtypes = set()
        for tensor in (*outputs, *inputs):
            self._check("all_to_all", tensor)
            dtypes.add(tensor.dtype)
        if len(dtypes) > 1:
            found = ", ".join(sorted(map(str, dtypes)))
            raise ValueError(f"{self}.all_to_all: one dtype expected, got {found}")
        work = self._call(CollectiveCall("all_to_all", inputs, outputs), str(outputs[0].dtype))
        return self._start("all_to_all", inputs, work, async_op)

    def exchange(self, transfers: Sequence[Transfer], *, async_op: bool = False) -> Work:
        for kind, tensor, peer, tag in transfers:
            self._check(kind, tensor)
            self._check_rank(kind, "peer", peer)
            if peer == self.rank:
                raise ValueError(f"{self}.{kind}: another rank expected, got {peer}, this one")
            if not 0 <= tag < MESSAGE_TAGS:
                raise ValueError(
                    f"{self}.{kind}: a tag from 0 to {MESSAGE_TAGS - 1} expected, got {tag}"
                )
        work = self._exchange(transfers) if transfers else DONE
        for kind, tensor, _, _ in transfers:
            self.traffic.add(kind, tensor.nbytes)
        return self._go(work, async_op)

    def barrier(self) -> None:
        self._start("barrier", (), self._call(CollectiveCall("barrier"), ""), False)

    def split(self, groups: Sequence[Sequence[int]], *, name: str) -> Communicator:
        if sorted(rank for group in groups for rank in group) != list(range(self.world_size)):
            raise ValueError(
                f"{self}.split: groups that hold each rank from 0 to {self.world_size - 1} once "
                f"expected, got {[list(group) for group in groups]}"
            )
        mine = next(tuple(group) for group in groups if self.rank in group)
        return self._part(mine, self._agreed_number([list(g) for g in groups], mine, name), name)

    def part(
        self, ranks: Sequence[int], *, name: str, key: str, on_host: bool = False
    ) -> Communicator:
        """The communicator of some ranks, which alone call this.

        Args:
            ranks: of this group, this rank's among them; in one order.
            key: the same on these ranks, and of no other group of theirs.
            on_host: it takes tensors of the host, whatever this one takes.
        """
        mine, key = tuple(ranks), f"part/{key}"
        self._give_number(key, mine)
        return self._part(mine, self._number_of(key, mine), name, on_host=on_host)

    def _part(
        self, mine: tuple[int, ...], number: int, name: str, *, on_host: bool = False
    ) -> Communicator:
        """The group of some ranks, of which this is one, with a number that they agree on."""
        ranks, job = tuple(self.ranks[rank] for rank in mine), self.job
        part = Membership(ranks, mine.index(self.rank), number, name)
        if len(ranks) == 1 or job is None:
            return Group(part, Solo(HOST if on_host else self.device))
        return Group(part, job.host(part) if on_host else self.transport.part(part), job)

    def abort(self, reason: str) -> None:
        if self.job is not None:
            self.job.abort(self._where("abort"), reason)

    def close(self) -> None:
        """Ends this process's part in the job when this is the world; a split-off group stays."""
        if self.job is not None:
            self.is_closed = True
            if self._number == 0:
                self.job.close()

    def _agreed_number(self, groups: list[list[int]], mine: tuple[int, ...], name: str) -> int:
        """A number for the new group of this rank that no other group of the job has.

        The first rank of each takes one and leaves it in the store, before all meet.
        """
        self._splits += 1
        key = f"split/{self._splits}/{mine[0]}"

        def begin(call: CollectiveCall) -> Work:
            self._give_number(key, mine)
            return self.transport.barrier(call)

        self._call(CollectiveCall("split"), f"{name} {groups}", begin).wait()
        return self._number_of(key, mine)

    def _give_number(self, key: str, mine: tuple[int, ...]) -> None:
        if self.job is not None and mine[0] == self.rank and len(mine) > 1:
            self._store.set(key, str(self.job.store.add("groups", 1)))

    def _number_of(self, key: str, mine: tuple[int, ...]) -> int:
        if self.job is None or len(mine) == 1:
            return 0
        try:
            return int(self._store.get(key))
        except RuntimeError as error:
            raise self._without_store("split", error) from error

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        assert self.job is not None, "transfers are between two ranks"
        pairs = [
            (self.rank, peer, tag) if kind == "send" else (peer, self.rank, tag)
            for kind, _, peer, tag in transfers
        ]
        self._refuse(lambda: self._messages(pairs))
        notes, tagged, tags = [], [], self.transport.num_tags
        for pair, (kind, tensor, peer, _) in zip(pairs, transfers, strict=True):
            where = partial(self._messages, pairs)
            note = self._agreed(where, self._ledger.message, pair, _shape(tensor))
            notes.append(note)
            tagged.append(Transfer(kind, tensor, peer, self._ledger.tag(note, tags)))
        self.job.last_call = LastCall(self.name, self._ledger, notes)
        return _Call(self, notes, self.transport.exchange, tagged)

    def _call(
        self, call: CollectiveCall, what: str, begin: Callable[[CollectiveCall], Work] | None = None
    ) -> Work:
        """A collective that all ranks make, whose first messages are on their way."""
        move: Callable[[CollectiveCall], Work] = begin or getattr(self.transport, call.name)
        if self.job is None:
            return move(call)
        name = call.name  # and not the call, which has tensors, in what is kept with the work
        self._refuse(lambda: name)
        note = self._agreed(lambda: name, self._ledger.enter, f"{name} {what}" if what else name)
        self.job.last_call = LastCall(self.name, self._ledger, [note])
        tags = self.transport.num_tags
        is_watched = name == "all_to_all" and self._ledger.check == "step"
        if is_watched:
            note.parts = _numels(call.inputs), _numels(call.outputs)
        tagged = CollectiveCall(*call[:-2], self._ledger.tag(note, tags) if tags else 0, is_watched)
        return _Call(self, [note], move, tagged)

    def _agreed(
        self, call: Callable[[], str], enter: Callable[..., tuple[Note, Failure | None]], *what: Any
    ) -> Note:
        """The note of a call; raises when it is known that another rank calls something else."""
        assert self.job is not None
        try:
            note, wrong = enter(*what)
        except RuntimeError as error:
            raise self._without_store(call(), error) from error
        if wrong is not None:
            number = "" if note.pair else f" #{note.number}"
            raise self.job.fail(self._where(call() + number), wrong)
        return note

    def _start(
        self, call: str, payload: Sequence[torch.Tensor], work: Work, async_op: bool
    ) -> Work:
        self.traffic.add(call, sum(tensor.nbytes for tensor in payload))
        return self._go(work, async_op)

    def _go(self, work: Work, async_op: bool) -> Work:
        if not async_op:
            work.wait()
        elif isinstance(work, _Call):
            work.proceed()
        return work

    def _refuse(self, call: Callable[[], str]) -> None:
        """Raises when nothing can be called any more."""
        assert self.job is not None
        if not (self.is_closed or self.job.has_ended):
            return
        if self.is_closed and not self.job.has_failed:
            raise CommunicationError(self._where(call()), "this rank has closed the communicator")
        self.job.refuse_after_failure(lambda: self._where(call()))

    def _without_store(self, call: str, error: RuntimeError) -> CommunicationError:
        """The error to raise when the store went with its host, which need not be in the group."""
        assert self.job is not None
        text = "ended, and with it the job's store, which the others still need"
        return self.job.explain(self._where(call), error, lambda: (0,), text)

    def _explain(self, call: str, note: Note, error: RuntimeError) -> Exception:
        """The error to raise for a transport's: what became of the job, and who is to blame."""
        assert self.job is not None
        where = self._where(call)
        if isinstance(error, AnychipError) and not isinstance(error, TransportError):
            return error
        if not isinstance(error, TransportError):
            everyone = tuple(rank for rank in self.ranks if rank != self.job.rank)
            return self.job.explain(where, error, lambda: everyone)
        peers = tuple(self.ranks[peer] for peer in error.peers)
        if error.how == "wrong":
            return self.job.fail(where, Failure(peers, str(error)))

        def missing(*, ask: bool = False) -> tuple[int, ...]:
            return peers if note.pair else self._ledger.missing(note.number, ask=ask)

        if error.how == "lost":
            return self.job.explain(where, error, missing)
        with contextlib.suppress(RuntimeError):  # the store went with its host
            peers = missing(ask=True) or peers
        return self.job.late(where, peers, self._ledger)

    def _named(self, notes: Sequence[Note]) -> str:
        """A call as messages name it. It is asked for rarely, and keeps no tensor."""
        if notes[0].pair:
            return self._messages([note.pair for note in notes])
        return f"{notes[0].call.partition(' ')[0]} #{notes[0].number}"

    def _messages(self, pairs: Sequence[Ends]) -> str:
        return ", ".join(
            f"send to rank {self.ranks[destination]}"
            if source == self.rank
            else f"recv from rank {self.ranks[source]}"
            for source, destination, _ in pairs
        )

    def _where(self, call: str) -> str:
        return f"{self.name}, rank {self.rank} of {self.world_size}: {call}"

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
        if (call, tensor.dtype, reduction) in self._taken:
            return
        if not self.capabilities.supports(call, tensor.dtype, reduction):
            how = "" if reduction is None else f" with reduction {reduction!r}"
            raise UnsupportedError(
                f"{self}.{call}: this transport does not take {tensor.dtype}{how}"
            )
        self._taken.add((call, tensor.dtype, reduction))

    def _check_rank(self, call: str, what: str, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"{self}.{call}: {what} from 0 to {self.world_size - 1} expected, got {rank}"
            )

    def _sizes(
        self, call: str, whole: torch.Tensor, part: torch.Tensor, sizes: Sequence[int] | None
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


class _Call(Work):
    """A transport's work, whose failure becomes one error for the rank, told to all others."""

    def __init__(
        self, group: Group, notes: Sequence[Note], begin: Callable[[Any], Work], argument: Any
    ) -> None:
        self._group, self._notes = group, notes
        self._error: Exception | None = None
        try:
            self._work = begin(argument)
        except RuntimeError as error:
            raise group._explain(group._named(notes), notes[0], error) from error

    def is_done(self) -> bool:
        return self._error is not None or self._work.is_done()

    def wait(self) -> None:
        now = time.monotonic()
        for note in self._notes:
            note.waited = note.waited or now
        try:
            self._work.wait()
        except RuntimeError as error:
            self._fail(error)
            known = self._error
            if not isinstance(known, CommunicationError):
                raise
            raise CommunicationError(known.where, known.reason, ranks=known.ranks) from error
        now = time.monotonic()
        for note in self._notes:
            note.ended = note.ended or now

    def proceed(self) -> None:
        self._group.transport.proceed(self._work, self._fail)

    def _fail(self, error: Exception) -> None:
        with self._group.failing:
            if self._error is None and isinstance(error, RuntimeError):
                name = self._group._named(self._notes)
                self._error = self._group._explain(name, self._notes[0], error)


def _numels(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.numel() for tensor in tensors]


def _shape(tensor: torch.Tensor) -> str:
    return _text(tensor.shape, tensor.dtype)


@lru_cache(maxsize=1024)
def _text(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{tuple(shape)} {dtype}"
