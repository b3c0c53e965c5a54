"""When are gradients sent? Buffer by buffer while backward runs, in one order on all ranks.

Note: Rounds
    A *round* is one backward whose gradients are reduced, of some buffers or all. A hook on each
    parameter moves its gradient into its buffer; a full one is sent, without waiting, as soon as
    those before it in the order have been. At the end of the round the others follow, with zeros
    for what has no gradient here, or before, when backward has gone past all that is in them
    (:meth:`ReduceQueue.pass_over`): every rank sends every buffer once per round, in one order,
    whatever gradients it has and whenever they came. The first round goes through its buffers as
    they were made; then rank 0 tells in which order they filled up, and that order is kept.
    :meth:`ReduceQueue.finish` waits.

    What is computed outside of rounds (``no_sync``, ``loss.backward()``, gradients set by hand)
    stays in ``.grad``, a local sum, and goes with the next round. :meth:`ReduceQueue.agree` asks
    before the update, with a byte per parameter, whether any rank has a gradient, and whether any
    still has one that was not sent: then the buffers concerned are sent. So a parameter that no
    rank uses is left alone, and one that some rank uses is updated alike on all.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from anychip.contract import Communicator
from anychip.runtime import on_host
from anychip.train.zero.gradients import FlatGradients
from anychip.train.zero.weights import Partition

IN_FLIGHT = 2
"""Buffers that may be under way where gradients are cut; before one more starts, the oldest is
waited for."""

_REDUCED, _PENDING = 1, 2


_Owner = TypeVar("_Owner")


def watch(
    owner: _Owner, params: Iterable[Tensor], arrived: Callable[[_Owner, Tensor], None]
) -> None:
    """Calls ``arrived`` whenever ``.grad`` of a parameter has a new value."""
    # The parameter holds the hook: a strong reference would keep the owner as long.
    this = weakref.ref(owner)

    def call(param: Tensor) -> None:
        found = this()
        if found is not None:
            arrived(found, param)

    for param in params:
        handle = param.register_post_accumulate_grad_hook(call)
        weakref.finalize(owner, handle.remove).atexit = False


class ReduceQueue:
    """The gradients of one rank, and what sends them.

    Args:
        comm: all ranks that hold the same parameters.
        partition: what each rank keeps its part of.
    """

    def __init__(self, comm: Communicator, partition: Partition) -> None:
        self.comm, self.partition = comm, partition
        self.buffers: list[FlatGradients] = []
        self.places: dict[Tensor, tuple[int, int]] = {}
        self._learned: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._order: tuple[int, ...] = ()
        self._is_open = False
        self._num_started = 0
        self._filled: list[int] = []  # or passed over
        self._sent: list[int] = []
        self._is_settled = True

    def add(self, gradients: FlatGradients) -> None:
        """Takes in a buffer; the gradients of its parameters are watched from now on."""
        for index, param in enumerate(gradients.params):
            self.places[param] = (len(self.buffers), index)
        watch(self, gradients.params, ReduceQueue._arrived)
        self.buffers.append(gradients)
        self._learned.clear()

    @contextmanager
    def round(self, only: Collection[Tensor] | None = None) -> Iterator[None]:
        """What a backward within it computes has been sent when it ends.

        Args:
            only: buffers with none but these parameters, that have not been sent since
                :meth:`finish`; what is in others stays local.
        """
        self.hide()
        wanted = self.places.keys() if only is None else set(only)
        mine = tuple(
            number
            for number, buffer in enumerate(self.buffers)
            if number not in self._sent and wanted >= set(buffer.params)
        )
        self._order = self._learned.get(mine, mine)
        self._is_open, self._num_started, self._filled = True, 0, []
        try:
            yield
            while self._num_started < len(self._order):
                self._start_next()
        except BaseException:
            self.drop()
            raise
        finally:
            self._is_open = False
        if mine not in self._learned:
            self._learn_order(mine)

    def finish(self) -> None:
        """Waits for what was sent, and shows it."""
        for number in self._sent:
            self.buffers[number].finish()
        self._show_sent()
        self._sent, self._is_settled = [], True

    def end(self) -> None:
        """All rounds of a backward are over: shows what was sent, and waits where it has values."""
        if not self.partition.states:
            self.finish()
        self._show_sent()
        self._is_settled = not self._sent

    def _show_sent(self) -> None:
        for number in self._sent:
            self.buffers[number].show_held()

    def _settle(self) -> None:
        """Waits for what is left of a backward that is over."""
        if not self._is_settled:
            self.finish()

    def drop(self) -> None:
        """Forgets what is under way, after an error."""
        for buffer in self.buffers:
            buffer.drop_filling()
        self._sent, self._is_settled = [], True

    def hide(self) -> None:
        """Takes reduced gradients out of ``.grad``, so that a backward does not add to them."""
        self._settle()
        for buffer in self.buffers:
            buffer.hide()

    def _arrived(self, param: Tensor) -> None:
        """Called by autograd when ``.grad`` of a parameter has its new value."""
        number, index = self.places[param]
        buffer = self.buffers[number]
        if not self._is_open or number not in self._order:
            if param.grad is not None and param.grad is buffer.shown.get(index):
                raise RuntimeError(
                    f"a backward has added to a reduced gradient, of shape {tuple(param.shape)}; "
                    "call zero_grad() first, or the optimizer's backward(loss), which adds rightly"
                )
            return
        if number in self._sent:
            raise RuntimeError(
                f"a gradient of shape {tuple(param.shape)} came after its buffer had been sent: "
                "its backward runs in several pieces; call backward under no_sync(), and step() "
                "reduces what it leaves"
            )
        buffer.take(index)
        if buffer.is_full:
            self._fill([number])

    def pass_over(self, params: Collection[Tensor]) -> None:
        """No gradient of these comes any more in this round: buffers of them alone are sent.

        A rank that waits for a buffer of another one does not go on to what that one needs to come
        to its end, like weights that all gather.
        """
        if self._is_open:
            numbers = dict.fromkeys(self.places[param][0] for param in params)
            self._fill(n for n in numbers if set(self.buffers[n].params) <= set(params))

    def _fill(self, numbers: Iterable[int]) -> None:
        """Nothing more comes into these buffers: what is next in the order goes."""
        self._filled += [n for n in numbers if n in self._order and n not in self._filled]
        while (
            self._num_started < len(self._order) and self._order[self._num_started] in self._filled
        ):
            self._start_next()

    def _start_next(self) -> None:
        buffer = self.buffers[self._order[self._num_started]]
        if self.partition.gradients:
            under_way = [b for b in map(self.buffers.__getitem__, self._sent) if b.is_under_way]
            for index, other in enumerate(under_way):
                if other.is_done() or index <= len(under_way) - IN_FLIGHT:
                    other.finish()
        buffer.start()
        self._sent.append(self._order[self._num_started])
        self._num_started += 1

    def _learn_order(self, mine: tuple[int, ...]) -> None:
        rest = [number for number in mine if number not in self._filled]
        order = torch.tensor([*self._filled, *rest], device=self.buffers[0].params[0].device)
        if mine:
            self.comm.broadcast(order, 0)
        self._learned[mine] = tuple(on_host(order).tolist())

    def agree(self, share: Tensor | None = None) -> tuple[set[Tensor], Tensor | None]:
        """Reduces what is still local, and returns the parameters that have a gradient anywhere.

        A collective call, and a transfer to the host.

        Args:
            share: (n,) of any dtype, the same on all ranks: goes with the same message.

        Returns:
            The parameters; and all ranks' ``share`` on the host, (world_size, n).
        """
        if any(self.buffers[number].is_replaced(index) for number, index in self.places.values()):
            self.finish()
        marks = [self._mark(param) for param in self.places]
        joined = torch.tensor(marks, dtype=torch.uint8, device=next(iter(self.places)).device)
        if share is not None:
            joined = torch.cat((joined, self._in_its_place(share)))
        asked = self.buffers[0].exchange.largest(joined)
        self.finish()
        asked.wait()
        told = on_host(joined)
        found = dict(zip(self.places, told.tolist(), strict=False))
        late = [b for b in self.buffers if any(found[p] == _PENDING for p in b.params)]
        for buffer in late:
            buffer.hide()
            buffer.start()
        for buffer in late:
            buffer.finish()
            buffer.show_held()
        present = {param for param, mark in found.items() if mark}
        for param in present:
            number, index = self.places[param]
            self.buffers[number].show(index)
        if share is None:
            return present, None
        return present, told[len(marks) :].clone().view(share.dtype).view(self.comm.world_size, -1)

    def _in_its_place(self, share: Tensor) -> Tensor:
        """The bytes of all ranks' shares, with zeros for those of the others: the largest of all
        ranks' bytes are what each has put in.
        """
        mine = share.view(torch.uint8)
        everyone = mine.new_zeros(self.comm.world_size * len(mine))
        everyone[len(mine) * self.comm.rank :][: len(mine)] = mine
        return everyone

    def _mark(self, param: Tensor) -> int:
        number, index = self.places[param]
        buffer = self.buffers[number]
        buffer.forget_replaced(index)
        if param.grad is not None and index not in buffer.shown:
            return _PENDING
        return _REDUCED if index in buffer.held else 0

    def gradient(self, param: Tensor) -> Tensor:
        """This rank's piece of a reduced gradient; see :meth:`.FlatGradients.gradient`."""
        number, index = self.places[param]
        return self.buffers[number].gradient(index)

    def clear(self, *, set_to_none: bool) -> None:
        """Forgets the reduced gradients, or makes them zero."""
        self._settle()
        for buffer in self.buffers:
            if set_to_none:
                buffer.clear()
            elif buffer.reduced is not None:
                if self.partition.states:
                    buffer.hide()
                buffer.reduced.zero_()
