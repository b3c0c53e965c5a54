"""How is a module made to call an operator, and stay what it is?

Its class becomes a subclass of its class whose ``forward`` is another one, and the class is given
back to undo it. The module, its parameters, buffers, hooks, mode and attributes are not touched at
all: the state dict, tied weights, handles of hooks, ``isinstance`` and optimizers that hold the
parameters go on as before.
"""

from __future__ import annotations

import functools
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anychip.contract import FallbackError, OperatorTable, Row
from anychip.dispatch import selection
from anychip.dispatch.selection import Provider
from anychip.dispatch.tally import ProvenanceRow, new_tally, unserved
from anychip.fusion.probe import Comparison, likeness, replica

Forward = Callable[..., Any]
Args = tuple[Any, ...]
Named = Mapping[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that operators take; a call with another one is served by the model's own code."""
_MODEL = Provider("the model's own code", None, None, OperatorTable())
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Candidate(ABC):
    """An operator that may stand for a module, or for a function that it calls.

    Subclasses are frozen dataclasses: they are pickled, and of equal ones one is proved.

    Attributes:
        kind: norm, activation, rope, attention or loss.
        operator: the operator's name.
        unless: when the model's own code serves a call, for people.
    """

    kind: ClassVar[str]
    unless: ClassVar[str]
    operator: str

    def unfit(self, module: nn.Module) -> str | None:
        """What forbids it, whatever the module computes."""
        return why_not(module)

    def subject(self, module: nn.Module) -> Any:
        """What it is proved of: one proof serves all modules for which this is equal."""
        return likeness(module)

    def comparisons(self, module: Any) -> Iterator[Comparison]:
        """Its proof."""
        return iter(())

    @abstractmethod
    def onto(self, module: nn.Module) -> object:
        """From now on it stands there. Returns what makes its calls."""


class Fusion(ABC):
    """What the forward of a fused module is. Subclasses are frozen dataclasses."""

    def count(self) -> int:
        """How many replacements of a report it is."""
        return 1

    def bystanders(self, module: nn.Module) -> list[nn.Module]:
        """Children whose work the operator does, and which are called no more."""
        return []

    def rewritten(self, forward: Forward) -> Forward:
        """What ``run`` gets for the forward of a class."""
        return forward

    @abstractmethod
    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        """A call of the fused module; ``forward`` is the function of its own class."""

    def onto(self, module: nn.Module) -> object:
        """From now on the module is computed like this."""
        module.__class__ = fused_class(own_class(module), self)
        return module


class Computed(Fusion, Candidate):
    """A module whose whole result operators compute."""

    takes: ClassVar[int] = 1
    whole: ClassVar[bool] = False

    def unfit(self, module: nn.Module) -> str | None:
        for child in self.bystanders(module):
            if any(getattr(child, name) for name in _HOOKS):
                return f"hooks of its {type(child).__name__} would no longer be called"
        return super().unfit(module) or wrong_dtype(module)

    @abstractmethod
    def samples(self, module: Any) -> Iterator[dict[str, Tensor]]:
        """Arguments that the probe calls it with, under names of their own."""

    def stand_ins(self) -> dict[str, nn.Module]:
        """Children that the probe puts in the place of the module's."""
        return {}

    def comparisons(self, module: Any) -> Iterator[Comparison]:
        for training in (False, True):
            for args in self.samples(module):
                twin = replica(module, self.stand_ins()).train(training)
                theirs: Any = functools.partial(type(twin).forward, twin)
                ours, named = functools.partial(self.compute, twin), twin.named_parameters()
                yield Comparison(theirs, ours, args, parameters=named, whole=self.whole)

    @abstractmethod
    def compute(self, module: Any, *args: Any) -> Tensor | str:
        """The result, by operators; or why they cannot serve such a call."""

    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        given = (*args, *(kwargs[name] for name in sorted(kwargs)))  # input, target
        made: Tensor | str = f"{len(given)} arguments"
        if len(given) == self.takes:
            made = self.compute(module, *given)
        if not isinstance(made, str):
            return made
        own_code(self.operator, label_of(forward), made, id(module))
        return forward(module, *args, **kwargs)


_own_calls: dict[int, Counter[ProvenanceRow]] = {}
_lock = threading.Lock()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def own_code(operator: str, label: str, why: str, owner: int) -> bool:
    """Counts a call that the model's own code serves, in ``anychip.provenance()`` and its report.

    Compiled code counts it once, when it is compiled; it can hand over texts and numbers only.

    Args:
        label: of the function that serves the call.
        owner: ``id`` of the module that makes it, or of its loss.

    Raises:
        FallbackError: the policy is ``strict``.
    """
    if selection.current.policy.fallback == "strict":
        raise FallbackError(
            f"{operator} cannot serve a call of the fused {label}: {why}. The policy is 'strict', "
            "which forbids the model's own code; change the call, or leave the module out with "
            "anychip.fuse(model, skip=...)"
        )
    row = _row(operator, label)
    new_tally(row, _MODEL, why).tick()
    with _lock:
        if owner in _own_calls:
            _own_calls[owner][unserved(row, _MODEL, why)] += 1
    return True


def own_calls(owner: object) -> Counter[ProvenanceRow]:
    """What :func:`own_code` counts from now on for a module or a loss; a copy of it is another."""
    if id(owner) not in _own_calls:
        _own_calls[id(owner)] = Counter()
        weakref.finalize(owner, _own_calls.pop, id(owner), None)
    return _own_calls[id(owner)]


@functools.cache
def _row(operator: str, label: str) -> Row:
    """A row for the counts alone, which names a function of the model."""

    def function() -> None:
        raise AssertionError("dispatch never takes this row")

    function.__module__, _, function.__qualname__ = label.partition(".")
    return Row(operator=operator, direction="forward", function=function, kind="reference")


def label_of(function: Callable[..., Any]) -> str:
    """Module and name of a function, as the provenance shows it."""
    return f"{function.__module__}.{function.__qualname__}"


def autocast_is_on(x: Tensor) -> bool:
    """Whether torch changes dtypes of calls on this tensor's device."""
    return torch.is_autocast_enabled(x.device.type)


def fusion_of(module: nn.Module) -> Fusion | None:
    """How a module was fused, if it was."""
    found: Fusion | None = getattr(type(module), "anychip_fusion", None)
    return found


def own_class(module: nn.Module) -> Any:
    """The class that a module has, or had before it was fused."""
    return type(module) if fusion_of(module) is None else type(module).__bases__[0]


def why_not(module: nn.Module) -> str | None:
    """What forbids to change the class of a module; None when nothing does."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which a class cannot change"
    kind = own_class(module)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return "its class has a way of its own to be copied and pickled"
    return None


def wrong_dtype(module: nn.Module) -> str | None:
    """Which dtypes of its parameters no operator takes."""
    wrong = {p.dtype for p in module.parameters() if p.dtype not in FLOATS}
    return f"operators take no {', '.join(map(str, wrong))}" if wrong else None


@functools.cache
def fused_class(original: Any, fusion: Fusion) -> Any:
    """The subclass of a module's class; there is one of each in a process."""
    own_forward = fusion.rewritten(original.forward)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fusion.run(self, own_forward, args, kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Args:
        # The class has no name under which it could be found: it is made again where it is loaded.
        parts: Any = object.__reduce_ex__(self, protocol)
        return (_empty_module, (original, fusion), *parts[2:])

    body = {"forward": forward, "__reduce_ex__": reduce_ex, "anychip_fusion": fusion}
    body |= {"__doc__": original.__doc__, "__module__": original.__module__}
    return type(original)(f"Fused{original.__name__}", (original,), body)


def _empty_module(original: Any, fusion: Fusion) -> Any:
    kind = fused_class(original, fusion)
    return kind.__new__(kind)
