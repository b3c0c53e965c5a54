"""Where rows are declared, or why there are none, and how a table is made of them.

A row is a function that calls what torch_npu registers with torch: ``torch.ops.npu`` for operators
of the vendor's, torch's own operators for the others. The adapter is reached at the call, never at
the import of a module of rows. What a row calls is declared next to it, so that tests can compare
it with the adapter's schemas, and the documentation's table is made of the rows themselves: in
``Row.calls`` stands each torch operator that it needs, like ``npu::npu_rms_norm`` or ``aten::mm``,
and the functions of CANN that torch_npu calls for it on a 910B, joined by ", ". A row's docstring
cites the vendor's page, and its ``accepts`` are the limits that the vendor states.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from anychip.contract import OperatorTable, Row
from anychip_npu.errors import telling

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
HALVES = frozenset({torch.bfloat16, torch.float16})
Needs = tuple[bool, ...]
declared = OperatorTable(kind="mapped", dtypes=FLOATS)


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


reference_only: list[Unmapped] = []


def left_to_reference(
    operator: str, direction: str = "both", *, part: str = "", reason: str, page: str = ""
) -> None:
    """Declares what is not mapped, in one line for the documentation; see :class:`Unmapped`."""
    reference_only.append(Unmapped(operator, direction, part, reason, page))


def unknown(row: Row) -> list[str]:
    """What a row calls and this torch_npu does not have; empty where none is loaded."""
    if "torch_npu" not in sys.modules:
        return []
    names = [name.partition(".")[0].split("::") for name in row.calls]
    return ["::".join(name) for name in names if not hasattr(getattr(torch.ops, name[0]), name[1])]


def served(row: Row) -> Row | None:
    """A declared row as this torch_npu can serve it, and None where it lacks what the row calls.

    Releases of torch_npu differ in what they register. For such a call the reference serves, and is
    counted; ``anychip doctor npu`` names what is missing.
    """
    if unknown(row):
        return None
    pair = row.paired and row.paired._replace(backward=telling(row.paired.backward))
    return replace(row, function=telling(row.function), paired=pair)
