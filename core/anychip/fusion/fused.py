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
from anychip.dispatch.operator import Operator
from anychip.dispatch.selection import Provider
from anychip.dispatch.tally import new_tally

AnyOperator = Operator[..., Any]
Call = Callable[[AnyOperator, tuple[Any, ...], Mapping[str, Any]], Any]
Forward = Callable[..., Any]
Args = tuple[Any, ...]
Named = Mapping[str, Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that operators take; a call with another one is served by the model's own code."""
HOST = torch.device("cpu")

PROVIDER = "the model's own code"
_MODEL = Provider(PROVIDER, None, None, OperatorTable())
OwnCalls = Counter[tuple[str, str, str]]
"""How often the model's own code served a call, by operator, function and reason."""
_own_calls: dict[int, OwnCalls] = {}


class _Place(threading.local):
    """Which fused attention a thread is in, for functions that are not told.

    Attributes:
        owner: its ``id``.
        tables: cos and sin as a fused module has made them, among its arguments.
        version: how often these two were written to before it was called.
    """

    def __init__(self) -> None:
        self.owner, self.version = 0, 0
        self.tables: tuple[Any, ...] = ()


place = _Place()
_lock = threading.Lock()


class Fusion(ABC):
    """How an operator stands for a module. Subclasses are frozen dataclasses: they are pickled.

    Attributes:
        kind: norm, activation, rope, attention or loss.
        operator: the operator's name.
        unless: when the module's own code serves a call, for people.
    """

    kind: ClassVar[str]
    unless: ClassVar[str]
    operator: str

    @property
    def count(self) -> int:
        """How many replacements of a report it is."""
        return 1

    def rewritten(self, forward: Forward) -> Forward:
        """The class's ``anychip_rewritten``, which ``run`` may call: its forward, changed once."""
        return forward

    def bystanders(self, module: nn.Module) -> list[nn.Module]:
        """Children whose work the operator does, and which are called no more."""
        return []

    @abstractmethod
    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        """A call of the fused module; ``forward`` is the function of its own class."""


class Computed(Fusion):
    """A module whose whole result operators compute. That they do is proved by a probe."""

    takes: ClassVar[int] = 1

    @abstractmethod
    def samples(self, module: Any) -> Iterator[dict[str, Tensor]]:
        """Arguments that the probe calls it with, under names of their own."""

    def stand_ins(self) -> dict[str, nn.Module]:
        """Children that the probe puts in the place of the module's."""
        return {}

    @abstractmethod
    def compute(self, module: Any, call: Call, *args: Any) -> Tensor | str:
        """The result, by operators called by ``call``; or why they cannot serve such a call."""

    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        given = (*args, *(kwargs[name] for name in sorted(kwargs)))  # input, target
        made: Tensor | str = f"{len(given)} arguments"
        if len(given) == self.takes:
            made = self.compute(module, call_operator, *given)
        if not isinstance(made, str):
            return made
        own_code(self.operator, label_of(forward), made, id(module))
        return forward(module, *args, **kwargs)


def call_operator(operator: AnyOperator, args: tuple[Any, ...], attrs: Mapping[str, Any]) -> Any:
    """The operator itself, as its users call it."""
    return operator(*args, **attrs)


def label_of(function: Callable[..., Any]) -> str:
    """Module and name of a function, as the provenance shows it."""
    return f"{function.__module__}.{function.__qualname__}"


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
    new_tally(_row(operator, label), _MODEL, why).tick()
    with _lock:
        if owner in _own_calls:
            _own_calls[owner][operator, label, why] += 1
    return True


def own_calls(owner: object) -> OwnCalls:
    """What :func:`own_code` counts from now on for a module or a loss; a copy of it is another."""
    found = _own_calls.get(id(owner))
    if found is None:
        found = _own_calls[id(owner)] = Counter()
        weakref.finalize(owner, _own_calls.pop, id(owner), None)
    return found


@functools.cache
def _row(operator: str, label: str) -> Row:
    """A row for the counts alone, which names a function of the model."""

    def function() -> None:
        raise AssertionError("dispatch never takes this row")

    function.__module__, _, function.__qualname__ = label.partition(".")
    return Row(operator=operator, direction="forward", function=function, kind="reference")


def autocast_is_on(x: Tensor) -> bool:
    """Whether torch changes dtypes of calls on this tensor's device."""
    return torch.is_autocast_enabled(x.device.type)


def fusion_of(module: nn.Module) -> Fusion | None:
    """How a module was fused, if it was."""
    found = getattr(type(module), "anychip_fusion", None)
    return found if isinstance(found, Fusion) else None


def class_name(module: nn.Module) -> str:
    """The name of a module's own class."""
    return own_class(module).__name__


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has, or had before it was fused."""
    kind: Any = type(module)
    own: type[nn.Module] = kind if fusion_of(module) is None else kind.__bases__[0]
    return own


def why_not(module: nn.Module) -> str | None:
    """What forbids to change the class of a module; None when nothing does."""
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which a class cannot change"
    kind = own_class(module)
    if kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__:
        return "its class has a way of its own to be copied and pickled"
    return None


def fuse_module(module: nn.Module, fusion: Fusion) -> None:
    """From now on the module is computed as ``fusion`` says, whatever it was before."""
    kind: Any = own_class(module)
    module.__class__ = fused_class(kind, fusion)


@functools.cache
def fused_class(original: Any, fusion: Fusion) -> Any:
    """The subclass of a module's class; there is one of each in a process."""
    own_forward = original.forward

    @functools.wraps(own_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return fusion.run(self, own_forward, args, kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # The class has no name under which it could be found: it is made again where it is loaded.
        parts: Any = object.__reduce_ex__(self, protocol)
        return (_empty_module, (original, fusion), *parts[2:])

    body = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__reduce_ex__": reduce_ex,
        "anychip_fusion": fusion,
        "anychip_rewritten": fusion.rewritten(own_forward),
        "forward": forward,
    }
    return type(original)(f"Fused{original.__name__}", (original,), body)


def _empty_module(original: Any, fusion: Fusion) -> Any:
    kind = fused_class(original, fusion)
    return kind.__new__(kind)
