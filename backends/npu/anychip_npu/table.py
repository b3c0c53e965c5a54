"""How rows are declared, and how a table is made of them.

A row is a function that calls what torch_npu registers with torch: ``torch.ops.npu`` for operators
of the vendor's, torch's own operators for the others. The adapter is reached at the call, never at
the import of a module of rows. What a row calls is declared next to it, so that tests can compare
it with the adapter's schemas, and the documentation's table is made of the rows themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from anychip.contract import Direction, OperatorTable
from anychip.contract.operator import Pair
from anychip_npu.errors import telling

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALVES = frozenset({torch.bfloat16, torch.float16})
Needs = tuple[bool, ...]
F = TypeVar("F", bound=Callable[..., Any])


class Mapped(NamedTuple):
    """A declared row.

    Attributes:
        calls: each torch operator that the row needs, like ``npu::npu_rms_norm`` or ``aten::mm``,
            to the functions of CANN that torch_npu calls for it on a 910B, joined by ", ".
        conditions: of the row; with ``paired`` it is a forward that brings its backward.
    """

    operator: str
    direction: Direction
    function: Callable[..., Any]
    calls: Mapping[str, str]
    conditions: Mapping[str, Any]

    @property
    def directions(self) -> tuple[str, ...]:
        """Which directions the row serves."""
        return ("forward", "backward") if "paired" in self.conditions else (self.direction,)


class Unmapped(NamedTuple):
    """What is left to the reference, and why: ``page`` is the vendor's, or "" where there is none.

    Attributes:
        direction: forward, backward, or both.
        part: which calls, where others are mapped, like "approximate='none'"; "" for all calls.
    """

    operator: str
    direction: str
    part: str
    reason: str
    page: str


rows: list[Mapped] = []
reference_only: list[Unmapped] = []


def mapped_row(
    operator: str,
    direction: Direction,
    *,
    calls: Mapping[str, str],
    dtypes: frozenset[torch.dtype] = FLOATS,
    supports: Callable[..., bool] | None = None,
    **conditions: Any,
) -> Callable[[F], F]:
    """Declares ``f(*arguments, **attributes)`` as a row; its docstring cites the vendor's page.

    Args:
        calls: as of :class:`Mapped`.
        supports: ``Row.accepts``: the limits of shape, layout and value that the vendor states.
        conditions: others of ``Row``.
    """

    def declare(function: F) -> F:
        given = {"kind": "mapped", "dtypes": dtypes, "accepts": supports, **conditions}
        rows.append(Mapped(operator, direction, function, calls, given))
        return function

    return declare


def mapped_pair(
    operator: str,
    *,
    backward: Callable[..., Any],
    num_residuals: int,
    fake_residuals: Callable[..., Any],
    calls: Mapping[str, str],
    dtypes: frozenset[torch.dtype] = FLOATS,
    supports: Callable[..., bool] | None = None,
) -> Callable[[F], F]:
    """Declares a forward with residuals of its own, and the backward that takes them.

    Args:
        backward, num_residuals, fake_residuals: as of the contract's ``Pair``.
        calls: of both directions.
    """
    pair = Pair(backward, num_residuals, fake_residuals)
    return mapped_row(
        operator, "forward", calls=calls, dtypes=dtypes, supports=supports, paired=pair
    )


def left_to_reference(
    operator: str, direction: str = "both", *, part: str = "", reason: str, page: str = ""
) -> None:
    """Declares what is not mapped, in one line for the documentation; see :class:`Unmapped`."""
    reference_only.append(Unmapped(operator, direction, part, reason, page))


def unknown(row: Mapped) -> list[str]:
    """What a row calls and this torch_npu does not have; empty where none is loaded."""
    if "torch_npu" not in sys.modules:
        return []
    names = [name.partition(".")[0].split("::") for name in row.calls]
    return ["::".join(name) for name in names if not hasattr(getattr(torch.ops, name[0]), name[1])]


def make_table() -> OperatorTable:
    """The rows in the order of their declaration, without those that call what is not there.

    Releases of torch_npu differ in what they register. For such a call the reference serves, and is
    counted; ``anychip doctor npu`` names what is missing.
    """
    table = OperatorTable()
    for row in rows:
        if unknown(row):
            continue
        add = table.forward if row.direction == "forward" else table.backward
        add(row.operator, **row.conditions)(telling(row.function))
    return table
