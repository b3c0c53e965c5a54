"""The rules of in-place operators: no overlap, nothing written twice, every write seen."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from anychip.contract import OverlapError


def tensors_of(args: Sequence[Any], indices: Iterable[int]) -> list[Tensor]:
    """The tensors among some of the arguments, lists flattened, None left out."""
    found: list[Tensor] = []
    for index in indices:
        arg = args[index]
        if isinstance(arg, Tensor):
            found.append(arg)
        elif arg is not None:
            found.extend(arg)
    return found


def refuse_overlap(
    operator: str, names: Sequence[str], args: Sequence[Any], written: Sequence[int]
) -> None:
    """Raises before any write when a written tensor shares memory with another argument.

    Two strided views whose address ranges cross are refused even if no element is shared, since
    that cannot be shown cheaply.

    Raises:
        OverlapError: names the two arguments.
        RuntimeError: a written tensor is part of a graph that autograd is recording.
    """
    # Tensors are many, and mistakes few: only an error has words.
    spans: list[tuple[int, int, bool, int, int]] = []
    for index, arg in enumerate(args):
        is_written = index in written
        for entry, tensor in enumerate((arg,) if isinstance(arg, Tensor) else arg or ()):
            is_dense = tensor.is_contiguous()
            if is_written and not (is_dense and tensor.grad_fn is None):
                _refuse_written(operator, _label(names, args, index, entry), tensor)
            if nbytes := tensor.nbytes:
                start = tensor.data_ptr()
                end = start + (nbytes if is_dense else _extent(tensor))
                spans.append((start, end, is_written, index, entry))
    spans.sort()
    if all(one[1] <= other[0] for one, other in itertools.pairwise(spans)):
        return  # as nearly always
    # A read span may cross other reads. The furthest of each: read, written.
    far = [(0, 0, False, 0, 0)] * 2
    for span in spans:
        start, end, is_written, _, _ = span
        other = far[1] if start < far[1][1] else far[0]
        if start < other[1] and (is_written or other[2]):
            one, two = (_label(names, args, *place) for place in (other[3:], span[3:]))
            raise OverlapError(
                f"{operator}: {one} and {two} share memory, and one of them is written; "
                "pass each tensor once, or a copy. Nothing was written"
            )
        if end > far[is_written][1]:
            far[is_written] = span


def _label(names: Sequence[str], args: Sequence[Any], index: int, entry: int) -> str:
    return names[index] if isinstance(args[index], Tensor) else f"{names[index]}[{entry}]"


def _refuse_written(operator: str, label: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
        raise OverlapError(
            f"{operator}: several entries of {label} (shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}) are one place in memory, and it is written. Nothing was written"
        )
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        raise RuntimeError(
            f"{operator} writes {label} in place, which autograd could not see: it is the result "
            "of a recorded operation. Call it under torch.no_grad() or pass a detached tensor"
        )


def _extent(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def bump_versions(tensors: Iterable[Tensor]) -> None:
    """Tells autograd that the tensors were written, so that a stale saved tensor is an error."""
    torch.autograd.graph.increment_version(tensors)
