"""Where rows are declared, and how a table is made of them.

A row that calls kernels of ours is a function whose first argument, ``kernels``, is the
:class:`~anychip_cuda.native.Kernels` that it calls. It is declared once; :func:`make_table` binds
it, to the device's kernels or, in tests, to the same kernels compiled for the host.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from inspect import signature

import torch

from anychip.contract import OperatorTable, Row
from anychip_cuda.native import Kernels

FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16})
Needs = tuple[bool, ...]
declared = OperatorTable(dtypes=FLOATS)


def make_table(kernels: Kernels | None, *, mapped: bool = True) -> OperatorTable:
    """The rows in the order of their declaration.

    Args:
        kernels: what rows of ours call; None leaves them out.
        mapped: with the other rows, which need torch's own support of the device.
    """

    def bound(row: Row) -> Row | None:
        if next(iter(signature(row.function).parameters)) != "kernels":
            return row if mapped else None
        if kernels is None:
            return None
        function = partial(row.function, kernels)
        # Provenance and error messages name the function that was written.
        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(function, name, getattr(row.function, name))
        return replace(row, function=function)

    return declared.remade(bound)
