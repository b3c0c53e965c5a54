"""How does a forward find another function where it calls one?

A function of torch is taken by a mode in which the forward runs. transformers has no place for
another rope function, nor for another attention that leaves the config alone: there the module runs
the forward of its class with a name changed, so that it finds ours, which stands in the file's
globals under a name of its own. All other names stay what they are, found when they are called.
"""

import functools
import inspect
import threading
from collections.abc import Sequence
from types import CodeType, FunctionType
from typing import Any, ClassVar

from torch import nn
from torch.overrides import TorchFunctionMode

from anychip.fusion.stand_ins import Forward, StandIn, label_of, own_class, own_code


class _Place(threading.local):
    """Which fused module a thread is in, for functions that are not told.

    Attributes:
        owner: its ``id``.
        given: its arguments.
    """

    owner: int = 0
    given: tuple[tuple[Any, ...], dict[str, Any]] = (), {}


place = _Place()


def placed(function: Forward) -> Forward:
    """A function whose first argument is a module: within it ``place`` says which."""

    @functools.wraps(function)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        before = place.owner, place.given
        place.owner, place.given = id(module), (args, kwargs)
        try:
            return function(module, *args, **kwargs)
        finally:
            place.owner, place.given = before

    return run


def served(operator: str, theirs: Forward, ours: Forward) -> Forward:
    """A function that a fused module calls, by ours; by itself where ours gives a text, why."""
    label = label_of(theirs)

    def serve(*args: Any, **kwargs: Any) -> Any:
        made = ours(*args, **kwargs)
        if not isinstance(made, str):
            return made
        own_code(operator, label, made, place.owner)
        return theirs(*args, **kwargs)

    return serve


class _Rerouted(TorchFunctionMode):
    """Within it functions of torch are ours. What they call themselves is outside of it."""

    def __init__(self, routes: dict[Any, Forward]) -> None:
        super().__init__()
        self.routes = routes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        found: Any = self.routes.get(func, func)
        return found(*args, **(kwargs or {}))


def rerouted(function: Forward, routes: dict[Any, Forward]) -> Forward:
    """A function within which functions of torch are others."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Rerouted(routes):
            return function(*args, **kwargs)

    return run


class Reroutes(StandIn):
    """Stands for a function of torch that a forward calls itself."""

    routes: ClassVar[dict[Any, Forward]]
    outermost = True

    def around(self, forward: Forward) -> Forward:
        return placed(rerouted(forward, self.routes))


class Renames(StandIn):
    """Stands for what a forward finds in its file.

    Attributes:
        name: under which it does.
    """

    name: str

    def subject(self, module: nn.Module) -> Any:
        return file_of(module)[self.name]

    def replacement(self, original: Any) -> Any:
        """What it shall find."""
        raise NotImplementedError

    def around(self, forward: Forward) -> Forward:
        own: Any = inspect.unwrap(forward)
        ours = "_".join(map(str, ("anychip", self.name, *vars(self).values())))
        own.__globals__[ours] = self.replacement(own.__globals__[self.name])
        names = (ours if name == self.name else name for name in own.__code__.co_names)
        code = own.__code__.replace(co_names=tuple(names))
        made = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, own.__closure__)
        made.__kwdefaults__ = own.__kwdefaults__
        made.__module__, made.__qualname__ = own.__module__, own.__qualname__
        return placed(made)


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
