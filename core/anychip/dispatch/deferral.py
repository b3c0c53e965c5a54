"""Which gradients can wait? Those of weights, that an operator can be asked for by a second call.

Within :func:`deferring` the backward of an operator computes what its inputs need, and leaves the
gradients of parameters that its spec calls ``deferrable`` in a queue. What cannot be put off is
computed at once, so that a backward is right whatever it consists of. Outside of it nothing is
different, and nothing is asked but whether a dictionary is empty.

Source: split backward, Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv:2401.10241.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

_LEAF, _CAST = "torch::autograd::AccumulateGrad", "ToCopyBackward0"
_Backward = Callable[..., Sequence[Tensor | None]]
"""Of an operator: given gradients, kept tensors, attributes and what is needed."""
active: dict[int, Deferred] = {}
"""By thread: ranks may be threads of one process."""


class _Call(NamedTuple):
    backward: _Backward
    grads: Sequence[Tensor]
    kept: Sequence[Tensor | None]
    attrs: Mapping[str, Any]
    needs: tuple[bool, ...]


class Deferred:
    """What a backward has put off, in the order in which it came to it.

    Attributes:
        parameters: whose gradients, or parts of them, are in it.
    """

    def __init__(self) -> None:
        self.parameters: set[Tensor] = set()
        self._calls: list[tuple[_Call, dict[int, GradientEdge]]] = []

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def tensors(self) -> list[Tensor]:
        """That are kept for it; parameters among them are read for their shape alone."""
        return [t for call, _ in self._calls for t in (*call.grads, *call.kept) if t is not None]

    def compute(
        self, seen: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ) -> tuple[list[GradientEdge], list[Tensor]]:
        """The gradients, and where in the graph each belongs; empties the queue.

        ``torch.autograd.backward(*deferred.compute())`` adds them to ``.grad``: what belongs to one
        parameter is summed in the order of the queue first, as one backward would have done.

        Args:
            seen: gives what is shown of a tensor, like one of the same shape for a weight that is
                elsewhere by now.
        """
        calls, self._calls = self._calls, []
        edges, gradients = list[GradientEdge](), list[Tensor]()
        with torch.no_grad():
            for call, places in calls:
                kept = [None if t is None else seen(t) for t in call.kept]
                found = call.backward(call.grads, kept, call.attrs, call.needs)
                for index, edge in places.items():
                    gradient = found[index]
                    if gradient is not None:
                        edges.append(edge)
                        gradients.append(gradient)
        return edges, gradients

    def add(self, call: _Call, places: dict[int, GradientEdge]) -> None:
        """Takes in a call, and by their numbers in its results what it is made for."""
        self._calls.append((call, places))
        leaves = (_parameter(edge[0]) for edge in places.values())
        self.parameters |= {leaf for leaf in leaves if leaf is not None}


@contextmanager
def deferring() -> Iterator[Deferred]:
    """Puts off weights' gradients of a backward that this thread runs within it.

    Use ``torch.autograd.grad`` with the parameters among its inputs: it gives None for what was put
    off, while a backward that accumulates calls hooks of parameters whose gradient is not there.
    What is to be differentiated again (``create_graph``) are not put off.
    """
    mine, deferred = threading.get_ident(), Deferred()
    before = active.get(mine)
    active[mine] = deferred
    try:
        # Backward of another device would run on a thread of autograd's own.
        with torch.autograd.set_multithreading_enabled(False):
            yield deferred
    finally:
        if before is None:
            del active[mine]
        else:
            active[mine] = before


def backward(
    ctx: Any, first: int, gradient: Any, pair: Any, grads: Sequence[Tensor],
    kept: Sequence[Tensor | None], attrs: Mapping[str, Any], needs: tuple[bool, ...],
) -> Sequence[Tensor | None]:  # fmt: skip
    """The gradients that are asked for, with None for what this thread puts off.

    Args:
        ctx: of the node; the first argument of the operator is its input number ``first``.
        gradient: the operator's :class:`~anychip.dispatch.autograd.Gradient`, whose backward takes
            what follows.
    """
    deferred, call, spec = active.get(threading.get_ident()), gradient.backward, gradient.spec
    found: Sequence[Tensor | None] = [None] * len(needs)
    if deferred is not None and not torch.is_grad_enabled():
        edges = _edges(ctx)
        waiting = {
            index: GradientEdge(*edges[first + place])
            for index, (name, place) in enumerate(
                zip(spec.differentiable, gradient.differentiable, strict=True)
            )
            if needs[index]
            and name in spec.deferrable
            and _parameter(edges[first + place][0]) is not None
        }
        if waiting:
            later = tuple(i in waiting for i in range(len(needs)))
            deferred.add(_Call(partial(call, pair), grads, kept, attrs, later), waiting)
            needs = tuple(need and index not in waiting for index, need in enumerate(needs))
    if any(needs):
        found = call(pair, grads, kept, attrs, needs)
    return found


def _edges(ctx: Any) -> dict[int, tuple[Any, int]]:
    """Number of an input that requires a gradient to where that goes."""
    edges = (edge for edge in ctx.next_functions if edge[0] is not None)
    numbers = (number for number, need in enumerate(ctx.needs_input_grad) if need)
    return dict(zip(numbers, edges, strict=True))


def _parameter(node: Any) -> Tensor | None:
    """The parameter whose gradient a node adds up, at once or behind the cast of autocast."""
    if node.name() == _CAST:
        node = node.next_functions[0][0]
    if node is None or node.name() != _LEAF:
        return None
    # A leaf may be the input of a part of a model, whose gradient is waited for.
    return node.variable if isinstance(node.variable, nn.Parameter) else None
