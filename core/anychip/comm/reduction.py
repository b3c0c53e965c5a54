"""How values of the ranks are joined, pairwise in the order of the ranks, and what can be joined.

Every transport that does its own arithmetic (threads, processes on the host) joins neighbours, then
neighbours of those: ``((rank 0 + rank 1) + (rank 2 + rank 3)) + ...`` element by element, the same
on all of them bit for bit. The result depends neither on how a tensor is cut among the ranks nor on
who comes first; nor, where inner groups are a power of two of neighbours and the dtype has 32 bits
or more, on whether the ranks sum at once or group by group: 8 = 2 groups of 4 = 4 groups of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anychip.contract.communicator import CALLS, REDUCTIONS, Capabilities, Reduction

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 32704
"""Elements joined at a time where torch has several threads: it gives work to them from 32768 on,
and they are left to the computation that goes on meanwhile."""
_ALONE_NUMEL = 4 * CHUNK_NUMEL
"""The same where it has one: what is between two sums stays in a core's cache."""


def reduce_pairwise(
    output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """``output`` becomes the reduction of ``parts``, one per rank, by a tree over neighbours.

    Sums of 16-bit floats are done in float32 and rounded once, after the division of ``avg``.

    Args:
        output: (numel,), contiguous, of the parts' dtype. May be one of the parts.
        parts: (numel,) each, contiguous.
    """
    import torch

    join = {"max": torch.maximum, "min": torch.minimum}.get(reduction, torch.add)
    narrow = output.dtype.is_floating_point and output.itemsize < 4
    divisor = len(parts) if reduction == "avg" else 1
    numel, size = output.numel(), CHUNK_NUMEL
    if torch.get_num_threads() == 1:
        # Two parts are read once, whatever is in a cache.
        size = numel if len(parts) == 2 and divisor == 1 and not narrow else _ALONE_NUMEL
    with torch.no_grad():
        if numel <= size:
            _join(output, parts, join, divisor, narrow=narrow)
            return
        for result, *chunks in zip(*(t.split(size) for t in (output, *parts)), strict=True):
            _join(result, chunks, join, divisor, narrow=narrow)


def _join(
    output: torch.Tensor,
    parts: Sequence[torch.Tensor],
    join: Callable[..., torch.Tensor],
    divisor: int,
    *,
    narrow: bool,
) -> None:
    level = [part.float() for part in parts] if narrow else parts
    while len(level) > 2:
        pairs = zip(level[::2], level[1::2], strict=False)
        odd = level[len(level) // 2 * 2 :]
        level = [*(join(one, other) for one, other in pairs), *odd]
    # The output may be a part that is still to come: it is written at the end.
    joined = join(*level, out=None if narrow else output) if len(level) == 2 else level[0]
    if divisor > 1:
        joined = joined.div_(divisor)
    if joined is not output:
        output.copy_(joined)


def host_capabilities() -> Capabilities:
    """What :func:`reduce_pairwise` joins, and every dtype that can be moved as bytes.

    Integers wrap around in ``sum``, and have no ``avg``, which would have to round. bool and the
    8-bit floats are moved only.
    """
    import torch

    floats = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    integers = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64}
    moved = {torch.bool, torch.float8_e4m3fn, torch.float8_e5m2}
    joined = frozenset(floats | integers)
    dtypes = {call: joined | moved for call in CALLS if call != "barrier"}
    dtypes |= {call: joined for call in ("all_reduce", "reduce_scatter")}
    whole: frozenset[Reduction] = frozenset(r for r in REDUCTIONS if r != "avg")
    reductions: dict[torch.dtype, frozenset[Reduction]] = {
        **dict.fromkeys(floats, frozenset(REDUCTIONS)),
        **dict.fromkeys(integers, whole),
    }
    return Capabilities({**dtypes, "barrier": frozenset()}, reductions)
