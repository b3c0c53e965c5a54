"""What does a checkpoint consist of? Of each tensor the boxes, and where in which file each is.

``manifest.json`` is the last that a save writes, by one atomic rename. What it says is believed
only when it fits together: names of files stay in the folder, boxes tile their tensors, bytes lie
in their files.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import anychip
from anychip.train import files, schema
from anychip.train.checkpoint import boxes, folder
from anychip.train.checkpoint.boxes import Box
from anychip.train.checkpoint.parts import DTYPES, Part

FORMAT = "anychip-checkpoint"
VERSION = 3
WHOLE_TENSORS = 2
"""The version before, which is still read: three files of torch, with whole tensors."""

PARTS = ("model", "optimizer", "progress")
"""The files of that one."""


def name_of(dtype: torch.dtype) -> str:
    """A dtype in the manifest."""
    return str(dtype).removeprefix("torch.")


BY_NAME = {name_of(dtype): dtype for dtype in DTYPES}

_NAME = schema.Check(
    "a name like progress-0123456789abcdef.pt",
    lambda value: type(value) is str and folder.FILE.fullmatch(value) is not None,
)
_DTYPE = schema.Check(
    "a dtype like 'float32'", lambda value: type(value) is str and value in BY_NAME
)
_FILE = {"name": _NAME, "nbytes": schema.COUNT, "sha256": str}
_BOX = {
    "offsets": [schema.COUNT], "sizes": [schema.COUNT], "file": _NAME, "offset": schema.COUNT,
    "nbytes": schema.COUNT, "sha256": str,
}  # fmt: skip
_TENSOR_FILE = {"nbytes": schema.COUNT, "header_nbytes": schema.COUNT, "header_sha256": str}
_FORMS: Mapping[int, schema.Form] = {
    WHOLE_TENSORS: {"step": schema.COUNT, "files": dict.fromkeys(PARTS, _FILE)},
    VERSION: {
        "step": schema.COUNT,
        "progress": _FILE,
        "files": {str: _TENSOR_FILE},
        "tensors": {str: {"dtype": _DTYPE, "shape": [schema.COUNT], "boxes": [_BOX]}},
    },
}


class File(NamedTuple):
    """A file that is read as a whole."""

    name: str
    nbytes: int
    sha256: str


class TensorFile(NamedTuple):
    """A file of tensors, of which only the header is read as a whole."""

    nbytes: int
    header_nbytes: int
    header_sha256: str


class Stored(NamedTuple):
    """A box of a tensor: ``nbytes`` from ``offset`` on in a file, in the order of its elements."""

    box: Box
    file: str
    offset: int
    nbytes: int
    sha256: str


class StoredTensor(NamedTuple):
    """A tensor, and the boxes that tile it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stored: list[Stored]

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


class Manifest(NamedTuple):
    """What a checkpoint consists of.

    Attributes:
        version: of the format.
        step: updates done.
        files: that are read as a whole, by their part of the checkpoint.
        tensor_files: by name; none in version 2.
        tensors: by name; none in version 2.
        digest: of the manifest's bytes.
    """

    version: int
    step: int
    files: Mapping[str, File]
    tensor_files: Mapping[str, TensorFile]
    tensors: Mapping[str, StoredTensor]
    digest: str

    def of(self, part: Part) -> StoredTensor | None:
        """What has a part's values: where the dtype is another, its master or weight if it can."""
        found, other = self.tensors.get(part.name), self.tensors.get(part.otherwise or "")
        if other is None or (found is not None and found.dtype == part.dtype):
            return found
        return other if other.dtype == part.dtype else found

    @property
    def names(self) -> list[str]:
        """Of all files."""
        return [*(file.name for file in self.files.values()), *self.tensor_files]


def describe(dtype: torch.dtype, shape: tuple[int, ...] | torch.Size) -> str:
    """A tensor in words."""
    return f"{name_of(dtype)}{list(shape)}"


def write(
    path: Path,
    step: int,
    progress: File,
    tensors: Mapping[str, StoredTensor],
    tensor_files: Mapping[str, TensorFile],
) -> None:
    """Publishes a checkpoint whose files are in the folder.

    Raises:
        OSError: it could not be written; what was published before still is.
        RuntimeError: ranks have not written every element of a tensor exactly once.
    """
    for name, tensor in tensors.items():
        if not boxes.tile([stored.box for stored in tensor.stored], tensor.shape):
            raise RuntimeError(f"{name}: the ranks have not written every element exactly once")
    used = {stored.file for tensor in tensors.values() for stored in tensor.stored}
    content = {
        "format": FORMAT, "version": VERSION, "step": step, "anychip": anychip.__version__,
        "torch": torch.__version__, "progress": progress._asdict(),
        "files": {name: tensor_files[name]._asdict() for name in sorted(used)},
        "tensors": {name: _written(tensors[name]) for name in sorted(tensors)},
    }  # fmt: skip
    folder.sync(path)  # the files' names are on the disk before the manifest that has them
    files.write(path / folder.MANIFEST, json.dumps(content) + "\n")
    folder.sync(path)


def _written(tensor: StoredTensor) -> dict[str, Any]:
    found = [{**stored._asdict(), **stored.box._asdict()} for stored in tensor.stored]
    ordered = sorted(found, key=lambda entry: entry["offsets"])
    return {
        "dtype": name_of(tensor.dtype),
        "shape": list(tensor.shape),
        "boxes": [{key: entry[key] for key in _BOX} for entry in ordered],
    }


def keep_as_older(path: Path) -> None:
    """Gives the manifest that is there a second name, by its step; one that is damaged none."""
    with suppress(folder.CheckpointError, FileNotFoundError):
        content = (path / folder.MANIFEST).read_bytes()
        files.write(path / f"manifest-{read(path).step}.json", content)


def read(path: Path, name: str = folder.MANIFEST) -> Manifest:
    """A manifest in a folder, in its form.

    Raises:
        CheckpointError: it is damaged, not ours, or of another version.
    """
    try:
        with files.open_to_read(path / name) as file:
            content = file.read()
        found = _in_form(json.loads(content.decode("utf-8")))
        return _parsed(found, hashlib.sha256(content).hexdigest())
    except (ValueError, RecursionError) as error:
        problem = f"{name} is damaged, or is not ours: {error}"
        raise folder.refusal(path, problem) from error
    except OSError as error:
        problem = f"{name} cannot be read: {error.strerror}"
        raise folder.refusal(path, problem) from error


def _in_form(found: Any) -> dict[str, Any]:
    schema.check(found, {"format": schema.ANY}, "manifest.json")
    if found["format"] != FORMAT:
        raise ValueError(f"format {FORMAT!r} expected, got {found['format']!r:.40}")
    version = found.get("version")
    if type(version) is not int or version not in _FORMS:
        schema.check(found, {"version": schema.ANY, "anychip": str}, "manifest.json")
        raise ValueError(
            f"it has version {version!s:.40} of the format, written by anychip "
            f"{found['anychip']:.40}; this is anychip {anychip.__version__}, which reads "
            f"versions {WHOLE_TENSORS} and {VERSION}"
        )
    schema.check(found, _FORMS[version], "manifest.json")
    return dict(found)


def _file(entry: Mapping[str, Any]) -> File:
    return File(entry["name"], entry["nbytes"], entry["sha256"])


def _parsed(found: Mapping[str, Any], digest: str) -> Manifest:
    if found["version"] == WHOLE_TENSORS:
        parts = {part: _file(found["files"][part]) for part in PARTS}
        return Manifest(WHOLE_TENSORS, found["step"], parts, {}, {}, digest)
    for name in found["files"]:
        schema.check(name, _NAME, "a name in manifest.json['files']")
    tensor_files = {
        name: TensorFile(**{key: entry[key] for key in _TENSOR_FILE})
        for name, entry in found["files"].items()
    }
    tensors = {n: _tensor(n, entry, tensor_files) for n, entry in found["tensors"].items()}
    progress = {"progress": _file(found["progress"])}
    return Manifest(VERSION, found["step"], progress, tensor_files, tensors, digest)


def _tensor(name: str, entry: Mapping[str, Any], among: Mapping[str, TensorFile]) -> StoredTensor:
    """Raises ValueError when it does not fit together."""
    dtype, shape = BY_NAME[entry["dtype"]], tuple(entry["shape"])
    stored = []
    for each in entry["boxes"]:
        box = Box(tuple(each["offsets"]), tuple(each["sizes"]))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise ValueError(f"{name:.200}: a box of {len(shape)} dims expected, got {box}")
        if each["nbytes"] != box.numel * dtype.itemsize:
            raise ValueError(
                f"{name:.200}: {box} of {entry['dtype']} has not {each['nbytes']} bytes"
            )
        file = among.get(each["file"])
        if file is None or each["offset"] + each["nbytes"] > file.nbytes:
            raise ValueError(f"{name:.200}: {box} is not within a file of the checkpoint")
        stored.append(Stored(box, each["file"], each["offset"], each["nbytes"], each["sha256"]))
    if not boxes.tile([each.box for each in stored], shape):
        raise ValueError(f"{name:.200}: boxes that tile a tensor of shape {shape} expected")
    return StoredTensor(dtype, shape, stored)
