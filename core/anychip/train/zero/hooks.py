"""When are weights whole? From before a unit's modules run until nothing needs them any more.

Hooks on the modules of units emit the actions UNSHARD and RESHARD:

===================================  ============================================================
before forward                       UNSHARD; ahead: those that came next the last time
after forward                        RESHARD, but the root and the last one, which backward begins
                                     with
gradient of an output, in backward   UNSHARD; ahead: those that came next the last time
all gradients of parameters and      RESHARD
inputs
end of backward                      RESHARD of all
===================================  ============================================================

What is ahead is a hint, learned in each pass for the next: a unit that was not gathered ahead is
gathered when it is used, and one that was and is not used is released. Forward that runs within
backward (a checkpoint's recomputation) gathers what it needs, gathers nothing ahead and releases
nothing: backward goes on with the same weights.

Ranks use the same units in the same order. Within a unit they may use different parameters.

What somebody holds (:meth:`UnitHooks.hold`), like a pipeline whose schedule says when weights of a
stage are whole, comes and goes by that alone.

Source: the hooks of FSDP2 (Zhao et al. 2023, arXiv:2304.11277, section 4), with tensor hooks in
place of an autograd function around a module's inputs, so that views stay views.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from anychip.train.zero.reduce_queue import watch
from anychip.train.zero.units import Unit

Action = tuple[str, str]
"""Kind, as in a schedule's text (UNSHARD, RESHARD), and the unit's name."""


class _Ahead:
    """In which order units are used: each pass is the hint for the next."""

    def __init__(self) -> None:
        self._followers: dict[Unit, Unit] = {}
        self.last: Unit | None = None

    def saw(self, unit: Unit) -> None:
        if self.last is not None and self.last is not unit:
            self._followers[self.last] = unit
        self.last = unit

    def begin(self) -> None:
        self.last = None

    def of(self, unit: Unit, num: int) -> Iterator[Unit]:
        for _ in range(num):
            follower = self._followers.get(unit)
            if follower is None:
                return
            unit = follower
            yield unit


class UnitHooks:
    """Gathers and releases the units of one model while it runs.

    Args:
        units: the root last; of several roots, each after its units.
        prefetch: units that are gathered ahead of the one that runs.

    Attributes:
        peak_nbytes: most bytes of whole weights at once, so far.
        passed: called with a unit when a backward has gone past it: what its parameters have no
            gradient of by now this rank has none of.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int) -> None:
        self.units, self.prefetch = list(units), prefetch
        self.peak_nbytes = 0
        self._log: list[Action] | None = None
        self._whole: dict[Unit, None] = {}
        self._forward, self._backward = _Ahead(), _Ahead()
        self._lasts: dict[Unit, Unit | None] = {}
        self._kept: set[Unit] = set()
        self._root_of: dict[Unit, Unit] = {}
        self._seen: set[Unit] = set()
        self._numbers = count()
        self._running: list[tuple[Unit, int]] = []
        self._pending: dict[int, int] = {}
        self._backward_runs = False
        self._begun: list[Unit] = []
        self.passed: Callable[[Unit], None] = lambda unit: None
        self._units_of: dict[Tensor, Unit] = {}
        root = self.units[-1]
        for unit in reversed(self.units):
            root = unit if unit.is_root else root
            self._root_of[unit] = root
        for unit in self.units:
            for module in unit.modules:
                self._register(module, unit)

    def _register(self, module: nn.Module, unit: Unit) -> None:
        this = weakref.ref(self)

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            found = this()
            if found is not None:
                found._before_forward(unit, (args, kwargs))

        def after(_: nn.Module, args: Any, output: Any) -> None:
            found = this()
            if found is not None:
                found._after_forward(unit, output)

        handles = (
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(after),
        )
        for handle in handles:
            weakref.finalize(self, handle.remove).atexit = False

    def watch_also(self, unit: Unit, params: Sequence[Tensor]) -> None:
        """Takes in parameters of a unit that are trained. After whoever takes their gradients."""
        unit.trained |= frozenset(params)
        self._units_of |= dict.fromkeys(params, unit)
        watch(self, params, UnitHooks.arrived)

    # Actions

    def unshard(self, unit: Unit, *, wait: bool = True, exact: bool = False) -> None:
        """UNSHARD, if it is not whole or on its way."""
        if unit not in self._whole:
            self._note("UNSHARD", unit)
            unit.gather(exact=exact)
            self._whole[unit] = None
            self.peak_nbytes = max(self.peak_nbytes, self.whole_nbytes)
        if wait:
            unit.wait()

    def reshard(self, unit: Unit) -> None:
        """RESHARD, if it is whole or on its way, unless somebody keeps it."""
        if unit in self._whole and unit not in self._kept:
            self._note("RESHARD", unit)
            unit.release()
            del self._whole[unit]

    def reshard_all(self) -> None:
        """Every unit."""
        self._seen = set(self._root_of.values())
        self._end_backward()

    def _end_backward(self) -> None:
        """Every unit of the roots that it went through; a checkpoint's is within another."""
        self._go_past(None)
        for unit in self.units:
            if self._root_of[unit] in self._seen:
                self.reshard(unit)
                unit.arrived, unit.uses = set(), set()
        self._backward_runs, self._seen, self._begun = False, set(), []
        self._backward.begin()

    def hold(self, units: Iterable[Unit]) -> None:
        """UNSHARD; they stay whole, whatever runs. Not waited for: who uses one does."""
        for unit in units:
            self._kept.add(unit)
            self.unshard(unit, wait=False)

    def let_go(self, units: Iterable[Unit]) -> None:
        """RESHARD of units that were held."""
        for unit in units:
            self._kept.discard(unit)
            self.reshard(unit)

    def before_update(self) -> None:
        """Every unit: values will be old. What a forward without a backward has left goes too.

        Raises:
            RuntimeError: somebody keeps a unit whole.
        """
        if self._kept:
            raise RuntimeError("the weights change under whole(), where they stay; leave it before")
        self.reset()

    def reset(self) -> None:
        """Every unit, and forgets the forwards whose backward has not been."""
        self.reshard_all()
        self._running, self._pending = [], {}
        for unit in self.units:
            unit.ahead = set()

    @property
    def whole_nbytes(self) -> int:
        """Of weights that are whole or on their way."""
        return sum(unit.nbytes for unit in self._whole)

    @contextmanager
    def kept(self, units: Sequence[Unit]) -> Iterator[None]:
        """These are whole within it, whatever runs, with their exact values."""
        before = set(self._kept)
        for unit in units:
            self.reshard(unit)  # what it has may come of codes
        self._kept |= set(units)
        try:
            for unit in units:
                self.unshard(unit, wait=False, exact=True)
            for unit in units:
                unit.wait()
            yield
        finally:
            self._kept = before
            for unit in units:
                self.reshard(unit)

    @contextmanager
    def recorded(self) -> Iterator[list[Action]]:
        """The actions within it, in order."""
        log: list[Action] = []
        self._log = log
        try:
            yield log
        finally:
            self._log = None

    def _note(self, kind: str, unit: Unit) -> None:
        if self._log is not None:
            self._log.append((kind, unit.name))

    # Forward

    def _before_forward(self, unit: Unit, inputs: Any) -> None:
        if self._backward_runs and not _is_within_backward():
            self.reshard_all()  # that backward ended in an error
        self.unshard(unit, wait=False)
        if not _is_within_backward():
            if unit.is_root:
                self._forward.begin()
            self._forward.saw(unit)
            for other in self._forward.of(unit, self.prefetch):
                self.unshard(other, wait=False)
        unit.wait()
        number = next(self._numbers)
        self._running.append((unit, number))
        if not torch.is_grad_enabled():
            return
        tensors = [tensor for tensor in _tensors(inputs) if tensor.requires_grad]
        self._pending[number] = len(tensors)
        if not _is_within_backward():
            unit.ahead.add(number)
        for tensor in tensors:
            tensor.register_hook(self._call(UnitHooks._input_has_gradient, unit, number))

    def _after_forward(self, unit: Unit, output: Any) -> None:
        number = -1
        while self._running and number < 0:  # others are left of a forward that an error ended
            found, running = self._running.pop()
            number = running if found is unit else -1
        tensors = []
        if torch.is_grad_enabled():
            tensors = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        for tensor in tensors:
            call = self._call(UnitHooks._output_has_gradient, unit, number)
            # Before the node of the output; what follows the output has hooks on the tensor, which
            # come before this: it is released before more is gathered.
            if tensor.grad_fn is None:
                tensor.register_hook(call)
            else:
                tensor.grad_fn.register_prehook(call)
        if not tensors:
            self._pending.pop(number, None)
            unit.ahead.discard(number)
        if _is_within_backward():
            return
        root = self._root_of[unit]
        if not tensors or not (unit is root or unit is self._lasts.get(root)):
            self.reshard(unit)
        if unit is root and tensors:
            self._lasts[root] = self._forward.last

    # Backward

    def _call(
        self, method: Callable[[UnitHooks, Unit, int], None], unit: Unit, number: int
    ) -> Callable[[Any], None]:
        this = weakref.ref(self)

        def call(_: Any) -> None:
            found = this()
            if found is not None:
                method(found, unit, number)

        return call

    def _output_has_gradient(self, unit: Unit, number: int) -> None:
        if not self._backward_runs:
            self._backward_runs = True
            # Also of torch.autograd.grad, which accumulates no gradient.
            Variable._execution_engine.queue_callback(self._end_backward)
        self._seen.add(self._root_of[unit])
        self._go_past(unit)  # before others are waited for, who may wait for that
        self.unshard(unit, wait=False)
        if self._pending.get(number):
            unit.uses.add(number)
        else:
            unit.ahead.discard(number)
        if self._backward.last is not unit:
            self._backward.saw(unit)
            for other in self._backward.of(unit, self.prefetch):
                self.unshard(other, wait=False)
        unit.wait()

    def _input_has_gradient(self, unit: Unit, number: int) -> None:
        self._pending[number] = self._pending.get(number, 0) - 1
        if self._pending[number] <= 0:
            self._pending.pop(number)
            unit.uses.discard(number)
            unit.ahead.discard(number)
            self._end(unit)

    def _go_past(self, unit: Unit | None) -> None:
        """A backward has come to a unit, or its end: what is not used again is behind it."""
        if unit not in self._begun:
            for other in [each for each in self._begun if not (each.ahead or each.uses)]:
                if unit is self._root_of[other]:
                    continue  # the output of both, and only the root's begins there
                self._begun.remove(other)
                self.passed(other)
            if unit is not None and not unit.is_root:
                self._begun.append(unit)

    def arrived(self, param: Tensor) -> None:
        """Called by autograd when a parameter has the gradient of this backward."""
        unit = self._units_of[param]
        if self._backward_runs:  # not what a split backward adds after it
            unit.arrived.add(param)
            self._end(unit)

    def _end(self, unit: Unit) -> None:
        is_over = not unit.uses and unit.trained <= unit.arrived
        if is_over and not unit.is_root:
            self.reshard(unit)


_ENDS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device)


def _is_within_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(values: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Those in containers, and in the attributes of objects, however deep.

    Not in what can be called, like modules, nor in Python's modules, behind which everything is.
    """
    seen = set() if seen is None else seen
    if isinstance(values, Tensor):
        yield values
    is_end = isinstance(values, (*_ENDS, Tensor, ModuleType)) or callable(values)
    if is_end or id(values) in seen:
        return
    seen.add(id(values))
    inner: list[Any] = []
    if isinstance(values, Mapping):
        inner += values.values()
    elif isinstance(values, (tuple, list, set, frozenset)):
        inner += values
    inner += getattr(values, "__dict__", {}).values()
    slots = [getattr(kind, "__slots__", ()) for kind in type(values).__mro__]
    names = [name for each in slots for name in ([each] if isinstance(each, str) else each)]
    inner += [getattr(values, name, None) for name in names]
    for value in inner:
        yield from _tensors(value, seen)
