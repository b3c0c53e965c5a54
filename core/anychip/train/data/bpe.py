"""Which pieces of words is text made of? Byte-pair encoding, trained with ``tokenizers``.

Pieces are over bytes, as in GPT-2, so that every text has an encoding and decoding gives it back.
The file is the JSON of that library, which others read too. Needs the extra ``data``.

Source: Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016);
Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), section 2.2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anychip.train import files
from anychip.train.data.extra import require
from anychip.train.data.text import END_OF_DOCUMENT, VOCAB_SIZE

_SMALLEST = VOCAB_SIZE + 1


class BPETokenizer:
    """A trained byte-pair encoding.

    Args:
        tokenizer: a ``tokenizers.Tokenizer`` whose model is BPE.
        end_of_document: text of the token that ends a document.

    Raises:
        ValueError: another model, or no such token.
    """

    def __init__(self, tokenizer: Any, *, end_of_document: str = END_OF_DOCUMENT) -> None:
        model = type(tokenizer.model).__name__
        if model != "BPE":
            raise ValueError(f"a tokenizer with a BPE model expected, got {model}")
        token = tokenizer.token_to_id(end_of_document)
        if token is None:
            raise ValueError(
                f"the tokenizer has no token {end_of_document!r} to end a document; name the one "
                "it has with end_of_document"
            )
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # A text that quotes the token is not the end of a document. The JSON does not keep this.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self.end_of_document: int = token

    @property
    def name(self) -> str:
        """``bpe:`` and a digest of the vocabulary, which other versions of the library keep."""
        return self._name

    @cached_property
    def _name(self) -> str:
        vocab = sorted((token, text) for text, token in self._vocab().items())
        return f"bpe:{hashlib.sha256(repr(vocab).encode()).hexdigest()[:16]}"

    @property
    def vocab_size(self) -> int:
        """One more than the largest token; less than was asked for when the texts gave no more."""
        return self._vocab_size

    @cached_property
    def _vocab_size(self) -> int:
        return max(self._vocab().values()) + 1

    def _vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return vocab

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Each text as (N,) int64."""
        found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [torch.tensor(encoding.ids, dtype=torch.int64) for encoding in found]

    def decode(self, tokens: Tensor) -> str:
        """Tokens (N,) as text; parts of a character at a cut become the replacement character."""
        text: str = self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    def save(self, path: str | Path) -> None:
        """Writes the JSON; a file that was there is replaced in one step.

        Raises:
            OSError: naming the file.
        """
        files.write(Path(path), self._tokenizer.to_str(pretty=True))

    @classmethod
    def load(cls, path: str | Path, *, end_of_document: str = END_OF_DOCUMENT) -> BPETokenizer:
        """The tokenizer of a JSON file, ours or another one of ``tokenizers``.

        Raises:
            OSError, ValueError: naming the file.
            MissingExtraError: tokenizers is not installed.
        """
        library = require("tokenizers", f"tokenizer {path}")
        text = Path(path).read_text(encoding="utf-8")
        try:
            tokenizer = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"tokenizer {path}: JSON of `tokenizers` expected: {error}") from error
        try:
            return cls(tokenizer, end_of_document=end_of_document)
        except ValueError as error:
            raise ValueError(f"tokenizer {path}: {error}") from None


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """A byte-pair encoding of the most frequent pairs in texts.

    The same texts, in any order, and the same size give the same tokenizer, whatever the number of
    threads, so that every rank can train its own.

    Args:
        vocab_size: 256 bytes, the end of a document, and pairs; at least 257.

    Raises:
        ValueError: the size is smaller.
        MissingExtraError: tokenizers is not installed.
    """
    if vocab_size < _SMALLEST:
        raise ValueError(
            f"vocab_size must be at least {_SMALLEST} (the bytes, and the end of a document), got "
            f"{vocab_size}"
        )
    library = require("tokenizers", "byte-pair encoding")
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return BPETokenizer(tokenizer)
