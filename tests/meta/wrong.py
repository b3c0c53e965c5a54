"""What an entry of the catalogue is: a backend with one plausible bug, and its correct twin."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from anychip.conformance import Level
from anychip.contract import Backend
from anychip.dispatch.signature import Signature
from anychip.operators import all_specs
from tests.meta.honest import HonestBackend, HonestRows, Row, make_table, reference_rows

Change = Callable[..., Any]
Attr = Any
Call = Callable[..., Any]


def with_method(right: type, method: str, change: Change) -> Any:
    """A class in which ``change(self, right, *args)`` is in a method's place."""

    def changed(self: Any, *args: Any, **named: Any) -> Any:
        return change(self, getattr(super(made, self), method), *args, **named)

    made: Any = type(f"{right.__name__}Changed", (right,), {method: changed})
    return made


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """A bug.

    Attributes:
        name: of this entry.
        bug: the class of bugs that it stands for.
        chapter: the chapter that has to find it.
        make: the wrong backend.
        select: a ``-k`` expression, so that a test need not run the whole chapter.
        twin: the correct backend.
        level: of the suite; quick finds all but what more than two ranks or the compiler show.
    """

    name: str
    bug: str
    chapter: str
    make: Callable[[], Backend]
    select: str = ""
    twin: Callable[[], Backend] = HonestBackend
    level: Level = "quick"


def wrong_parts(
    right: type[Backend], name: str, bug: str, select: str, *, chapter: str, **parts: Any
) -> Wrong:
    """A right backend, which is its twin, with some of its parts replaced."""
    return Wrong(
        name=name, bug=bug, chapter=chapter, select=select,
        make=lambda: type(right.__name__, (right,), parts)(), twin=right,
    )  # fmt: skip


def wrong_device(name: str, bug: str, **methods: Any) -> Wrong:
    """The honest backend with some of its methods or attributes replaced."""
    return wrong_parts(HonestBackend, name, bug, "", chapter="device", **methods)


@cache
def right_rows(dtypes: frozenset[torch.dtype]) -> type[Backend]:
    """Rows that are the references, of some types: one class for all who ask."""
    if dtypes == HonestRows.dtypes:
        return HonestRows
    return type("RightRows", (HonestRows,), {"dtypes": dtypes})


def wrong_row(
    name: str, bug: str, *, chapter: str, operator: str, direction: str = "forward",
    select: str | None = None, dtypes: frozenset[torch.dtype] = HonestBackend.dtypes,
) -> Callable[[Change], Wrong]:  # fmt: skip
    """Decorator: ``change(row, *args, **attrs)`` in place of the right ``row(*args, **attrs)``."""

    def backend(rows: dict[tuple[str, str], Row]) -> Backend:
        parts = {"operators": make_table(rows), "dtypes": dtypes}
        made: Backend = type("RowBackend", (HonestBackend,), parts)()
        return made

    def wrap(change: Change) -> Wrong:
        right = reference_rows()

        def wrong(*args: Any, **attrs: Any) -> Any:
            return change(right[operator, direction], *args, **attrs)

        return Wrong(
            name=name, bug=bug, chapter=chapter,
            select=f"/{operator}/" if select is None else select,
            make=lambda: backend({**right, (operator, direction): wrong}),
            twin=right_rows(dtypes),
        )  # fmt: skip

    return wrap


def wrong_arguments(
    name: str, bug: str, operator: str, *, direction: str = "forward", chapter: str = "",
    select: str | None = None, dtypes: frozenset[torch.dtype] = HonestBackend.dtypes,
    **changes: Any,
) -> Wrong:  # fmt: skip
    """The right row with other arguments, or results: by name, each a value or a function of some.

    A backward row's arguments are grad (grad1 and so on for further outputs), and what the spec
    saves. Results are y (y0 and so on of several), and residuals; dx and so on, where needed.
    """
    spec = next(spec for spec in all_specs() if spec.name == operator)
    names, count = Signature.parse(spec).positional, Signature.parse(spec).num_outputs
    outputs = ["y"] if count == 1 else [f"y{number}" for number in range(count)]
    outputs += [residual.name for residual in spec.residuals]
    if direction == "backward":
        names = ("grad", *(f"grad{number}" for number in range(1, count)), *spec.saved)
        outputs = [f"d{name}" for name in spec.differentiable]

    def changed(known: dict[str, Any], which: str) -> Any:
        new = changes.get(which, known[which])
        if which not in changes or not callable(new):
            return new
        return new(*(known[each] for each in inspect.signature(new).parameters))

    def change(row: Row, *args: Any, **attrs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | attrs
        made = {which: changed(given, which) for which in given}
        found = row(*(made[each] for each in names[: len(args)]), **{a: made[a] for a in attrs})
        if not set(outputs) & set(changes):
            return found
        results = [found] if isinstance(found, torch.Tensor) else list(found)
        known = given | dict(zip(outputs, results, strict=True))
        new = [None if known[name] is None else changed(known, name) for name in outputs]
        return new[0] if isinstance(found, torch.Tensor) else tuple(new)

    return wrong_row(
        name, bug, chapter=chapter or ("operators" if direction == "forward" else "gradients"),
        operator=operator, direction=direction, select=select, dtypes=dtypes,
    )(change)  # fmt: skip


wrong_gradients = partial(wrong_arguments, direction="backward")
wrong = partial(wrong_row, chapter="operators")
wrong_backward = partial(wrong_row, chapter="gradients", direction="backward")


def times(x: torch.Tensor, index: Any, factor: float = 0.0) -> torch.Tensor:
    """With the numbers at an index multiplied; by nothing: gone."""
    changed = x.clone()
    changed[index] *= factor
    return changed
