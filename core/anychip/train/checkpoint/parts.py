"""What does a rank hold of the tensors in a checkpoint, and what of that does it write?

Of what several ranks have alike each writes a share, equal in bytes. Every rank finds out its own
by itself, since all list the same tensors in the same order: nothing is sent.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from anychip.runtime import on_host
from anychip.train.checkpoint import boxes
from anychip.train.checkpoint.boxes import Box

BOX_NBYTES = 64 << 20
"""Of a box in a file at most: who needs some of a box reads, and hashes, all of it."""

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""What can be in a file of tensors, by the name that the safetensors format has for it."""


class Share(NamedTuple):
    """Of what ``copies`` ranks have alike, this one writes the share of the given number."""

    number: int
    copies: int


ALL = Share(0, 1)
"""Of what no other rank has, or no other rank writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What a rank holds of a tensor: a run of its elements.

    Attributes:
        name: of the tensor in the checkpoint.
        shape: of the whole.
        dtype: of what is in the checkpoint.
        values: the elements, on any device, of any dtype and shape.
        offset: of the first one in the flattened whole.
        share: of the run, that this rank writes; None: another rank writes it all.
        otherwise: a tensor that has the same values in other dtypes: a weight's master, and back.
        is_per_rank: the first dim counts the ranks, of which each holds one row. At another number
            of them the first rank's row is the sum over those that were saved, the others' zeros.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor
    offset: int = 0
    share: Share | None = ALL
    otherwise: str | None = None
    is_per_rank: bool = False


class Piece(NamedTuple):
    """What a rank writes: a box of a tensor, and where that begins in the part that it holds."""

    part: Part
    box: Box
    start: int

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.box.numel * self.part.dtype.itemsize

    def elements(self) -> Tensor:
        """(numel,) as they go into the file, where they are."""
        run = self.part.values.detach().reshape(-1)[self.start : self.start + self.box.numel]
        return run.to(self.part.dtype)

    def on_host(self) -> Tensor:
        """The elements, (numel,), as they go into the file."""
        return on_host(self.elements()).contiguous()


def pieces(parts: Sequence[Part]) -> list[Piece]:
    """What this rank writes of its parts."""
    found = []
    for count in sorted({part.share.copies for part in parts if part.share is not None}):
        alike = [part for part in parts if part.share is not None and part.share.copies == count]
        for part, start, end in _dealt(alike):
            most = BOX_NBYTES // part.dtype.itemsize
            for first in range(start, end, most):
                place = first
                for box in boxes.of_run(part.shape, part.offset + first, min(most, end - first)):
                    found.append(Piece(part, box, place))
                    place += box.numel
    return found


def _dealt(parts: Sequence[Part]) -> Iterator[tuple[Part, int, int]]:
    """This rank's elements of parts that equally many ranks have, as equal in bytes as can be."""
    share = parts[0].share
    assert share is not None
    total = sum(part.values.numel() * part.dtype.itemsize for part in parts)
    first, last = (total * number // share.copies for number in (share.number, share.number + 1))
    begin = 0
    for part in parts:
        numel, size = part.values.numel(), part.dtype.itemsize
        start, end = (min(numel, max(0, -((begin - at) // size))) for at in (first, last))
        if start < end:
            yield part, start, end
        begin += numel * size
