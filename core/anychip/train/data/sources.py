"""Which documents are in these files? One after the other, so that memory holds one, or a batch.

A document is a text, or the messages of a conversation: whatever a field of that name has.

=========================  =====================================================
``.jsonl``                 a line is a document: an object with a field of text
``.parquet``               a row is a document: a column (extra ``data``)
``.tar``                   a sample is a document: WebDataset, in ``archives``
anything else              the file is a document, a text in UTF-8
``.gz .bz2 .xz .zst``      after a name: the same, packed (``.zst``: extra
                           ``data``); not for Parquet
=========================  =====================================================

Every error names the file, and the line, row or sample.
"""

import bz2
import glob
import gzip
import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from anychip.train.data.archives import DamagedArchiveError, samples
from anychip.train.data.extra import require
from anychip.train.data.text import encode

Located = Iterator[tuple[str, Any]]
"""Documents, each behind where it stands, in words."""

_ROWS = 1024


def read_documents(paths: Sequence[str | Path], *, field: str = "text") -> Iterator[str]:
    """The documents of files, directories and patterns, read as they are asked for.

    Args:
        paths: as for :func:`find_files`.
        field: of JSON lines, and column of Parquet, that holds the text.

    Raises:
        FileNotFoundError, PermissionError: naming the file or pattern.
        ValueError: a file is empty, binary, damaged or not UTF-8; a line is no JSON; a line or row
            has no such field, or something else than text in it.
        MissingExtraError: there is a Parquet or ``.zst`` file, and pyarrow is not installed.
    """
    return (text for path in find_files(paths) for _, text in read_file(path, field=field))


def read_file(path: Path, *, field: str, is_text: bool = True) -> Located:
    """The documents of one file, each behind where it stands.

    Args:
        is_text: False: what the field has, whatever it is, of files that have fields.

    Raises:
        OSError, ValueError, MissingExtraError: as :func:`read_documents`, after what stands before
            the damage.
    """
    reader, is_empty = _READERS.get(_suffix(path), _read_text), True
    if not is_text and reader is _read_text:
        raise ValueError(
            f"data file {path}: {field} are read from {', '.join(_READERS)}, not from plain text"
        )
    for where, value in reader(path, field, is_text):
        yield where, _checked(where, value, field) if is_text else value
        is_empty = False
    if is_empty:
        raise ValueError(f"data file {path} is empty: it has no {'document' if is_text else field}")


def read_messages(paths: Sequence[str | Path], *, field: str) -> Located:
    """What a field has, whatever it is, of files, directories and patterns.

    Raises:
        OSError, ValueError, MissingExtraError: as :func:`read_documents`; or a file is plain text.
    """
    for path in find_files(paths):
        yield from read_file(path, field=field, is_text=False)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files to read, in the order of reading.

    Args:
        paths: files, in the order written; directories, of which every file that ends in .txt,
            .jsonl, .tar or .parquet, packed or not, is taken, in folders too, hidden ones left
            out; patterns with ``*``, ``?``, ``[a-z]`` and ``**`` for folders, of which every
            file is taken. Files of a directory or pattern are sorted by path. What is named twice
            is read twice.

    Raises:
        FileNotFoundError: nothing matches a pattern.
        ValueError: a directory has no such file; a path is empty, or leads to a pipe or a device.
    """
    if not all(map(str, paths)):
        raise ValueError("a data file is named '', which is no path")
    return [file for path in paths for file in _expand(Path(path))]


def read_texts(paths: Sequence[str | Path]) -> Tensor:
    """The bytes of text files, one after the other with nothing between, as tokens (N,) uint8.

    Unlike :func:`read_documents` it takes any encoding without zero bytes.

    Raises:
        FileNotFoundError, IsADirectoryError, PermissionError: naming the file.
        ValueError: a file is empty, or is no text (it has a zero byte).
    """
    return torch.cat([encode(_content(_readable(Path(path)))) for path in paths])


def _expand(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if _is_data(file, path))
        if not files:
            raise ValueError(
                f"data directory {path} has no file that ends in {', '.join(_PLAIN)}, or packed in "
                f"{', '.join(_PACKED)}"
            )
        return files
    if set("*?[") & set(str(path)) and not path.exists():
        names = glob.glob(str(path), recursive=True)
        files = sorted(file for file in map(Path, names) if file.is_file())
        if not files:
            raise FileNotFoundError(f"no data file matches the pattern {str(path)!r}")
        return files
    return [_readable(path)]


def _readable(path: Path) -> Path:
    """Not what would be waited for, or ends with the first reading."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ValueError(f"data file {path} is a pipe, a socket or a device; a file expected")
    return path


def _is_data(file: Path, directory: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(directory).parts)
    return not hidden and file.name.lower().endswith(_IN_DIRECTORIES) and file.is_file()


def _suffix(path: Path) -> str:
    name = path.name.lower()
    if name.endswith(".tgz"):
        return ".tar"
    return Path(name[: -len(path.suffix)] if path.suffix.lower() in _PACKED else name).suffix


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """The content as a stream."""
    packing = path.suffix.lower().replace(".tgz", ".gz")
    if packing not in _PACKED:
        with path.open("rb") as plain:
            yield plain
        return
    tool, open_packed = _PACKED[packing]
    with open_packed(path) as file:
        try:
            yield file
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # of the disk, not of what is on it
                raise
            text = f"data file {path} is damaged, or not packed with {tool}: {error}"
            raise ValueError(text) from error


def _open_zstd(path: Path) -> IO[bytes]:
    arrow = require("pyarrow", f"data file {path}: zstd")
    stream = arrow.input_stream(str(path), compression="zstd")
    return cast(IO[bytes], io.BufferedReader(stream, 1 << 16))  # it has no lines of its own


_PACKED: Mapping[str, tuple[str, Callable[[Path], IO[bytes]]]] = {
    ".gz": ("gzip", lambda path: cast(IO[bytes], gzip.open(path, "rb"))),
    ".bz2": ("bzip2", lambda path: cast(IO[bytes], bz2.open(path, "rb"))),
    ".xz": ("xz", lambda path: cast(IO[bytes], lzma.open(path, "rb"))),
    ".zst": ("zstd", _open_zstd),
}


def _content(path: Path) -> bytes:
    with _unpacked(path) as file:
        content = file.read()
    if not content:
        raise ValueError(f"data file {path} is empty; a text file expected")
    if b"\0" in content:
        raise ValueError(
            f"data file {path} is binary: a zero byte at {content.index(0)}; a text file expected"
        )
    return content


def _read_text(path: Path, field: str, is_text: bool) -> Located:
    content = _content(path)
    try:
        yield f"data file {path}", content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _not_utf8(f"data file {path}, line {line}", error) from error


def _read_jsonl(path: Path, field: str, is_text: bool) -> Located:
    with _unpacked(path) as file:
        for number, line in enumerate(file, 1):
            where = f"data file {path}, line {number}"
            if line.strip():
                yield where, _field_of(_parsed(line, where), field, where)


def _parsed(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: JSON expected, got {_shortened(line)} ({error.msg} at column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise ValueError(f"{where}: JSON expected that Python can read: {error}") from error


def _field_of(row: Any, field: str, where: str) -> Any:
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: an object with the field {field!r} expected, got {_shortened(row)}"
        )
    if field not in row:
        raise ValueError(_missing(where, "field", field, row))
    return row[field]


def _read_tar(path: Path, field: str, is_text: bool) -> Located:
    with _unpacked(path) as file:
        try:
            for name, members in samples(file):
                where = f"data file {path}, sample {name!r}"
                yield where, _of_sample(members, field, is_text, where)
        except (DamagedArchiveError, tarfile.TarError) as error:
            raise ValueError(f"data file {path} is damaged, or no tar: {error}") from error
        while file.read(1 << 20):  # what is packed is checked at its end
            pass


def _of_sample(members: Mapping[str, bytes], field: str, is_text: bool, where: str) -> Any:
    """A member named after the field (``text``: also ``txt``), or that field of one of JSON."""
    also = ("txt" if field == "text" else field) if is_text else f"{field}.json"
    for name in (also, field):
        if name in members and not is_text:
            return _parsed(members[name], f"{where}, {name}")
        if name in members:
            try:
                return members[name].decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{where}, {name}", error) from error
    if "json" not in members:
        raise ValueError(_missing(where, "member", field, members))
    return _field_of(_parsed(members["json"], where), field, where)


def _read_parquet(path: Path, field: str, is_text: bool) -> Located:
    arrow = require("pyarrow", f"data file {path}: Parquet")
    parquet = require("pyarrow.parquet", f"data file {path}: Parquet")
    with path.open("rb") as stream:
        try:
            file = parquet.ParquetFile(stream, page_checksum_verification=True)
            yield from _rows(arrow, file, field, is_text, f"data file {path}")
        except (arrow.ArrowException, OSError) as error:
            raise ValueError(f"data file {path} is damaged, or no Parquet: {error}") from error


def _rows(arrow: Any, file: Any, field: str, is_text: bool, where: str) -> Located:
    schema = file.schema_arrow
    if schema.names.count(field) > 1:
        raise ValueError(f"{where}: {schema.names.count(field)} columns are named {field!r}")
    if field not in schema.names:
        raise ValueError(_missing(where, "column", field, schema.names))
    dtype = schema.field(field).type
    if arrow.types.is_dictionary(dtype):
        dtype = dtype.value_type
    is_large = arrow.types.is_large_string(dtype)
    if is_text and not (is_large or arrow.types.is_string(dtype)):
        raise ValueError(f"{where}: strings expected in the column {field!r}, got {dtype}")
    row = 0
    for batch in file.iter_batches(batch_size=_ROWS, columns=[field], use_threads=False):
        column = batch.column(0)
        if is_text:  # as bytes: texts that the format's own reader has not looked at
            column = column.cast(dtype).cast(arrow.large_binary() if is_large else arrow.binary())
        for value in column:
            row += 1
            try:
                found = value.as_py()
                found = found.decode("utf-8") if isinstance(found, bytes) else _without_null(found)
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{where}, row {row}", error) from error
            yield f"{where}, row {row}", found


def _without_null(value: Any) -> Any:
    """Without the entries that Arrow gives every object of a column because some have them."""
    if isinstance(value, dict):
        return {name: _without_null(v) for name, v in value.items() if v is not None}
    return [_without_null(v) for v in value] if isinstance(value, list) else value


def _checked(where: str, text: Any, field: str) -> str:
    """Text that every tokenizer takes: no U+0000, which no text has, and no half of a pair."""
    if not isinstance(text, str):
        raise ValueError(f"{where}: a string expected in {field!r}, got {_shortened(text)}")
    if "\0" in text:
        raise ValueError(f"{where}: text expected, got U+0000 at {text.index(chr(0))}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where}: text expected, got the surrogate U+{ord(text[error.start]):04X} without its "
            f"pair at {error.start}"
        ) from error
    return text


def _missing(where: str, kind: str, name: str, there: Any) -> str:
    names = ", ".join(map(str, there)) or "none"
    return f"{where}: there is no {kind} {name!r}; the {kind}s there are: {names}"


def _not_utf8(where: str, error: UnicodeDecodeError) -> ValueError:
    byte = error.object[error.start]
    return ValueError(f"{where}: UTF-8 expected, got the byte {byte:#04x} ({error.reason})")


def _shortened(value: Any) -> str:
    text = value.decode("utf-8").rstrip() if isinstance(value, bytes) else json.dumps(value)
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


_READERS: Mapping[str, Callable[[Path, str, bool], Located]] = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".tar": _read_tar,
}
_PLAIN = (".txt", ".jsonl", ".tar", ".parquet")
_IN_DIRECTORIES = (*_PLAIN, ".tgz", *(a + b for a in _PLAIN[:3] for b in _PACKED))
