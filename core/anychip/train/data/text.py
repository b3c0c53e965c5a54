"""How does text become tokens? What every tokenizer has, and the one that needs no training: bytes.

A token of the byte tokenizer is a byte of UTF-8, so the vocabulary is 256. No text file has a zero
byte, so that zero is free to end a document.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

VOCAB_SIZE = 256
"""Of the byte tokenizer."""

END_OF_DOCUMENT = "<|endoftext|>"
"""How the end of a document is written where people read it; GPT-2's name for it."""


class Tokenizer(Protocol):
    """Text to tokens and back.

    Attributes:
        name: equal for two tokenizers that give the same tokens; part of a position in the data.
        vocab_size: tokens are below it; a model's ``vocab_size`` is at least this.
        end_of_document: the token between two documents. No text encodes to it.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Each text as (N,) tokens of an integer dtype; texts do not depend on each other."""
        ...

    def decode(self, tokens: Tensor) -> str:
        """Tokens (N,) as text; the end of a document as ``<|endoftext|>``."""
        ...


class ByteTokenizer:
    """UTF-8 bytes; needs nothing."""

    name = "bytes"
    vocab_size = VOCAB_SIZE
    end_of_document = 0

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Each text as (N,) uint8.

        Raises:
            ValueError: a text has the character U+0000, which is the end-of-document token.
        """
        for text in texts:
            if "\0" in text:
                raise ValueError(
                    f"the text has U+0000 at {text.index(chr(0))}, which ends a document; text "
                    "without it expected"
                )
        return [encode(text.encode("utf-8")) for text in texts]

    def decode(self, tokens: Tensor) -> str:
        """Bytes that are no UTF-8, as at a cut, become the replacement character."""
        return decode(tokens).replace("\0", END_OF_DOCUMENT)


def encode(text: bytes) -> Tensor:
    """Bytes to tokens, (N,) uint8."""
    if not text:  # torch takes no empty buffer
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def decode(tokens: Tensor) -> str:
    """Tokens (N,) to text; bytes that are no UTF-8 become the replacement character."""
    return bytes(tokens.tolist()).decode("utf-8", errors="replace")


def python_documentation() -> Tensor:
    """The texts of Python's ``help()``, about half a megabyte, as tokens (N,) uint8.

    They belong to the standard library, so that the first run needs no download; they differ
    between versions of Python.
    """
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return encode("\n\n".join(topics[name] for name in sorted(topics)).encode("utf-8"))
