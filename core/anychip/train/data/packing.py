"""How do documents become one row of tokens, and where in a batch do they end?

Documents are joined, with the end-of-document token between two, and cut into windows without
regard to them (:mod:`anychip.train.data.order`). What a model should know of their ends it computes
from the tokens of a batch, on the batch's device: a document begins at the start of a row and after
an end-of-document token, which itself belongs to the document that it ends.
Where tokens alone do not say what is a target, or where a document begins, each has marks.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from anychip.train.data.text import ByteTokenizer, Tokenizer

IGNORED_TARGET = -100
"""A target without a loss; the default of ``ignore_index`` in cross_entropy."""

NO_TARGET, BEGINS = 1 << 29, 1 << 30
"""Marks of a token, an int32: it is not to be predicted; a document begins with it."""

_CHARACTERS = 1 << 20


def tokenize(
    documents: Iterable[str], tokenizer: Tokenizer | None = None, *, end_of_document: bool = True
) -> Tensor:
    """Documents as one row of tokens.

    Empty documents are left out. A document is encoded in one piece.

    Args:
        tokenizer: None: bytes.
        end_of_document: put that token between two documents; else they follow each other.

    Returns:
        (N,) in the smallest dtype for the vocabulary: uint8, int16 or int32, on the host.

    Raises:
        ValueError: no document has text; what reading them raises.
    """
    tokenizer = tokenizer or ByteTokenizer()
    dtype = dtype_of(tokenizer.vocab_size)
    between = torch.tensor([tokenizer.end_of_document] * end_of_document, dtype=dtype)
    rows: list[Tensor] = []
    for texts in _grouped(documents):
        parts: list[Tensor] = []
        for tokens in tokenizer.encode(texts):
            if rows or parts:
                parts.append(between)
            parts.append(tokens.to(dtype))
        rows.append(torch.cat(parts))
    if not rows:
        raise ValueError("the data has no text: at least one document that is not empty expected")
    return torch.cat(rows)


def _grouped(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents with text, about a million characters at a time: few calls, little memory."""
    group: list[str] = []
    size = 0
    for document in filter(None, documents):
        group.append(document)
        size += len(document)
        if size >= _CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def dtype_of(vocab_size: int) -> torch.dtype:
    """The smallest for so many tokens."""
    if vocab_size <= 1 << 8:
        return torch.uint8
    return torch.int16 if vocab_size <= 1 << 15 else torch.int32


def mask_targets(tokens: Tensor, targets: Tensor, end_of_document: int) -> Tensor:
    """Targets without those that cross into the next document: those of an end-of-document token.

    Args:
        tokens, targets: (B, S) int64, as a loader gives them.

    Returns:
        (B, S) int64, a new tensor, with :data:`IGNORED_TARGET` there.
    """
    return targets.masked_fill(tokens == end_of_document, IGNORED_TARGET)


def has_marks(tokens: Tensor) -> bool:
    """Whether a row of tokens has marks; those without one are smaller."""
    return tokens.dtype == torch.int32 and bool((tokens >= NO_TARGET).any())


def split_marked(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Of marked windows (B, S + 1) the tokens, with marks of beginnings, and targets: (B, S)."""
    after = windows[:, 1:]
    targets = (after & (NO_TARGET - 1)).masked_fill((after & NO_TARGET) != 0, IGNORED_TARGET)
    return windows[:, :-1] & ~NO_TARGET, targets


def unmarked(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens without marks, and the place of each in its document, or the row's part of it.

    Args:
        tokens: (B, S) int64, with the marks of beginnings.

    Returns:
        Each (B, S) int64.
    """
    return tokens & (NO_TARGET - 1), _places(tokens >= BEGINS)


def positions(tokens: Tensor, end_of_document: int) -> Tensor:
    """Place of each token in its document, or in the part of it that the row has.

    Args:
        tokens: (B, S) int64.

    Returns:
        (B, S) int64: 0 at the start of a row and after an end-of-document token, and on from there.
    """
    return _places(_begins(tokens, end_of_document))


def _places(begins: Tensor) -> Tensor:
    """(B, S) int64: how far the last beginning, or the start of the row, is behind."""
    index = torch.arange(begins.shape[1], device=begins.device).expand_as(begins)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def cu_seqlens(tokens: Tensor, end_of_document: int) -> Tensor:
    """Where documents begin in the rows laid one after the other, as attention over packed
    sequences takes it.

    Args:
        tokens: (B, S) int64. The host waits for them: how many documents there are is data.

    Returns:
        (num_documents + 1,) int32: the starts in the B * S tokens, and B * S. A document that goes
        on in the next row counts as another one there.
    """
    starts = _begins(tokens, end_of_document).flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([tokens.numel()]))).to(torch.int32)


def _begins(tokens: Tensor, end_of_document: int) -> Tensor:
    """(B, S) bool: a document begins here."""
    begins = torch.ones_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end_of_document
    return begins
