"""How is a module made to call an operator, and stay what it is?

Its class becomes a subclass of its class whose ``forward`` is another one, and the class is given
back to undo it. The module, its parameters, buffers, hooks, mode and attributes are not touched at
all: the state dict, tied weights, handles of hooks, ``isinstance`` and optimizers that hold the
parameters go on as before.
"""

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anychip.contract import FallbackError, OperatorTable, Row
from anychip.dispatch import selection
from anychip.dispatch.selection import Provider
from anychip.dispatch.tally import ProvenanceRow, new_tally, unserved
from anychip.fusion.probe import Comparison, is_probing, likeness

Forward = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that operators take; a call with another one is served by the model's own code."""
_MODEL = Provider("the model's own code", None, None, OperatorTable())


class StandIn:
    """What serves calls by operators, in the place of a module or of a function that it calls.

    Subclasses are frozen dataclasses: they are pickled, and of equal ones one is proved.

    Attributes:
        kind: norm, activation, rope, attention or loss; "" for one that no report counts.
        operator: the operator's name.
        unless: when the model's own code serves a call, for people.
        outermost: it takes any forward; another one takes the function of a class.
    """

    kind: str
    operator: str
    unless: str
    outermost: ClassVar[bool] = False

    def unfit(self, module: nn.Module) -> str | None:
        """What forbids it, whatever the module computes."""
        if "forward" in vars(module):
            return "its forward was replaced on the instance, which a class cannot change"
        for name in ("__reduce_ex__", "__reduce__"):
            if getattr(own_class(module), name) is not getattr(object, name):
                return "its class has a way of its own to be copied and pickled"
        return None

    def subject(self, module: nn.Module) -> Any:
        """What it is proved of: one proof serves all modules for which this is equal."""
        return likeness(module)

    def comparisons(self, module: Any) -> Iterator[Comparison]:
        """Its proof."""
        return iter(())

    def idle(self, module: nn.Module) -> list[nn.Module]:
        """Children whose work the operator does, and which are called no more."""
        return []

    def around(self, forward: Forward) -> Forward:
        """A forward of the class, with this in its place."""
        return forward

    def onto(self, module: nn.Module) -> object:
        """From now on it stands there. Returns what makes its calls."""
        every = sorted((*stand_ins_of(module), self), key=lambda each: each.outermost)
        module.__class__ = fused_class(own_class(module), tuple(every))
        return module


def stand_ins_of(module: nn.Module) -> tuple[StandIn, ...]:
    """How a module was fused, if it was."""
    found: tuple[StandIn, ...] = getattr(type(module), "anychip_stand_ins", ())
    return found


def own_class(module: nn.Module) -> Any:
    """The class that a module has, or had before it was fused."""
    return type(module).__bases__[0] if stand_ins_of(module) else type(module)


def autocast_is_on(x: Tensor) -> bool:
    """Whether torch changes dtypes of calls on this tensor's device."""
    return torch.is_autocast_enabled(x.device.type)


@functools.cache
def fused_class(original: Any, stand_ins: tuple[StandIn, ...]) -> Any:
    """The subclass of a module's class; there is one of each in a process."""
    inner = original.forward
    for each in stand_ins:
        inner = each.around(inner)

    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # The class has no name under which it could be found: it is made again where it is loaded.
        parts: Any = object.__reduce_ex__(self, protocol)
        return (_empty_module, (original, stand_ins), *parts[2:])

    body = {"forward": forward, "__reduce_ex__": reduce_ex, "anychip_stand_ins": stand_ins}
    body |= {"__doc__": original.__doc__, "__module__": original.__module__}
    return type(original)(f"Fused{original.__name__}", (original,), body)


def _empty_module(original: Any, stand_ins: tuple[StandIn, ...]) -> Any:
    kind = fused_class(original, stand_ins)
    return kind.__new__(kind)


_own_calls: dict[int, Counter[ProvenanceRow]] = {}
_lock = threading.Lock()


def own_code(operator: str, label: str, why: str, owner: int) -> bool:
    """Counts a call that the model's own code serves, in ``anychip.provenance()`` and its report.

    Compiled code counts it once, when it is compiled; it can hand over texts and numbers only.

    Args:
        label: of the function that serves the call.
        owner: ``id`` of the module that makes it, or of its loss.

    Raises:
        FallbackError: the policy is ``strict``.
    """
    if is_probing():
        return True
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


# As dispatch/operator.py does: torch.compiler.assume_constant_result imports the whole compiler.
own_code._dynamo_marked_constant = True  # type: ignore[attr-defined]


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


def label_of(function: Forward) -> str:
    """Module and name of a function, as the provenance shows it and people know it."""
    label = f"{function.__module__}.{function.__qualname__}"
    return label.replace("torch._C._nn.", "torch.nn.functional.")
