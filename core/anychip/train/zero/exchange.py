"""How do whole weights come from parts, and parts of a sum from whole gradients?

The seam between sharded parameters and the wire: the engine asks an :class:`Exchange`, and does not
know which ranks it talks to or what goes over the wire. :class:`Flat` cuts among all ranks;
:class:`Grouped` among those of a group, and adds up over the groups; :class:`Coded` sends codes of
few bits in place of weights; with :class:`Secondary` neighbours keep what they have gathered.
A person's own one goes around these (``exchange`` of the optimizer), as a subclass of
:class:`Around`, and may carry what one reduction owes to the next.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from anychip import ops
from anychip.contract import DONE, Backend, Communicator, Work
from anychip.train.zero.layout import ALIGNMENT

GradientReduction = Literal["avg", "sum"]
Carried = Mapping[str, Tensor]
"""By name what an exchange carries from one reduction of a buffer to the next: (numel,) float32."""
NOTHING: Carried = MappingProxyType({})


class Exchange(ABC):
    """What the ranks that hold the same parameters send each other.

    Calls of one kind are made in one order by all ranks, whatever order the kinds come in: gathers
    go over a communicator of their own.

    Attributes:
        rank: of this one, among those that a buffer is cut for.
        world_size: parts of a buffer.
        alignment: elements, of which the start of each parameter in a buffer is a multiple.
        carries: names of what :meth:`reduce` leaves on this rank for the next time, like the error
            of what was rounded. Checkpoints have it; at another number of ranks the first one goes
            on with the sum over those that saved it, so that nothing owed is lost.
    """

    rank: int
    world_size: int
    alignment: int = ALIGNMENT
    carries: Sequence[str] = ()

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """``tensor`` becomes that of the first of all ranks."""

    @abstractmethod
    def gather(self, full: Tensor, part: Tensor, *, exact: bool = False) -> Work:
        """``full`` becomes the ranks' parts, in its dtype; ``part`` may be its own place in it.

        Args:
            exact: no other values than the parts', whatever the wire would make of them.
        """

    @abstractmethod
    def join(self, whole: Tensor, piece: Tensor, sizes: Sequence[int]) -> None:
        """``whole`` becomes the ranks' pieces, exactly.

        Args:
            sizes: elements of each.
        """

    @abstractmethod
    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        """``part`` becomes this rank's part of what all ranks have in ``full``, which is undefined
        after. With ``part`` the whole of ``full``, all of it.

        Args:
            carried: of this buffer, by the names in ``carries``; zeros at first. The call may read
                and write it until it has been waited for.
        """

    @abstractmethod
    def sum_over_parts(self, sums: Tensor) -> Tensor:
        """The sum over the ranks that have the parts of a whole, in place; returned too."""

    @abstractmethod
    def largest(self, tensor: Tensor) -> Work:
        """``tensor`` becomes the largest of all ranks', element by element, while reductions that
        have begun go on.
        """

    def beside(self) -> AbstractContextManager[Any]:
        """Within it work is queued where gathers are, after what has been queued so far."""
        return nullcontext()

    def keep(self, full: Tensor) -> Tensor | None:
        """What this rank keeps of gathered weights until they change, for the next gather.

        None: nothing.
        """
        return None

    def gather_kept(self, full: Tensor, kept: Tensor) -> Work:
        """``full`` becomes what it was when the ranks kept it."""
        raise NotImplementedError


class Flat(Exchange):
    """Every rank has a part."""

    def __init__(self, comm: Communicator, gather_comm: Communicator | None = None) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.comm, self.gather_comm = comm, gather_comm or comm

    def broadcast(self, tensor: Tensor) -> None:
        self.comm.broadcast(tensor, 0)

    def gather(self, full: Tensor, part: Tensor, *, exact: bool = False) -> Work:
        mine = full[self.rank * len(part) :][: len(part)]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        return self.gather_comm.all_gather(full, mine, async_op=True)

    def join(self, whole: Tensor, piece: Tensor, sizes: Sequence[int]) -> None:
        self.gather_comm.all_gather(whole, piece, sizes=sizes)

    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        if part is full:
            return self.comm.all_reduce(full, reduction, async_op=True)
        return self.comm.reduce_scatter(part, full, reduction, async_op=True)

    def sum_over_parts(self, sums: Tensor) -> Tensor:
        self.comm.all_reduce(sums)
        return sums

    def largest(self, tensor: Tensor) -> Work:
        return self.comm.all_reduce(tensor, "max", async_op=True)


class Around(Exchange):
    """Another exchange, of which a subclass does some things in another way."""

    def __init__(self, inner: Exchange) -> None:
        self.rank, self.world_size = inner.rank, inner.world_size
        self.inner, self.alignment, self.carries = inner, inner.alignment, inner.carries

    def broadcast(self, tensor: Tensor) -> None:
        self.inner.broadcast(tensor)

    def gather(self, full: Tensor, part: Tensor, *, exact: bool = False) -> Work:
        return self.inner.gather(full, part, exact=exact)

    def join(self, whole: Tensor, piece: Tensor, sizes: Sequence[int]) -> None:
        self.inner.join(whole, piece, sizes)

    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        return self.inner.reduce(part, full, reduction, carried)

    def sum_over_parts(self, sums: Tensor) -> Tensor:
        return self.inner.sum_over_parts(sums)

    def largest(self, tensor: Tensor) -> Work:
        return self.inner.largest(tensor)

    def keep(self, full: Tensor) -> Tensor | None:
        return self.inner.keep(full)

    def gather_kept(self, full: Tensor, kept: Tensor) -> Work:
        return self.inner.gather_kept(full, kept)


class Grouped(Around):
    """Every rank of a group has a part, and every group the whole (HSDP; MiCS).

    Weights are gathered within the group. Gradients are added up within it, then over the groups:
    the pairwise tree of all ranks, if groups are neighbours and powers of two, so that the bits are
    those of :class:`Flat`.

    Args:
        comm: all ranks.
        size: of a group of neighbours; a divisor of the number of ranks.

    Source: Zhang et al. 2022, arXiv:2205.00119 (MiCS), section 3; Zhao et al. 2023,
    arXiv:2304.11277 (hybrid sharding), section 3.2.2.
    """

    def __init__(self, comm: Communicator, size: int) -> None:
        inner = [list(range(start, start + size)) for start in range(0, comm.world_size, size)]
        outer = [list(column) for column in zip(*inner, strict=True)]
        super().__init__(Flat(comm.split(inner, name="shard"), comm.split(inner, name="gather")))
        self.comm, self.outer = comm, comm.split(outer, name="replicate")

    def broadcast(self, tensor: Tensor) -> None:
        self.comm.broadcast(tensor, 0)

    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        divisor = self.comm.world_size if reduction == "avg" else None
        return _OverGroups(self.inner.reduce(part, full, "sum", carried), part, self.outer, divisor)

    def largest(self, tensor: Tensor) -> Work:
        return self.comm.all_reduce(tensor, "max", async_op=True)


class _OverGroups(Work):
    """The second half of a reduction, which begins when somebody waits for the first.

    Not before: in the order of waiting, which all ranks have in common.
    """

    def __init__(self, first: Work, part: Tensor, outer: Communicator, divisor: int | None) -> None:
        self._first, self._part, self._outer, self._divisor = first, part, outer, divisor
        self._is_over = False

    def wait(self) -> None:
        if self._is_over:
            return
        self._first.wait()
        self._outer.all_reduce(self._part)
        if self._divisor is not None:
            self._part.div_(self._divisor)
        self._is_over = True

    def is_done(self) -> bool:
        return self._is_over


class Coded(Around):
    """Gathers codes and one scale per block, and makes weights of them on every rank alike (qwZ).

    All ranks compute with the same weights, those of the codes; what rules update stays exact. A
    block lies in one part, since granules are multiples of it, and in one parameter, whose sizes of
    numbers may be all others than the next one's.

    Args:
        inner: what the codes go over, and everything else.
        format: of :func:`anychip.ops.quantize`.

    Source: Wang et al. 2023, arXiv:2306.10209 (ZeRO++), section 3.1.
    """

    def __init__(self, inner: Exchange, format: str) -> None:
        super().__init__(inner)
        self.format = format
        self.alignment = self.block = 32 if format.startswith("mx_") else 256

    def gather(self, full: Tensor, part: Tensor, *, exact: bool = False) -> Work:
        if exact or not len(part):
            return self.inner.gather(full, part)
        own = ops.quantize(part, format=self.format, block=self.block)
        codes, scales = (t.new_empty(len(t) * self.world_size) for t in own)
        works = [self.inner.gather(w, t) for w, t in zip((codes, scales), own, strict=True)]

        def decode() -> None:
            shape = [full.numel()]
            given: dict[str, Any] = {"format": self.format, "block": self.block}
            full.copy_(ops.dequantize(codes, scales, shape=shape, **given))

        return _Then(works, decode)


class Secondary(Around):
    """Keeps gathered weights among neighbours until they change (hpZ).

    The first gather after an update goes over all ranks, those after it, as before backward, over a
    group: nothing leaves the machine then, for its part of the weights beside each rank's own.

    Args:
        inner: what everything else goes over.
        comm: the ranks of ``inner``.
        size: of a group of neighbours; a divisor of their number.

    Source: Wang et al. 2023, arXiv:2306.10209 (ZeRO++), section 3.2.
    """

    def __init__(self, inner: Exchange, comm: Communicator, size: int) -> None:
        super().__init__(inner)
        groups = [list(range(start, start + size)) for start in range(0, comm.world_size, size)]
        self.neighbours = comm.split(groups, name="secondary")

    def keep(self, full: Tensor) -> Tensor:
        count = len(full) // self.neighbours.world_size
        return full[self.neighbours.rank * count :][:count].clone()

    def gather_kept(self, full: Tensor, kept: Tensor) -> Work:
        mine = full[self.neighbours.rank * len(kept) :][: len(kept)].copy_(kept)
        return self.neighbours.all_gather(full, mine, async_op=True)


class OnStreams(Around):
    """Gathers on a stream of their own, reductions on another, while the current one computes.

    A communicator works in the order of its calls: with one for both, or on one stream, a gather
    would wait for gradients that another rank has not got yet. Memory belongs to the current
    stream: it is given to a side stream by an event, and taken back by :meth:`Work.wait`, so that
    no allocator has to be told of other streams.

    Args:
        backend: of the device that the tensors are on.
    """

    def __init__(self, inner: Exchange, backend: Backend) -> None:
        super().__init__(inner)
        self._backend = backend
        self._gathers, self._reductions = backend.stream(), backend.stream()

    def gather(self, full: Tensor, part: Tensor, *, exact: bool = False) -> Work:
        return self._on(self._gathers, lambda: self.inner.gather(full, part, exact=exact))

    def join(self, whole: Tensor, piece: Tensor, sizes: Sequence[int]) -> None:
        def begin() -> Work:
            self.inner.join(whole, piece, sizes)
            return DONE

        self._on(self._gathers, begin).wait()

    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        return self._on(self._reductions, lambda: self.inner.reduce(part, full, reduction, carried))

    def largest(self, tensor: Tensor) -> Work:
        return self._on(self._reductions, lambda: self.inner.largest(tensor))

    def gather_kept(self, full: Tensor, kept: Tensor) -> Work:
        return self._on(self._gathers, lambda: self.inner.gather_kept(full, kept))

    @contextmanager
    def beside(self) -> Iterator[None]:
        _follow(self._backend, self._gathers, self._backend.current_stream())
        with self._backend.use_stream(self._gathers):
            yield

    def _on(self, stream: torch.Stream, begin: Callable[[], Work]) -> Work:
        _follow(self._backend, stream, self._backend.current_stream())
        with self._backend.use_stream(stream):
            work = begin()
        return _Beside(self._backend, stream, work)


class _Beside(Work):
    """Work on a stream, which another one waits for."""

    def __init__(self, backend: Backend, stream: torch.Stream, work: Work) -> None:
        self._backend, self._stream, self._work = backend, stream, work
        self._is_over = False

    def wait(self) -> None:
        if not self._is_over:
            with self._backend.use_stream(self._stream):
                self._work.wait()
            self._is_over = True
        _follow(self._backend, self._backend.current_stream(), self._stream)

    def is_done(self) -> bool:
        return self._is_over or self._work.is_done()


def _follow(backend: Backend, later: torch.Stream, earlier: torch.Stream) -> None:
    """What is queued on one stream from now on comes after what is queued on another one now."""
    event = backend.event()
    event.record(earlier)
    event.wait(later)


class _Then(Work):
    """Calls that may be under way, and what is done with their results once."""

    def __init__(self, works: Sequence[Work], then: Callable[[], None]) -> None:
        self._works, self._then = works, then
        self._is_over = False

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        if not self._is_over:
            self._is_over = True
            with torch.no_grad():
                self._then()

    def is_done(self) -> bool:
        return self._is_over or all(work.is_done() for work in self._works)
