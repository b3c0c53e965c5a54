"""How does a forward find another function where it names one of its file?

transformers has no place for another rope function, nor for another attention that leaves the
config alone. So a fused module runs the forward of its class with names changed: where it names a
function of its file, it finds ours, which stands in the file's globals next to it under a name of
its own. All other names stay what they are, and are found when they are called.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import nn

from anychip.fusion.fused import Args, Candidate, Forward, Fusion, Named, fusion_of, own_class


class _Place(threading.local):
    """Which fused module a thread is in, for functions that are not told.

    Attributes:
        owner: its ``id``.
        given: its arguments.
    """

    owner: int = 0
    given: Args = ()


place = _Place()


class Swap(Candidate):
    """A function that a forward calls, with ours in its place. A module may have several.

    Attributes:
        around: makes what the forward runs in; one of a module's has it.
    """

    around: ClassVar[type[AbstractContextManager[Any]] | None] = None

    def onto(self, module: nn.Module) -> object:
        known = fusion_of(module)
        mine = known.swaps if isinstance(known, Swapped) else ()
        return Swapped((*mine, self)).onto(module)

    def put_into(self, file: dict[str, Any]) -> dict[str, str]:
        """Puts ours into a file; returns its name there by that of the file's own."""
        return {}


@dataclass(frozen=True)
class Swapped(Fusion):
    """A forward with swaps."""

    swaps: tuple[Swap, ...]

    def count(self) -> int:
        return len(self.swaps)

    def rewritten(self, forward: Forward) -> Forward:
        ours: dict[str, str] = {}
        for swap in self.swaps:
            ours |= swap.put_into(getattr(forward, "__globals__", {}))
        return renamed(forward, ours) if ours else forward

    def run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Named) -> Any:
        before = place.owner, place.given
        place.owner, place.given = id(module), (*args, *kwargs.values())
        try:
            with next((each.around for each in self.swaps if each.around), nullcontext)():
                return forward(module, *args, **kwargs)
        finally:
            place.owner, place.given = before


def renamed(forward: Forward, names: Named) -> Forward:
    """A function with the same globals in which some names are others."""
    assert isinstance(forward, FunctionType)
    own, code = forward, forward.__code__
    code = code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))
    made = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    made.__module__, made.__qualname__ = own.__module__, own.__qualname__
    return made


def can_be_renamed(module: nn.Module) -> bool:
    """Whether names in a module's forward can be changed: in a decorator's they cannot."""
    forward = own_class(module).forward
    return isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")


def calls(module: nn.Module, name: str, *, deeply: bool = False) -> bool:
    """Whether the forward of a module's class names a function; no attribute of the module counts.

    A superclass's forward that it calls is not looked into.

    Args:
        deeply: looks into the methods of its class that the forward calls as well.
    """
    own = own_class(module)
    named = names_in(own.forward)
    if deeply:
        named = named.union(*(names_in(vars(own).get(called)) for called in named))
    return not hasattr(module, name) and name in named


def names_in(function: Any) -> set[str]:
    """Names in a function's code; none when it has no code of Python."""
    code = function
    if callable(function):
        code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names}.union(*map(names_in, code.co_consts))
