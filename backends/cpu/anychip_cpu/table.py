"""Where the host's rows are declared, and what they all say."""

from __future__ import annotations

import torch
from torch import Tensor

from anychip.contract import OperatorTable

FLOATS = {torch.float32, torch.bfloat16, torch.float16}
Needs = tuple[bool, ...]
declared = OperatorTable(dtypes=FLOATS)


def has_elements(*tensors: Tensor | None, **_: object) -> bool:
    """Whether every tensor has elements; of those without torch refuses some."""
    return all(t is None or t.numel() for t in tensors)


def address(tensor: Tensor | None) -> int:
    """What a kernel takes for a tensor; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def rows_of(x: Tensor) -> tuple[int, int]:
    """How many rows there are along the last dim, and their width; a 0-dim tensor is one of 1.

    Rows of no numbers are rows too: they have statistics.
    """
    return x.shape[:-1].numel(), x.shape[-1] if x.dim() else 1


def have_one_dtype(one: Tensor, other: Tensor, *_: object, **__: object) -> bool:
    """Whether two tensors have the same dtype."""
    return one.dtype == other.dtype


def wanted(need: bool, like: Tensor) -> tuple[Tensor | None, int]:
    """A gradient to be written and its address; (None, 0) when it is not wanted."""
    if not need:
        return None, 0
    made = torch.empty_like(like, memory_format=torch.contiguous_format)
    return made, made.data_ptr()
