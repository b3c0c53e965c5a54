"""Update rules and norms over lists on the host, by chunks that stay in a cache.

torch's own operations, as in the references, and the same bits: a rule works element by element,
and a norm block by block. A reference makes temporary tensors as large as a parameter, whose bytes
go through memory some ten times; of a chunk's temporaries none leaves the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anychip import operators
from anychip.operators.lamb import trust_ratios
from anychip.operators.partials import BLOCK, grid_places, num_blocks
from anychip_cpu.table import FLOATS, table

_CHUNK = 1 << 17
"""Elements: 512 KiB of float32. A few of them fit a last-level cache, and torch's call takes little
of the time; of 2^15 to 2^20, which were measured, smaller ones are slower for their calls."""


def _chunks(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [chunk for tensor in tensors for chunk in tensor.view(-1).split(_CHUNK)]


def _by_chunks(rule: Any, lists: Sequence[Any], scalars: Sequence[Any], **attrs: Any) -> None:
    """The reference on chunks; ``lists`` may hold None for a list that is not given."""
    cut = [None if tensors is None else _chunks(tensors) for tensors in lists]
    low = cut.pop()
    rule(*cut, *scalars, low, **attrs)


@table.forward("sgd", kind="mapped", dtypes=FLOATS, contiguous=True)
def sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    **attrs: Any,
) -> None:
    scalars = (lr, step, scale, clip, found_inf)
    lists = (params, grads, momentum_buffers, low_precision)
    _by_chunks(operators.sgd.forward, lists, scalars, **attrs)


@table.forward("lion", kind="mapped", dtypes=FLOATS, contiguous=True)
def lion(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    **attrs: Any,
) -> None:
    scalars = (lr, step, scale, clip, found_inf)
    _by_chunks(operators.lion.forward, (params, grads, exp_avgs, low_precision), scalars, **attrs)


@table.forward("lamb", kind="mapped", dtypes=FLOATS, contiguous=True)
def lamb(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    lr: Tensor,
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    found_inf: Tensor | None,
    low_precision: Sequence[Tensor] | None,
    trust: Tensor | None,
    **attrs: Any,
) -> None:
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    if trust is None and params:
        grid: dict[str, Any] = {"offsets": None, "sizes": None, "block": BLOCK, **attrs}
        partials = lamb_partials(*lists, step, scale, clip, **grid)
        trust = trust_ratios(partials, [p.numel() for p in params])
    cut = [_chunks(tensors) for tensors in lists]
    low = None if low_precision is None else _chunks(low_precision)
    if trust is not None:
        # A tensor of no elements is one chunk too.
        counts = [max(-(-p.numel() // _CHUNK), 1) for p in params]
        trust = trust.repeat_interleave(torch.tensor(counts))
    operators.lamb.forward(*cut, lr, step, scale, clip, found_inf, low, trust, **attrs)


# Norms


@table.forward("l2_norm_partials", kind="mapped", dtypes=FLOATS)
def l2_norm_partials(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Tensor:
    places = grid_places(tensors, offsets, sizes, block)
    found = torch.zeros(sum(count for _, count in places), dtype=torch.float32)
    start = 0
    for tensor, (first, count) in zip(tensors, places, strict=True):
        _block_sums(tensor.reshape(-1), block, found[start + first : start + count])
        start += count
    return found


def _block_sums(flat: Tensor, block: int, found: Tensor) -> None:
    """The sums in the order of the reference, without a fresh tensor per step."""
    rows = max(_CHUNK // block, 1)
    scratch = torch.empty(rows, block, dtype=torch.float32)
    for index, part in enumerate(flat.split(rows * block)):
        if not part.numel():
            return
        count = num_blocks(part.numel(), block)
        values = scratch[:count]
        line = values.view(-1)
        torch.mul(part, part, out=line[: part.numel()]) if part.dtype == torch.float32 else (
            line[: part.numel()].copy_(part).square_()
        )
        line[part.numel() :].zero_()
        width = block
        while width > 1:
            width //= 2
            values[:, :width].add_(values[:, width : 2 * width])
        found[index * rows : index * rows + count].copy_(values[:, 0])


@table.forward("lamb_partials", kind="mapped", dtypes=FLOATS)
def lamb_partials(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    step: Tensor,
    scale: Tensor | None,
    clip: Tensor | None,
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
    **attrs: Any,
) -> Tensor:
    places = grid_places(params, offsets, sizes, block)
    found = torch.zeros(2, sum(count for _, count in places), dtype=torch.float32)
    length = max(_CHUNK // block, 1) * block
    start = 0
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    for (first, count), *tensors in zip(places, *lists, strict=True):
        place = start + first
        for part in zip(*(t.reshape(-1).split(length) for t in tensors), strict=True):
            grid: dict[str, Any] = {"offsets": None, "sizes": None, "block": block, **attrs}
            sums = operators.lamb_partials.forward(*([t] for t in part), step, scale, clip, **grid)
            found[:, place : place + sums.shape[1]].copy_(sums)
            place += sums.shape[1]
        start += count
    return found
