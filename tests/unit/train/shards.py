"""Shards of every format, written for tests."""

import bz2
import gzip
import io
import json
import lzma
import os
import tarfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from anychip.train.preparing import growing


def zstd(content: bytes) -> bytes:
    buffer = pa.BufferOutputStream()
    with pa.CompressedOutputStream(buffer, "zstd") as stream:
        stream.write(content)
    return bytes(buffer.getvalue())


PACK: Mapping[str, Callable[[bytes], bytes]] = {
    "": bytes, ".gz": lambda content: gzip.compress(content, mtime=0), ".bz2": bz2.compress,
    ".xz": lzma.compress, ".zst": zstd,
}  # fmt: skip
PACKED = [f"{plain}{packing}" for plain in (".jsonl", ".tar") for packing in PACK]
EVERY = [*PACKED, ".tgz", ".parquet"]


def documents(count: int, first: int = 0) -> list[str]:
    return [f"\u00e9 {i} " + f"word{i % 17} " * (i % 23) for i in range(first, first + count)]


def tar(samples: Sequence[Mapping[str, str]]) -> bytes:
    """Of each sample the members by their endings, beside one that nobody asks for."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, sample in enumerate(samples):
            for kind, text in {"cls": "7", **sample}.items():
                info = tarfile.TarInfo(f"folder.d/{number:06}.{kind}")
                content = text.encode()
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def write(path: Path, documents: Sequence[Any], field: str = "text") -> Path:
    """A shard whose format is that of its name."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({field: list(documents)}), path, row_group_size=7)
        return path
    name = path.name.replace(".tgz", ".tar.gz")
    packing = next(end for end in reversed(PACK) if name.endswith(end))
    plain = "".join(json.dumps({field: document}) + "\n" for document in documents).encode()
    if ".tar" in name:
        is_text = field == "text"
        kind = "txt" if is_text else f"{field}.json"
        plain = tar([{kind: d if is_text else json.dumps(d)} for d in documents])
    path.write_bytes(PACK[packing](plain))
    return path


class InThread:
    """What :mod:`anychip.train.preparing.growing` has a process do, in a thread of this one."""

    def __init__(self, asked: dict[str, Any], descriptor: int) -> None:
        self.stdin, self.stdout, self.returncode = io.BytesIO(), io.BytesIO(), 0
        given = {**asked, "taken": os.dup(descriptor)}
        self._thread = threading.Thread(target=growing.do, args=(given, self.stdout))
        self._thread.start()

    def poll(self) -> int | None:
        if self._thread.is_alive():
            return None
        self.stdout.seek(0)
        return 0

    def wait(self, timeout: float) -> int:
        self._thread.join()
        return 0
