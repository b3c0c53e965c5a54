"""How do tensors and other values get into files that are named by their content?

Of tensors a file in the safetensors format: a length of 8 bytes, a header of JSON, and the data.
It is written as it goes, so that beside what a rank holds there is one box on the host.

Source: https://github.com/huggingface/safetensors#format
"""

import hashlib
import io
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from anychip.train import files
from anychip.train.checkpoint.manifest import File, Stored, TensorFile
from anychip.train.checkpoint.parts import DTYPES, Piece


class Written(NamedTuple):
    """What a rank has written.

    Attributes:
        files: its one by its name; none when it had nothing to write.
        boxes: the name of a tensor, and where a box of it is.
    """

    files: dict[str, TensorFile]
    boxes: list[tuple[str, Stored]]


def write_tensors(path: Path, pieces: Sequence[Piece], go_on: Callable[[], None]) -> Written:
    """Writes this rank's file of tensors, durably.

    Args:
        go_on: called before each; may raise.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    if not pieces:
        return Written({}, [])
    # The largest numbers first: each then begins at a multiple of its size, for who maps the file.
    ordered = sorted(pieces, key=lambda piece: -piece.part.dtype.itemsize)
    header = header_of((_key(p), p.part.dtype, p.box.sizes) for p in ordered)
    digests, content = [], hashlib.sha256(header)
    with files.fresh(path / "tensors") as file:
        file.write(header)
        for piece in ordered:
            go_on()
            data = piece.on_host().view(torch.uint8).numpy().data
            digests.append(hashlib.sha256(data))
            content.update(digests[-1].digest())
            file.write(data)
        # Named by content: a file with this name already is this file.
        name = f"tensors-{content.hexdigest()[:16]}.safetensors"
        files.sync(file).replace(path / name)
    found, place = [], len(header)
    for piece, digest in zip(ordered, digests, strict=True):
        stored = Stored(piece.box, name, place, piece.nbytes, digest.hexdigest())
        found.append((piece.part.name, stored))
        place += piece.nbytes
    about = TensorFile(place, len(header), hashlib.sha256(header).hexdigest())
    return Written({name: about}, found)


def header_of(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """What a file begins with that has tensors of these names, dtypes and shapes, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, dtype, shape in tensors:
        end = place + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [place, end],
        }  # fmt: skip
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _key(piece: Piece) -> str:
    """The tensor's name; of a part of it with the place where that begins."""
    if piece.box.sizes == piece.part.shape:
        return piece.part.name
    return f"{piece.part.name}[{','.join(map(str, piece.box.offsets))}]"


class _HashingFile:
    """A file for torch.save that hashes what goes by.

    torch's writer turns an OSError into a RuntimeError that says nothing of a full disk; ``error``
    keeps it.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = hashlib.sha256()
        self.nbytes = 0
        self.error: OSError | None = None

    def write(self, chunk: bytes) -> int:
        try:
            self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.hash.update(chunk)
        self.nbytes += len(chunk)
        return len(chunk)

    def flush(self) -> None:
        self.file.flush()


def serialized(values: Any) -> bytes:
    """As :func:`write_values` writes it."""
    content = io.BytesIO()
    torch.save(values, content)
    return content.getvalue()


def write_values(path: Path, part: str, values: Any) -> File:
    """Writes one file of tensors, numbers, texts, lists and dicts, durably.

    Args:
        values: bytes are written as they are.

    Raises:
        OSError: it could not be written; nothing is left of it.
    """
    with files.fresh(path / part) as file:
        writer = _HashingFile(file)
        try:
            if isinstance(values, bytes):
                writer.write(values)
            else:
                torch.save(values, cast(IO[bytes], writer))
        except RuntimeError:
            if writer.error is None:
                raise
            raise writer.error from None
        digest = writer.hash.hexdigest()
        name = f"{part}-{digest[:16]}.pt"
        files.sync(file).replace(path / name)
    return File(name, writer.nbytes, digest)
