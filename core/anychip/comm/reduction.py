"""How values of the ranks are joined, in the order of the ranks, and what the host can join.

Every transport that does its own arithmetic (threads, processes on the host) sums
``((rank 0 + rank 1) + rank 2) + ...`` element by element. The result then depends neither on how
a tensor is cut among the ranks nor on who comes first, so that all transports agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anychip.contract.communicator import (
    CALLS,
    REDUCTIONS,
    Capabilities,
    Reduction,
)

if TYPE_CHECKING:
    import torch

CHUNK_NUMEL = 16384
"""Elements joined at a time: what is summed stays in a core's cache, and torch, which gives work
to other threads from 32768 elements on, leaves them to the computation that goes on meanwhile."""


def reduce_in_order(
    output: torch.Tensor, parts: Sequence[torch.Tensor], reduction: Reduction
) -> None:
    """``output`` becomes the reduction of ``parts``, one per rank, in their order.

    Sums of 16-bit floats are done in float32 and rounded once, after the division of ``avg``.

    Args:
        output: (numel,), contiguous, of the parts' dtype. May be one of the parts.
        parts: (numel,) each, contiguous.
    """
    import torch

    join = {"max": torch.maximum, "min": torch.minimum}.get(reduction, torch.add)
    narrow = output.dtype.is_floating_point and output.itemsize < 4
    wide = torch.float32 if narrow else output.dtype
    room = torch.empty(min(CHUNK_NUMEL, output.numel()), dtype=wide)
    with torch.no_grad():
        for start in range(0, output.numel(), CHUNK_NUMEL):
            chunks = [part[start : start + CHUNK_NUMEL] for part in parts]
            result = output[start : start + CHUNK_NUMEL]
            joined, rest = chunks[0].to(wide), chunks[1:]
            for index, chunk in enumerate(rest, 1):
                # The output may be a part that is still to come: it is written at the end.
                is_last = index == len(rest) and not narrow
                joined = join(joined, chunk.to(wide), out=result if is_last else room[: len(chunk)])
            if reduction == "avg":
                joined = torch.div(joined, len(parts), out=result if not narrow else joined)
            if joined is not result:
                result.copy_(joined)


def host_capabilities() -> Capabilities:
    """What :func:`reduce_in_order` joins, and every dtype that can be moved as bytes.

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
