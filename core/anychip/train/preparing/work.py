"""What is done with documents? They are measured and made into tokens, here or in a process.

``main`` is such a process. It reads frames from its standard input, the request and then documents,
and writes their tokens; it ends when its input does, so that none is left behind by a parent that
was killed. Frames are JSON, and raw tokens.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anychip.train import data, models
from anychip.train.data.messages import describe_template
from anychip.train.preparing import filters

Document = tuple[str, Any]
"""A text, or messages, behind where it stands."""

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be prepared.

    Attributes:
        sources: files, directories and patterns, as ``data.files`` has them.
        field: of JSON lines, tar files and Parquet, with the text; ``messages``: conversations, of
            a tokenizer with a template.
        tokenizer: bytes; a JSON file of ``tokenizers``; or the directory of a model.
        filters: like ``length:least=200``, in order.
    """

    sources: tuple[str, ...]
    field: str = "text"
    tokenizer: str = "bytes"
    filters: tuple[str, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Request:
        """From JSON, which has lists."""
        lists = {key: tuple(value) for key, value in given.items() if isinstance(value, list)}
        return cls(**{**given, **lists})

    @property
    def has_messages(self) -> bool:
        """Documents are conversations."""
        return self.field == "messages" and Path(self.tokenizer).is_dir()


class Done(NamedTuple):
    """What has become of documents.

    Attributes:
        lengths: tokens of each that is left.
        measures: of each filter that decides in order, those of each that is left.
        dropped: how many each filter has left out.
        tokens: of those that are left, one behind the other.
    """

    lengths: list[int]
    measures: dict[str, list[Any]]
    dropped: list[int]
    tokens: NDArray[Any]


def open_tokenizer(name: str) -> data.Tokenizer:
    """``bytes``, that of a JSON file, or that of a model's directory.

    Raises:
        OSError, ValueError: it cannot be read.
        MissingExtraError: its library is not installed.
    """
    if name == "bytes":
        return data.ByteTokenizer()
    if not Path(name).is_dir():
        return data.BPETokenizer.load(name)
    end = str(models.load_tokenizer(name).eos_token)
    return data.BPETokenizer.load(Path(name) / "tokenizer.json", end_of_document=end)


class Preparer:
    """Does what a request wants with documents.

    Raises:
        OSError, ValueError, MissingExtraError: the tokenizer or a filter cannot be made.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.tokenizer = request, open_tokenizer(request.tokenizer)
        self.filters = filters.make(request.filters)
        self.template: str | None = None
        if request.has_messages:
            self.template = describe_template(models.load_tokenizer(request.tokenizer))
        vocab_size = 1 << 31 if request.has_messages else self.tokenizer.vocab_size
        self.dtype = np.dtype(str(data.dtype_of(vocab_size)).removeprefix("torch."))

    def __call__(self, documents: Sequence[Document]) -> Done:
        left, dropped, measures = list(documents), [0] * len(self.filters), dict[str, list[Any]]()
        for number, rule in enumerate(self.filters):
            found = rule.measure([document for _, document in left])
            if rule.in_order:
                measures[str(number)] = found
                continue
            stays = [rule.keeps(measure) for measure in found]
            left = _kept(left, stays)
            measures = {key: _kept(values, stays) for key, values in measures.items()}
            dropped[number] = len(stays) - len(left)
        rows = [row.astype(self.dtype) for row in self._encode(left)]
        tokens = np.concatenate([np.empty(0, self.dtype), *rows])
        return Done([len(row) for row in rows], measures, dropped, tokens)

    def _encode(self, documents: list[Document]) -> list[NDArray[Any]]:
        if self.request.has_messages:
            theirs = models.load_tokenizer(self.request.tokenizer)
            return [data.tokenize_messages([one], theirs).numpy() for one in documents]
        return [row.numpy() for row in self.tokenizer.encode([text for _, text in documents])]


def _kept(values: list[Any], stays: list[bool]) -> list[Any]:
    return [value for value, stay in zip(values, stays, strict=True) if stay]


def write_frame(file: IO[bytes], value: Any, more: bytes = b"") -> None:
    """JSON and bytes behind it."""
    text = json.dumps(value).encode()
    file.write(_LENGTH.pack(len(text)) + _LENGTH.pack(len(more)) + text)
    file.write(more)
    file.flush()


def read_frame(file: IO[bytes]) -> tuple[Any, bytes]:
    """As it was written.

    Raises:
        EOFError: there is none, or not all of it.
    """
    head = file.read(2 * _LENGTH.size)
    if len(head) < 2 * _LENGTH.size:
        raise EOFError
    sizes = [size for (size,) in _LENGTH.iter_unpack(head)]
    text, more = (file.read(size) for size in sizes)
    if [len(text), len(more)] != sizes:
        raise EOFError
    return json.loads(text), more


def serve(given: IO[bytes], answers: IO[bytes]) -> None:
    """Does one frame of documents after the other, until there is none."""
    request, _ = read_frame(given)
    work = Preparer(Request.of(request))
    while True:
        try:
            documents, _ = read_frame(given)
        except EOFError:
            return
        try:
            done = work([(where, document) for where, document in documents])
        except Exception as error:  # the parent raises it, and ends this process
            kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            write_frame(answers, {"kind": kind, "error": str(error)})
            continue
        about = {"lengths": done.lengths, "measures": done.measures, "dropped": done.dropped}
        write_frame(answers, about, done.tokens.tobytes())


@contextmanager
def answering() -> Iterator[IO[bytes]]:
    """Standard output for frames; what a library prints there does not stand between them."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    """The process."""
    with answering() as answers:
        serve(sys.stdin.buffer, answers)
