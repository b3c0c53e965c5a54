"""How rows are declared, and how a table is made of them.

A native row is a function whose first argument is the :class:`~anychip_cuda.native.Kernels` that
it calls. It is declared once; :func:`make_table` binds it, to the device's kernels or, in tests, to
the same kernels compiled for the host.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from anychip.contract import OperatorTable
from anychip_cuda.native import Kernels

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
Needs = tuple[bool, ...]
F = TypeVar("F", bound=Callable[..., Any])


class _Declared(NamedTuple):
    operator: str
    direction: str
    function: Callable[..., Any]
    conditions: dict[str, Any]
    native: bool


_rows: list[_Declared] = []


def native_row(operator: str, direction: str, **conditions: Any) -> Callable[[F], F]:
    """Declares ``f(kernels, *arguments, **attributes)`` as a row; conditions as of ``Row``."""

    def declare(function: F) -> F:
        given = {"dtypes": FLOATS, **conditions}
        _rows.append(_Declared(operator, direction, function, given, True))
        return function

    return declare


def mapped_row(operator: str, direction: str, **conditions: Any) -> Callable[[F], F]:
    """Declares a row that calls what torch brings, and no kernel of ours."""

    def declare(function: F) -> F:
        given = {"dtypes": FLOATS, "kind": "mapped", **conditions}
        _rows.append(_Declared(operator, direction, function, given, False))
        return function

    return declare


def make_table(kernels: Kernels | None, *, mapped: bool = True) -> OperatorTable:
    """The rows in the order of their declaration.

    Args:
        kernels: what native rows call; None leaves them out.
        mapped: with the mapped rows, which need torch's own support of the device.
    """
    table = OperatorTable()
    for row in _rows:
        function = row.function
        if row.native:
            if kernels is None:
                continue
            function = _bound(function, kernels)
        elif not mapped:
            continue
        add = table.forward if row.direction == "forward" else table.backward
        add(row.operator, **row.conditions)(function)
    return table


def _bound(function: Callable[..., Any], kernels: Kernels) -> Callable[..., Any]:
    bound = partial(function, kernels)
    # Provenance and error messages name the function that was written.
    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(bound, name, getattr(function, name))
    return bound
