"""Rows in groups one after the other, given by where the groups end: what such numbers must be.

And how a host reads them, for kernels that want them there.
"""

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from anychip.contract import HOST
from anychip.operators.values import has_values

T = TypeVar("T")


def refuse_unsorted(
    operator: str, name: str, ends: Tensor, count: int, *, starts_at_zero: bool = False
) -> None:
    """Raises ValueError for row numbers that are not sorted, or not from 0 to ``count``.

    Only on a host: a device cannot look without a synchronisation.
    """
    if ends.device.type != HOST or not ends.numel() or not has_values(ends):
        return
    listed = ends.tolist()
    if listed != sorted(listed) or not 0 <= listed[0] <= listed[-1] <= count:
        raise ValueError(
            f"{operator}: {name} must be sorted, from 0 to the {count} rows; got {listed}"
        )
    if starts_at_zero and listed[0]:
        raise ValueError(f"{operator}: {name} must start with 0, got {listed}")


class ReadOnce(Generic[T]):
    """What ``read`` makes of tensors' numbers, asked once for all layers of a model.

    Each thread remembers the last tensors and keeps their memory, so that the address stays their
    own. Others, or ones that were written to since, are read anew; so are inference tensors always,
    as they do not count their versions.

    Args:
        read: waits for the device.
    """

    def __init__(self, read: Callable[..., T]) -> None:
        self._read = read
        self._last = threading.local()

    def __call__(self, *numbers: Tensor) -> T:
        if any(x.is_inference() for x in numbers):
            return self._read(*numbers)
        known: tuple[Any, Any, T] | None = getattr(self._last, "found", None)
        identity = [_identity(x) for x in numbers]
        if known is not None and known[1] == identity:
            return known[2]
        found = self._read(*numbers)
        self._last.found = ([x.detach() for x in numbers], identity, found)
        return found


def _identity(x: Tensor) -> tuple[Any, ...]:
    """Equal for the same numbers in the same memory, while that is kept."""
    return (x._version, x.data_ptr(), x.shape, x.stride(), x.dtype, x.device)
