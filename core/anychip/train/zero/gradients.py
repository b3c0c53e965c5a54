"""The gradients of a flat buffer: filled while backward runs, reduced once all are there.

They exist three times at different moments: in ``.grad``, as backward makes them;
in ``filling``, the buffer that is sent; in ``reduced``, the mean or sum over the ranks (all of it
where states are whole, else this rank's part). Moving from one to the next frees the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from anychip.contract import UnsupportedError, Work
from anychip.train.zero.exchange import Exchange, GradientReduction
from anychip.train.zero.layout import Layout
from anychip.train.zero.streaming import Tiers
from anychip.train.zero.tiers import Elsewhere
from anychip.train.zero.weights import Partition


class Partitioned(Tensor):
    """Stands in ``.grad`` for a gradient of which each rank has a part: shape, and no values.

    Taken away, by the model's ``zero_grad`` too, it takes the gradient with it.
    """

    def __new__(cls, param: Tensor) -> Partitioned:
        """For the gradient of a parameter."""
        made: Partitioned = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=dtype_of_gradient(param),
            device=param.device,
        )  # fmt: skip
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Partitioned({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func}: this gradient has no values here, since ZeRO keeps parts of it on all ranks. "
            "To clip: opt.clip_grad_norm_(max_norm), or optim.chain(optim.clip_by_global_norm("
            "max_norm), rule), with the norm in StepResult; to clear: opt.zero_grad(); to add "
            "another: opt.backward(loss)"
        )


def dtype_of_gradient(param: Tensor) -> torch.dtype:
    """In which autograd adds up: float32 for a weight of 16 bits that has a master."""
    found = getattr(param, "grad_dtype", None)
    return param.dtype if found is None else cast(torch.dtype, found)


class FlatGradients:
    """Those of some parameters on one rank.

    Args:
        params: that are trained.
        layout: of the parameters in the buffer.
        exchange: with the ranks that hold the same parameters.
        partition: what each rank keeps its part of.
        dtype: of what is sent.
        reduction: of the ranks' gradients.
        tiers, cuts: where this rank's part waits for the update, and where its records begin; None:
            on the device.

    Attributes:
        held: indices of parameters for which this rank has given a gradient to ``reduced``.
        shown: index to what was put into ``.grad``: where states are whole the view of ``reduced``.
        carried: from one reduction to the next, what the exchange carries, (numel,) float32 each.
    """

    def __init__(
        self, params: Sequence[Tensor], layout: Layout, exchange: Exchange, partition: Partition,
        dtype: torch.dtype, reduction: GradientReduction, tiers: Tiers | None = None,
        cuts: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.params, self.layout, self.exchange = list(params), layout, exchange
        self.partition, self.dtype = partition, dtype
        self.reduction: GradientReduction = reduction
        self._tiers = tiers
        self._away: Elsewhere | None = None
        if tiers is not None and tiers.is_away("gradients"):
            self._away = tiers.store("gradients", torch.float32, cuts).all()
        self.carried = {
            name: torch.zeros(layout.numel, dtype=torch.float32, device=params[0].device)
            for name in exchange.carries
        }
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
        """Every parameter's gradient has been taken."""
        return len(self._taken) == len(self.params)

    @property
    def is_under_way(self) -> bool:
        """Started and not finished."""
        return self._work is not None

    def is_done(self) -> bool:
        """Under way, and :meth:`finish` would not wait."""
        return self._work is not None and self._work.is_done()

    def take(self, index: int) -> None:
        """Moves a parameter's ``.grad`` into the buffer."""
        param = self.params[index]
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
        view = self._view(self.filling, index)
        if index in self._taken:  # it came in two pieces, as from a checkpointed region
            view.add_(grad)
        else:
            view.copy_(grad)
        self._taken.add(index)
        param.grad = None

    def start(self) -> None:
        """Sends the buffer: gradients that have not been taken yet, zeros where there are none."""
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.take(index)
        if self.filling is None:
            device = self.params[0].device
            self.filling = torch.zeros(self.layout.numel, dtype=self.dtype, device=device)
        else:
            for index in set(range(len(self.params))) - self._taken:
                self._view(self.filling, index).zero_()
        self.held |= self._taken
        self._output = self.filling
        if self.partition.states:
            self._output = self.filling[self.layout.part(self.exchange.rank)]
        if self.partition.gradients:
            self._output = torch.empty_like(self._output)
        self._work = self.exchange.reduce(self._output, self.filling, self.reduction, self.carried)

    def finish(self) -> None:
        """Waits for what is under way, if it is, and adds it to what was reduced before."""
        if self._work is None or self._output is None:
            return
        self._work.wait()
        new = self._output.float()
        self.drop_filling()
        if self._tiers is None or self._away is None:
            self.reduced = new if self.reduced is None else self.reduced.add_(new)
            return
        if self.reduced is not None:  # never added up where a copy may be under way
            before = torch.empty_like(new)
            self._tiers.bring(self._away.stored, before)
            new = before.add_(new)
        self._tiers.send(self._away.stored, new)
        self.reduced = self._away

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
        for index in list(self.shown):
            if not self.forget_replaced(index):
                self.params[index].grad = None
        self.shown = {}
        is_part_of_all = self.partition.states and not self.partition.gradients
        if is_part_of_all and self.reduced is not None:
            self.reduced = self.reduced.clone()  # alone, so that the whole buffer is freed

    def is_replaced(self, index: int) -> bool:
        """A person put something else, or nothing, in the place of a shown gradient."""
        shown = self.shown.get(index)
        return shown is not None and self.params[index].grad is not shown

    def forget_replaced(self, index: int) -> bool:
        """Forgets a shown gradient that was replaced; True if so."""
        if not self.is_replaced(index):
            return False
        self.gradient(index).zero_()
        del self.shown[index]
        self.held.discard(index)
        return True

    def show(self, index: int) -> None:
        """Puts the reduced gradient into ``.grad``, or what stands for it."""
        if index in self.shown:
            return
        param = self.params[index]
        if not self.partition.states:
            assert self.reduced is not None
            self.shown[index] = self._view(self.reduced, index)
        else:
            self.shown[index] = self._stand_ins.setdefault(index, Partitioned(param))
        param.grad = self.shown[index]

    def show_held(self) -> None:
        """Shows what this rank has contributed to."""
        for index in self.held:
            self.show(index)

    def gradient(self, index: int) -> Tensor:
        """This rank's piece of a reduced gradient, 1-dim; where states are whole all of it."""
        assert self.reduced is not None
        if not self.partition.states:
            return self._view(self.reduced, index)
        piece = self.layout.piece(index, self.exchange.rank)
        return self.reduced[piece.start : piece.start + piece.numel]

    def carried_of(self, index: int) -> dict[str, Tensor]:
        """What the exchange carries of a parameter, in its shape."""
        return {name: self._view(buffer, index) for name, buffer in self.carried.items()}

    def _view(self, buffer: Tensor, index: int) -> Tensor:
        return buffer[self.layout.place(index)].view(self.params[index].shape)
