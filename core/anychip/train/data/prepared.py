"""What has ``anychip data prepare`` written? A directory of tokens, made once and read in place.

=================  =============================================================
``tokens.bin``     the tokens, little-endian, as ``tokenize`` would join them
``documents.bin``  int64: where each document ends, in tokens
``prepared.json``  what it was made of, with which tokenizer, counts and hashes;
                   written last: without it the directory is not prepared
=================  =============================================================
"""

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anychip.contract import AnychipError
from anychip.train import files, schema
from anychip.train.data.rows import Tokens

DESCRIPTION, TOKENS, DOCUMENTS = "prepared.json", "tokens.bin", "documents.bin"
SCHEMA = 1
DTYPES = {"uint8": "u1", "int16": "<i2", "int32": "<i4"}
_BLOCK = 1 << 24

_FORM = {
    "schema": schema.COUNT, "tokenizer": str, "template": schema.ANY, "dtype": str,
    "is_marked": bool, "tokens": schema.COUNT, "documents": schema.COUNT,
    "sha256": {"tokens": str, "documents": str}, "request": {str: schema.ANY},
    "report": {str: schema.ANY},
}  # fmt: skip


class PreparedError(AnychipError, ValueError):
    """A prepared directory is damaged, not finished, or not what the run needs."""


def is_prepared(path: Path) -> bool:
    """Whether a path is a directory of ``anychip data prepare``, finished or not."""
    return any((path / name).exists() for name in (DESCRIPTION, TOKENS))


class TokenFile(Tokens):
    """The tokens in the file of a directory; memory holds none of them."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self._dtype = path, np.dtype(DTYPES[dtype])

    @cached_property
    def _descriptor(self) -> int:
        with files.open_to_read(self.path / TOKENS) as file:
            descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """As the base class; raises PreparedError: the file has become shorter."""
        size = self._dtype.itemsize
        found = os.pread(self._descriptor, (end - begin) * size, begin * size)
        if len(found) != (end - begin) * size:
            raise PreparedError(f"{self.path / TOKENS} has become shorter while it is read")
        return np.frombuffer(found, self._dtype)


class Prepared(TokenFile):
    """The tokens of a prepared directory.

    Raises:
        PreparedError: it is not finished, or its files are not as long as it says.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.about = _described(path)
        super().__init__(path, self.about["dtype"])
        self.is_marked: bool = self.about["is_marked"]
        self.digest: str = self.about["sha256"]["tokens"][:16]
        for name, count, nbytes in (
            (TOKENS, self.about["tokens"], self._dtype.itemsize),
            (DOCUMENTS, self.about["documents"], 8),
        ):
            found = (path / name).stat().st_size
            if found != count * nbytes:
                raise PreparedError(
                    f"{path / name} has {found:,} bytes, and {DESCRIPTION} says "
                    f"{count * nbytes:,}; prepare it anew"
                )

    def __len__(self) -> int:
        return int(self.about["tokens"])

    def verify(self) -> None:
        """Reads it all, and compares.

        Raises:
            PreparedError: a file is not the one that was written.
        """
        for name, wanted in self.about["sha256"].items():
            path = self.path / f"{name}.bin"
            if sha256_of(path).hexdigest() != wanted:
                raise PreparedError(f"{path} is damaged: its hash is not that of {DESCRIPTION}")


def sha256_of(path: Path) -> Any:
    """The hash of a file, to which more may be added; memory holds a block of it."""
    digest = hashlib.sha256()
    with files.open_to_read(path) as file:
        for block in _blocks(file):
            digest.update(block)
    return digest


def _blocks(file: Any) -> Iterator[bytes]:
    while block := file.read(_BLOCK):
        yield block


def _described(path: Path) -> dict[str, Any]:
    if not (path / DESCRIPTION).exists():
        raise PreparedError(
            f"{path} is not finished: it has no {DESCRIPTION}; go on with anychip data prepare "
            f"SOURCE ... --out {path} --resume"
        )
    with files.open_to_read(path / DESCRIPTION) as file:
        try:
            found = json.loads(file.read().decode("utf-8"))
            schema.check(found, _FORM, DESCRIPTION)
        except (ValueError, RecursionError) as error:
            raise PreparedError(f"{path / DESCRIPTION} is damaged: {error}") from error
    if found["schema"] != SCHEMA or found["dtype"] not in DTYPES:
        raise PreparedError(
            f"{path / DESCRIPTION} is of schema {found['schema']} with {found['dtype']}; this "
            f"version reads schema {SCHEMA} with {', '.join(DTYPES)}"
        )
    return dict(found)
