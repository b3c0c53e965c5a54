"""What is timed: one operator at one size, and torch's own way to the same result."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from anychip.contract import SampleMaker


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One operator at one size, and others' ways to do the same.

    Attributes:
        args, attrs: of the call.
        eager: torch's own way, if there is one.
        peers: further ways by name; called as the operator is.
    """

    args: tuple[Any, ...]
    attrs: Mapping[str, Any]
    eager: Callable[..., Any] | None
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


Make = Callable[[SampleMaker], Case]
_added: dict[str, Make] = {}


def case(operator: str) -> Callable[[Make], Make]:
    """Decorator: the function makes the case of a third party's operator, at a training size."""

    def add(make: Make) -> Make:
        _added[operator] = make
        return make

    return add


def added_cases() -> Mapping[str, Make]:
    """The cases of third parties by operator, in the order in which they were added."""
    return dict(_added)
