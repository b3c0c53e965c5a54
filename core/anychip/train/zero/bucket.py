"""The gradients that are sent together: filled while backward runs, reduced once all are there.

A bucket's gradients exist three times at different moments: in ``.grad``, as backward makes them;
in ``filling``, the buffer that is sent; in ``reduced``, the mean or sum over the ranks (all of it
in stage 0, this rank's part in stages 1 and 2). Moving from one to the next frees the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from anychip.contract import Communicator, UnsupportedError, Work
from anychip.train.zero.partition import Layout

GradientReduction = Literal["avg", "sum"]


class Partitioned(Tensor):
    """Stands in ``.grad`` for a gradient of which each rank has a part: shape, and no values.

    Taken away, by the model's ``zero_grad`` too, it takes the gradient with it.
    """

    def __new__(cls, param: Tensor) -> Partitioned:
        """For the gradient of a parameter."""
        made: Partitioned = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Partitioned({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func}: this gradient has no values here, since ZeRO keeps parts of it on all ranks. "
            "To clip: optim.chain(optim.clip_by_global_norm(max_norm), rule), and StepResult has "
            "the norm; to clear: opt.zero_grad(); to add another: opt.backward(loss)"
        )


class Bucket:
    """One bucket on one rank.

    Args:
        layout: of the members in the buffer.
        params: the members, float32.
        stage: 0 (all-reduce), 1 or 2 (reduce-scatter).
        dtype: of what is sent.
        reduction: of the ranks' gradients.

    Attributes:
        held: positions of members for which this rank has contributed a gradient to ``reduced``.
        shown: position to what was put into ``.grad``: in stage 0 the view of ``reduced``.
    """

    def __init__(
        self,
        layout: Layout,
        params: Sequence[Tensor],
        comm: Communicator,
        stage: int,
        dtype: torch.dtype,
        reduction: GradientReduction,
    ) -> None:
        self.layout, self.params, self.comm = layout, params, comm
        self.stage, self.dtype = stage, dtype
        self.reduction: GradientReduction = reduction
        self.part = layout.part(comm.rank) if stage else slice(0, layout.numel)
        self.filling: Tensor | None = None
        self.reduced: Tensor | None = None
        self.held: set[int] = set()
        self.shown: dict[int, Tensor] = {}
        self._stand_ins: dict[int, Partitioned] = {}
        self._taken: set[int] = set()
        self._output: Tensor | None = None
        self._work: Work | None = None

    @property
    def is_full(self) -> bool:
        """Every member's gradient has been taken."""
        return len(self._taken) == len(self.params)

    @property
    def is_under_way(self) -> bool:
        """Started and not finished."""
        return self._work is not None

    def is_done(self) -> bool:
        """Under way, and :meth:`finish` would not wait."""
        return self._work is not None and self._work.is_done()

    def take(self, position: int) -> None:
        """Moves a member's ``.grad`` into the buffer."""
        param = self.params[position]
        grad = param.grad
        assert grad is not None
        if grad.layout != torch.strided:
            raise UnsupportedError(
                f"a parameter of shape {tuple(param.shape)} has a gradient with the layout "
                f"{grad.layout}; dense gradients are reduced, so make it dense (for an embedding, "
                "sparse=False)"
            )
        if self.filling is None:
            self.filling = torch.empty(self.layout.numel, dtype=self.dtype, device=param.device)
            for gap in self.layout.gaps():
                self.filling[gap] = 0.0
        view = self._view(self.filling, position)
        if position in self._taken:  # it came in two pieces, as from a checkpointed region
            view.add_(grad)
        else:
            view.copy_(grad)
        self._taken.add(position)
        param.grad = None

    def start(self) -> None:
        """Sends the buffer: gradients that have not been taken yet, zeros where there are none."""
        for position, param in enumerate(self.params):
            if param.grad is not None:
                self.take(position)
        if self.filling is None:
            device = self.params[0].device
            self.filling = torch.zeros(self.layout.numel, dtype=self.dtype, device=device)
        else:
            for position in set(range(len(self.params))) - self._taken:
                self._view(self.filling, position).zero_()
        self.held |= self._taken
        if self.stage == 0:
            self._output = self.filling
            self._work = self.comm.all_reduce(self.filling, self.reduction, async_op=True)
            return
        mine = self.filling[self.part]
        self._output = mine if self.stage == 1 else torch.empty_like(mine)
        self._work = self.comm.reduce_scatter(
            self._output,
            self.filling,
            self.reduction,
            sizes=self.layout.sizes,
            async_op=True,
        )

    def finish(self) -> None:
        """Waits for what is under way, and adds it to what was reduced before."""
        assert self._work is not None
        assert self._output is not None
        self._work.wait()
        new = self._output.float()
        self.drop_filling()
        self.reduced = new if self.reduced is None else self.reduced.add_(new)

    def drop_filling(self) -> None:
        """Frees the buffer, and forgets what was taken."""
        self.filling = self._output = self._work = None
        self._taken = set()

    def clear(self) -> None:
        """Forgets all gradients."""
        self.drop_filling()
        self.reduced = None
        self.held, self.shown = set(), {}

    def hide(self) -> None:
        """Makes room in ``.grad`` for the gradients of another backward.

        What a person put in the place of a reduced gradient counts instead of it.
        """
        for position in list(self.shown):
            if not self.forget_replaced(position):
                self.params[position].grad = None
        self.shown = {}
        if self.stage == 1 and self.reduced is not None:
            self.reduced = self.reduced.clone()  # alone, so that the whole buffer is freed

    def forget_replaced(self, position: int) -> bool:
        """Forgets a shown gradient in whose place a person put something else; True if so."""
        shown = self.shown.get(position)
        if shown is None or self.params[position].grad is shown:
            return False
        self.gradient(position).zero_()
        del self.shown[position]
        self.held.discard(position)
        return True

    def show(self, position: int) -> None:
        """Puts the reduced gradient into ``.grad``, or what stands for it."""
        if position in self.shown:
            return
        assert self.reduced is not None
        param = self.params[position]
        if self.stage == 0:
            self.shown[position] = self._view(self.reduced, position)
        else:
            self.shown[position] = self._stand_ins.setdefault(position, Partitioned(param))
        param.grad = self.shown[position]

    def show_held(self) -> None:
        """Shows what this rank has contributed to."""
        for position in self.held:
            self.show(position)

    def gradient(self, position: int) -> Tensor:
        """This rank's piece of a member's reduced gradient, flat; the whole of it in stage 0."""
        assert self.reduced is not None
        if self.stage == 0:
            return self._view(self.reduced, position)
        piece = self.layout.piece(position, self.comm.rank)
        start = piece.start - self.part.start
        return self.reduced[start : start + piece.numel]

    def _view(self, buffer: Tensor, position: int) -> Tensor:
        start, numel = self.layout.starts[position], self.layout.numels[position]
        return buffer[start : start + numel].view(self.params[position].shape)
