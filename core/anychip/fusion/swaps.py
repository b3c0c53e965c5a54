"""How does a forward find another function where it calls one?

A function of torch is taken by a mode in which the forward runs. transformers has no place for
another rope function, nor for another attention that leaves the config alone: there the module runs
the forward of its class with names changed, so that it finds ours, which stands in the file's
globals under a name of its own. All other names stay what they are, found when they are called.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import nn
from torch.overrides import TorchFunctionMode

from anychip.fusion.stand_ins import Forward, StandIn, own_class, wrong_dtype


class Rerouted(TorchFunctionMode):
    """Within it functions of torch are ours. What they call themselves is outside of it."""

    def __init__(self, routes: dict[Any, Forward]) -> None:
        super().__init__()
        self.routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return self.routes.get(func, func)(*args, **(kwargs or {}))


class CallsTorch(StandIn):
    """A forward that calls a function of torch itself.

    Attributes:
        routes: what it calls instead.
    """

    routes: ClassVar[dict[Any, Forward]]
    inside = outermost = True

    def unfit(self, module: nn.Module) -> str | None:
        return super().unfit(module) or wrong_dtype(module)

    def around(self, forward: Forward) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            with Rerouted(self.routes):
                return forward(*args, **kwargs)

        return run


def renamed(forward: Forward, name: str, ours: str) -> Forward:
    """A function with the same globals in which a name is another one."""
    assert isinstance(forward, FunctionType)
    own, code = forward, forward.__code__
    code = code.replace(co_names=tuple(ours if n == name else n for n in code.co_names))
    made = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__ = own.__kwdefaults__
    made.__module__, made.__qualname__ = own.__module__, own.__qualname__
    return made


def can_be_renamed(module: nn.Module) -> bool:
    """Whether names in a module's forward can be changed: in a decorator's they cannot."""
    forward = own_class(module).forward
    return isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__")


def file_of(module: nn.Module) -> dict[str, Any]:
    """The globals of the file that a module's forward is in."""
    found: dict[str, Any] = getattr(inspect.unwrap(own_class(module).forward), "__globals__", {})
    return found


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
