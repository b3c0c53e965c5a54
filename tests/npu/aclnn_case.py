"""A call that reaches rows of the emulator's operator table.

A case has the rows that it must reach, a function of tensors, the shapes of its float inputs and,
where torch on a CPU has no such function, a reference. Both are run on float64 copies too.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """One call. ``rows``, and those of ``backward``, are named without their prefix.

    ``shapes`` are of normal numbers; ``low`` shifts their absolute value above it.
    ``units`` bounds the error, in units of the dtype's epsilon and the largest reference value.
    """

    rows: str
    call: Function
    shapes: tuple[tuple[int, ...], ...] = ((3, 5),)
    reference: Function | None = None
    backward: str = ""
    dtypes: tuple[torch.dtype, ...] = FLOATS
    low: float | None = None
    units: float = 8
    extra: tuple[torch.Tensor, ...] = field(default=())

    @property
    def name(self) -> str:
        """The first row."""
        return self.rows.split()[0]

    @property
    def functions(self) -> list[str]:
        """CANN's functions of all rows."""
        return [f"aclnn{row}" for row in f"{self.rows} {self.backward}".split()]


def torch_npu() -> Any:
    """The adapter, which is imported only when a case runs."""
    return importlib.import_module("torch_npu")
