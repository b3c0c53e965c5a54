"""The rules of in-place operators: no overlap, nothing written twice, every write seen."""

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
    spans = []
    for index, arg in enumerate(args):
        tensors = [arg] if isinstance(arg, Tensor) else arg or ()
        for entry, tensor in enumerate(tensors):
            label = names[index] if isinstance(arg, Tensor) else f"{names[index]}[{entry}]"
            if index in written:
                _refuse_written(operator, label, tensor)
            if tensor.numel():
                start = tensor.data_ptr()
                spans.append((start, start + _extent(tensor), index in written, label))
    spans.sort()
    _refuse_crossing(operator, spans)


def _refuse_crossing(operator: str, spans: Sequence[tuple[int, int, bool, str]]) -> None:
    reach: dict[bool, tuple[int, str]] = {}
    for start, end, is_written, label in spans:
        # A written span may cross nothing; a read one may cross other reads.
        for other_written in (True, False) if is_written else (True,):
            far, other = reach.get(other_written, (0, ""))
            if start < far:
                raise OverlapError(
                    f"{operator}: {other} and {label} share memory, and one of them is written; "
                    "pass each tensor once, or a copy. Nothing was written"
                )
        if end > reach.get(is_written, (0, ""))[0]:
            reach[is_written] = (end, label)


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
