"""l2_norm_partials: sums of squares over a fixed grid, so that a norm is the same when sharded.

Note: The grid
    A tensor is flattened in logical order and cut into blocks of ``block`` elements; the last one
    may be shorter. The grid belongs to the whole tensor: a shard is a range of its blocks, so every
    shard begins at a multiple of ``block``, and ends at one or at the tensor's end. A block's
    partial is the float32 sum of its squares, zeros appended up to ``block``, added up in pairs:
    first half plus second half, until one is left. :func:`sum_in_pairs` joins partials in the same
    way. Squares and sums of two are exactly rounded everywhere, so the bits depend on the numbers
    alone: not on threads, the length of the list, or the chip.

    Every rank gives partials for all blocks of the whole tensors, zeros for those that it does not
    hold. The sum over the ranks is then exact in any order, since all terms but one are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from anychip.contract import Bound, Cost, OperatorSpec, Sample, SampleMaker
from anychip.operators import lists

BLOCK = 1024
"""Elements of a block: 0.1 % of a tensor's bytes are partials, and shards can be cut finely."""
_BLOCKS_AT_ONCE = 1024
"""Blocks that are squared together: their copy fits a cache, whatever the tensor's size is."""


def num_blocks(numel: int, block: int = BLOCK) -> int:
    """Blocks of a tensor: the last one may be shorter."""
    return -(-numel // block)


def sum_in_pairs(values: Tensor) -> Tensor:
    """Sum over the last dim: zeros up to a power of two, then first half plus second half.

    Args:
        values: (..., n) float32.

    Returns:
        (...) float32, the same bits on every chip and for every number of threads.
    """
    count = values.shape[-1]
    width = 1 << max(count - 1, 0).bit_length()
    values = torch.nn.functional.pad(values, (0, width - count))
    while width > 1:
        width //= 2
        values = values[..., :width] + values[..., width:]
    return values[..., 0]


def partials_of(tensors: Sequence[Tensor], places: Sequence[tuple[int, int]], block: int) -> Tensor:
    """The reference: (total,) float32 partials of tensors at (first block, blocks of the whole)."""
    found = []
    for tensor, (first, count) in zip(tensors, places, strict=True):
        sums = _block_sums(tensor.reshape(-1), block)
        missing = (first, count - first - sums.shape[0])
        found.append(torch.nn.functional.pad(sums, missing))
    return torch.cat(found)


def _block_sums(flat: Tensor, block: int) -> Tensor:
    found = [flat.new_zeros(0, dtype=torch.float32)]
    for part in flat.split(_BLOCKS_AT_ONCE * block):
        squares = part.float().square()
        missing = num_blocks(part.numel(), block) * block - part.numel()
        squares = torch.nn.functional.pad(squares, (0, missing))
        found.append(sum_in_pairs(squares.view(-1, block)))
    return torch.cat(found)


def grid_places(
    tensors: Sequence[Tensor],
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> list[tuple[int, int]]:
    """(first block, blocks of the whole) of each tensor.

    Raises:
        ValueError: no tensor, lists of another length, or a shard that is not a range of blocks.
    """
    if not tensors:
        raise ValueError("at least one tensor expected, got none")
    if block < 1 or block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    for name, given in (("offsets", offsets), ("sizes", sizes)):
        if given is not None and len(given) != len(tensors):
            raise ValueError(
                f"{name} must be as long as the tensors ({len(tensors)}), got {len(given)}"
            )
    found = []
    for index, tensor in enumerate(tensors):
        start = 0 if offsets is None else offsets[index]
        end = start + tensor.numel()
        size = end if sizes is None else sizes[index]
        if start < 0 or start % block or end > size or (end < size and end % block):
            raise ValueError(
                f"tensor {index}: a range of whole blocks of {block} elements expected, got "
                f"elements {start} to {end} of {size}"
            )
        found.append((start // block, num_blocks(size, block)))
    return found


def _forward(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Tensor:
    return partials_of(tensors, grid_places(tensors, offsets, sizes, block), block)


def _fake(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> Tensor:
    total = sum(count for _, count in grid_places(tensors, offsets, sizes, block))
    return tensors[0].new_empty((total,), dtype=torch.float32)


def _check(
    tensors: Sequence[Tensor],
    *,
    offsets: Sequence[int] | None,
    sizes: Sequence[int] | None,
    block: int,
) -> None:
    grid_places(tensors, offsets, sizes, block)


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    tensors = [maker.normal(*shape) for shape in lists.SHAPES]
    yield Sample((tensors,), {"offsets": None, "sizes": None, "block": 64}, "four tensors")
    shards = [maker.normal(2, 32), maker.normal(0), maker.normal(10)]
    attrs = {"offsets": [64, 0, 32], "sizes": [200, 40, 42], "block": 32}
    yield Sample((shards,), attrs, "shards")


l2_norm_partials = OperatorSpec(
    name="l2_norm_partials",
    signature=(
        "(Tensor[] tensors, *, int[]? offsets=None, int[]? sizes=None, int block=1024) -> Tensor"
    ),
    equation="per block of each whole tensor: sum of t^2 in pairs, 0 where it is not held",
    source="Blanchard, Higham and Mary 2020, SIAM J. Sci. Comput. 42:A1541 (sums by blocks)",
    forward=_forward,
    fake=_fake,
    check=_check,
    sizes=lambda tensors, **_: {"numel": lists.numel(tensors)},
    cost=lambda tensors, **_: Cost(lists.nbytes(tensors), 2 * lists.numel(tensors)),
    samples=_samples,
    bound=Bound(forward=1, backward=0, length=lambda tensors, *, block, **_: block),
)
