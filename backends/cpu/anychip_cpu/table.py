"""The host's operator table, which other modules fill, and what they all say of a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from anychip.contract import OperatorTable
from anychip_cpu import native

table = OperatorTable()
FLOATS = {torch.float32, torch.bfloat16, torch.float16}
Needs = tuple[bool, ...]
F = TypeVar("F", bound=Callable[..., Any])


def native_row(operator: str, direction: str, **conditions: Any) -> Callable[[F], F]:
    """Adds a row that calls native kernels, or nothing when they are not there."""
    if native.kernels is None:
        return lambda function: function
    add = table.forward if direction == "forward" else table.backward
    return add(operator, kind="native", dtypes=FLOATS, **conditions)


def has_elements(*tensors: Tensor | None, **_: object) -> bool:
    """Whether every tensor has elements; of those without torch refuses some."""
    return all(t is None or t.numel() for t in tensors)


def address(tensor: Tensor | None) -> int:
    """What a kernel takes for a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(x: Tensor) -> tuple[int, int]:
    """How many rows there are along the last dim, and their width."""
    hidden = x.shape[-1]
    return (x.numel() // hidden if hidden else 0), hidden
