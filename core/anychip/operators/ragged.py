"""Rows in groups one after the other, given by where the groups end: what such numbers must be."""

from __future__ import annotations

from torch import Tensor

from anychip.operators.values import has_values


def refuse_unsorted(
    operator: str, name: str, ends: Tensor, count: int, *, starts_at_zero: bool = False
) -> None:
    """Raises ValueError for row numbers that are not sorted, or not from 0 to ``count``.

    Only on a host: a device cannot look without a synchronisation.
    """
    if ends.device.type != "cpu" or not ends.numel() or not has_values(ends):
        return
    listed = ends.tolist()
    if listed != sorted(listed) or not 0 <= listed[0] <= listed[-1] <= count:
        raise ValueError(
            f"{operator}: {name} must be sorted, from 0 to the {count} rows; got {listed}"
        )
    if starts_at_zero and listed[0]:
        raise ValueError(f"{operator}: {name} must start with 0, got {listed}")
