"""Where do the tokens of a window come from? Rows: pieces one behind the other, in memory or files.

A piece is tokens in host memory, or in a file of :mod:`anychip.train.data.prepared`, of which only
what is asked for is read. It is read by ``pread``, not through a mapping: waiting for a disk in a
page fault would hold Python's lock, and with it the training that a prefetching thread is to go on
beside. Several rows with weights are a mixture.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anychip.contract import HOST
from anychip.train.data.packing import NO_TARGET, has_marks

Integers = NDArray[np.int64]
OPEN = 1 << 62
"""Where a piece ends that still grows."""


class Extent(NamedTuple):
    """How many tokens there are, and whether these are all."""

    tokens: int
    is_whole: bool


class Tokens(ABC):
    """What a piece is of. Threads may read at once.

    Attributes:
        digest: equal for equal tokens of one dtype, wherever they are.
        is_marked: tokens have marks (:data:`~anychip.train.data.packing.NO_TARGET`).
    """

    digest: str
    is_marked: bool

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, begin: int, end: int) -> NDArray[Any]:
        """Those from begin to before end, (end - begin,) of an integer dtype."""

    def extent(self) -> Extent:
        """What there is by now; waits for nothing."""
        return Extent(len(self), True)


class InMemory(Tokens):
    """Tokens (N,) of an integer dtype on the host."""

    def __init__(self, tokens: Tensor) -> None:
        is_integer = not (tokens.is_floating_point() or tokens.is_complex())
        if tokens.dim() != 1 or tokens.device.type != HOST or not is_integer:
            raise ValueError(
                f"a row of integers on the host expected as tokens, got {list(tokens.shape)} "
                f"{tokens.dtype} on {tokens.device}"
            )
        self.tokens, self.is_marked = tokens.numpy(), has_marks(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        return self.tokens[begin:end]

    @cached_property
    def digest(self) -> str:  # type: ignore[override]
        return hashlib.sha256(np.ascontiguousarray(self.tokens).data).hexdigest()[:16]


class Piece(NamedTuple):
    """Tokens from begin to before end."""

    tokens: Tokens
    begin: int
    end: int


class TokenRow:
    """Pieces as one row of tokens.

    Raises:
        ValueError: some are marked, and some are not.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = tuple(pieces)
        self._ends = np.cumsum([piece.end - piece.begin for piece in pieces])
        self.is_marked = any(piece.tokens.is_marked for piece in pieces)
        if self.is_marked and not all(piece.tokens.is_marked for piece in pieces):
            raise ValueError("text and messages are not trained on together in one row")

    def __len__(self) -> int:
        return self.extent().tokens

    def extent(self) -> Extent:
        """What there is by now: a last piece may grow."""
        tokens, begin, end = self.pieces[-1]
        if end < OPEN:
            return Extent(int(self._ends[-1]), True)
        there = tokens.extent()
        return there._replace(tokens=int(self._ends[-1]) - (end - begin) + there.tokens)

    def read(self, starts: Integers, length: int) -> Integers:
        """The windows that begin there, (len(starts), length); all within the row."""
        found = np.empty((len(starts), length), np.int64)
        for window, start in zip(found, starts.tolist(), strict=True):
            number, done = int(np.searchsorted(self._ends, start, side="right")), 0
            while done < length:
                tokens, begin, end = self.pieces[number]
                begin = end - int(self._ends[number]) + start + done
                part = tokens.read(begin, min(end, begin + length - done))
                window[done : done + len(part)] = part
                done, number = done + len(part), number + 1
        return found

    def part(self, begin: int, end: int) -> TokenRow:
        """Its tokens from begin to before end, as a row."""
        assert 0 <= begin <= end <= len(self)
        found, first = list[Piece](), 0
        for tokens, low, high in self.pieces:
            cut = Piece(tokens, low + max(0, begin - first), min(high, low + end - first))
            found += [cut] if cut.begin < cut.end else []
            first += high - low
        return TokenRow(found or [self.pieces[0]._replace(end=self.pieces[0].begin)])

    def count_untold(self, starts: Integers, length: int, end_of_document: int) -> int:
        """Of the targets of these windows those that have no loss."""
        # The end of a document has no target; a mark is on one.
        tokens = self.read(starts + self.is_marked, length)
        is_it = tokens & NO_TARGET if self.is_marked else tokens == end_of_document
        return int(np.count_nonzero(is_it))

    @property
    def digest(self) -> str:
        """Equal for equal rows; of a whole piece its own."""
        digests = [_digest_of(piece) for piece in self.pieces]
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def _digest_of(piece: Piece) -> str:
    tokens, begin, end = piece
    if begin == 0 and (end == OPEN or end == len(tokens)):
        return tokens.digest
    if isinstance(tokens, InMemory):
        return InMemory(torch.from_numpy(tokens.read(begin, end))).digest
    return f"{tokens.digest}[{begin}:{end}]"


def join(pieces: Sequence[Tokens], end_of_document: int | None) -> TokenRow:
    """Tokens one behind the other, with that token between two; None: nothing between.

    Marked ones have nothing between: their documents say where they begin. Only the last may grow.
    """
    found = list[Piece]()
    for tokens in pieces:
        if found and end_of_document is not None and not tokens.is_marked:
            found.append(Piece(InMemory(torch.tensor([end_of_document], dtype=torch.int64)), 0, 1))
        assert not found or found[-1].end < OPEN
        there = tokens.extent()
        found.append(Piece(tokens, 0, there.tokens if there.is_whole else OPEN))
    return TokenRow(found)


class Mixture:
    """Rows, of each of which so much of what is trained on comes.

    Args:
        weights: one for each row, greater than 0; their sum is 1 in effect.

    Raises:
        ValueError: there are more or fewer; one is not greater than 0.
    """

    def __init__(self, rows: Sequence[TokenRow], weights: Sequence[float] = (1.0,)) -> None:
        if len(rows) != len(weights) or not rows:
            raise ValueError(
                f"a weight for each row of tokens expected, got {len(weights)} weights and "
                f"{len(rows)} rows"
            )
        if not all(math.isfinite(weight) and weight > 0.0 for weight in weights):
            raise ValueError(f"weights greater than 0 expected, got {list(weights)}")
        self.rows = tuple(rows)
        self.weights = tuple(weight / math.fsum(weights) for weight in weights)
        self.is_marked = rows[0].is_marked
        if any(row.is_marked != self.is_marked for row in rows):
            raise ValueError("text and messages are not trained on together in one mixture")

    def __len__(self) -> int:
        return self.extent().tokens

    def extent(self) -> Extent:
        """Tokens of all rows, by now."""
        found = [row.extent() for row in self.rows]
        return Extent(sum(each.tokens for each in found), all(each.is_whole for each in found))

    def split(self, fraction: float) -> tuple[Mixture, TokenRow]:
        """Without the last part of each row, and those parts as one row."""
        cuts = [len(row) - round(len(row) * fraction) for row in self.rows]
        kept = [row.part(0, cut) for row, cut in zip(self.rows, cuts, strict=True)]
        rest = [row.part(cut, len(row)) for row, cut in zip(self.rows, cuts, strict=True)]
        held_out = TokenRow([piece for row in rest for piece in row.pieces])
        return Mixture(kept, self.weights), held_out

    @cached_property
    def digest(self) -> str:
        """Equal for equal mixtures; of one row that of the row."""
        if len(self.rows) == 1:
            return self.rows[0].digest
        text = [(row.digest, round(w, 9)) for row, w in zip(self.rows, self.weights, strict=True)]
        return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def as_row(tokens: Tensor | TokenRow) -> TokenRow:
    """A tensor (N,) as a row of one piece.

    Raises:
        ValueError: it is no row of integers on the host.
    """
    if isinstance(tokens, TokenRow):
        return tokens
    return TokenRow([Piece(InMemory(tokens), 0, len(tokens))])


def as_mixture(tokens: Tensor | TokenRow | Mixture) -> Mixture:
    """A row alone is a mixture, too."""
    return tokens if isinstance(tokens, Mixture) else Mixture([as_row(tokens)])
