"""How is a directory prepared, once, in bounded memory, and gone on with after whatever ended it?

One process reads the shards in order and writes the tokens; others measure and encode in between.
Every second or so what is written is brought to the disk, and beside it how far the reading was:
going on cuts off what is behind that, and gives the same bytes as if nothing had happened, so that
what is before it may be read. The description is written last, in one step: before that the
directory is not prepared.
"""

from __future__ import annotations

import io
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from anychip.train import data, files, lock
from anychip.train.data import prepared
from anychip.train.preparing.work import Document, Done, Preparer, Request
from anychip.train.preparing.workers import in_order

PROGRESS = "progress.npz"
SAVED_EVERY_S = 1.0
"""From one saving to the next; up to 30 times that, so that saving takes at most 1/20 of it."""

CHARACTERS = 1 << 20
"""Of a group of documents, which is given to a worker at once."""


class Progress(NamedTuple):
    """How far it is: files of so many, and what was found in them."""

    files: int
    num_files: int
    documents: int
    tokens: int


class Damage(NamedTuple):
    """What was left out of a file, and why: all behind so many of its documents."""

    file: str
    documents: int
    why: str


@dataclass(kw_only=True, slots=True)
class _Group:
    """Documents, and where reading goes on behind them: a file's number, and documents in it."""

    documents: list[Document] = field(default_factory=list)
    size: int = 0
    empty: int = 0
    damaged: list[Damage] = field(default_factory=list)
    file: int = 0
    behind: int = 0


@dataclass(kw_only=True, slots=True)
class _Report:
    """What the description says of the work."""

    documents: int = 0
    empty: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    damaged: list[list[Any]] = field(default_factory=list)
    restarted_workers: int = 0


def prepare(
    request: Request,
    out: Path,
    *,
    num_workers: int = 0,
    skip_corrupt: bool = False,
    resume: bool = False,
    taken: int | None = None,
    note: Callable[[str], object] = lambda text: None,
    show: Callable[[Progress], object] = lambda progress: None,
) -> dict[str, Any]:
    """Prepares a directory, and returns its description.

    Args:
        num_workers: processes that measure and encode; 0: none, this one does.
        skip_corrupt: what is behind the damage in a file is left out, and counted.
        resume: goes on in a directory that was not finished.
        taken: the lock of the directory, where who has started this has it.
        note: is told in a line of what was left out and of workers that were started again.

    Raises:
        FileExistsError: there is something in the directory already.
        FileNotFoundError: there is nothing to go on with, or no such source.
        OSError, ValueError: as reading raises; the tokenizer or a filter is wrong; what is gone on
            with is of another request; no document is left.
        WorkerError: a worker ended twice over the same documents.
    """
    _require_place(out, resume)
    work, paths = Preparer(request), data.find_files([*request.sources])
    out.mkdir(parents=True, exist_ok=True)
    with lock.hold(out, taken=taken), ExitStack() as stack:
        writer = stack.enter_context(_Writer(work, out, paths))
        groups = _groups(paths, request, skip_corrupt, writer.file, writer.behind)
        results = in_order(
            groups, lambda group: group.documents, work, num_workers=num_workers, note=note
        )
        stack.callback(results.close)  # type: ignore[attr-defined]
        before = writer.report.restarted_workers
        for group, done, restarts in results:
            writer.report.restarted_workers = before + restarts
            for damage in group.damaged:
                note(f"left out: {damage.why}; documents of it that stay: {damage.documents}")
            writer.add(group, done)
            show(Progress(group.file, len(paths), writer.report.documents, writer.num_tokens))
        return writer.publish()


def _require_place(out: Path, resume: bool) -> None:
    if (out / prepared.DESCRIPTION).exists():
        raise FileExistsError(f"{out} is prepared already; nothing was written")
    if resume and not (out / PROGRESS).exists():
        raise FileNotFoundError(f"there is nothing in {out} to go on with: it has no {PROGRESS}")
    if not resume and out.exists() and any(not _is_left(path) for path in out.iterdir()):
        text = "to go on in it, add --resume" if (out / PROGRESS).exists() else "name another --out"
        raise FileExistsError(f"{out} exists and is not empty; nothing was written; {text}")


def _is_left(path: Path) -> bool:
    """By a process that was killed before it had done anything."""
    return path.name == lock.NAME or path.name.endswith(files.PARTIAL)


def _groups(
    paths: Sequence[Path], request: Request, skip_corrupt: bool, first: int, behind: int
) -> Iterator[_Group]:
    """The documents of files, from a place on."""
    is_text = not request.has_messages
    group = _Group(file=first, behind=behind)
    for number in range(first, len(paths)):
        seen, skipped = 0, behind if number == first else 0
        try:
            for where, document in data.read_file(
                paths[number], field=request.field, is_text=is_text
            ):
                seen += 1
                if seen <= skipped:
                    continue
                group.empty += not document
                if document:
                    group.documents.append((where, document))
                    group.size += len(document if isinstance(document, str) else str(document))
                group.file, group.behind = number, seen
                if group.size >= CHARACTERS:
                    yield group
                    group = _Group(file=number, behind=seen)
        except ValueError as error:  # an OSError is of the disk, not of what is on it
            if not skip_corrupt:
                go_on = (
                    "anychip data prepare --resume --skip-corrupt, or a run with "
                    "data.skip_corrupt=true, goes on without the rest of it"
                )
                raise ValueError(f"{error}; {go_on}") from error
            group.damaged.append(Damage(str(paths[number]), seen, str(error)))
        group.file, group.behind = number + 1, 0
    yield group


class _Writer:
    """What is in the directory so far; a context that closes its files."""

    def __init__(self, work: Preparer, out: Path, paths: Sequence[Path]) -> None:
        self.work, self.out = work, out
        files = [[str(path), path.stat().st_size] for path in paths]
        self.request = {**asdict(work.request), "files": files}
        # What makes the tokens; of the rest a directory may be gone on with under other names.
        self.kind = [work.tokenizer.name, work.template]
        self.report = _Report(dropped=dict.fromkeys(work.request.filters, 0))
        self.file = self.behind = self.num_tokens = self.num_documents = 0
        if (out / PROGRESS).exists():
            self._restore()
        self._is_whole = True
        self._files: list[IO[bytes]] = []
        self._digests = []
        self._save()  # from here on there is something to go on with
        for name, nbytes in (
            (prepared.TOKENS, self.num_tokens * work.dtype.itemsize),
            (prepared.DOCUMENTS, self.num_documents * 8),
        ):
            file = open(out / name, "ab", opener=_not_through_links)
            self._files.append(file)
            if file.tell() < nbytes:
                raise prepared.PreparedError(f"{out / name} is shorter than {PROGRESS} says")
            file.truncate(nbytes)
            self._digests.append(prepared.sha256_of(out / name))

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        try:
            if kind is not None and self._is_whole:  # nothing of what is done is done again
                self._save()
        finally:
            for file in self._files:
                file.close()

    def add(self, group: _Group, done: Done) -> None:
        """Appends what is left of a group, and now and then says how far it is."""
        self._is_whole = False
        lengths, tokens = self._decided(done)
        parts, ends = list[Any](), list[int]()
        between = np.array([self.work.tokenizer.end_of_document], self.work.dtype)
        for length, row in zip(lengths, np.split(tokens, np.cumsum(lengths)), strict=False):
            if self.num_tokens and not self.work.request.has_messages:
                parts.append(between)
                self.num_tokens += 1
            parts.append(row)
            self.num_tokens += length
            ends.append(self.num_tokens)
        self.num_documents += len(ends)
        little = self.work.dtype.newbyteorder("<")
        found = np.concatenate([np.empty(0, self.work.dtype), *parts]).astype(little).tobytes()
        for file, digest, content in zip(
            self._files, self._digests, (found, np.array(ends, "<i8").tobytes()), strict=True
        ):
            file.write(content)
            digest.update(content)
        report = self.report
        report.documents += len(group.documents) + group.empty
        report.empty += group.empty
        report.damaged += [list(damage) for damage in group.damaged]
        for name, count in zip(self.work.request.filters, done.dropped, strict=True):
            report.dropped[name] += count
        self.file, self.behind, self._is_whole = group.file, group.behind, True
        if time.monotonic() >= self._due_s:
            self._save()

    def _decided(self, done: Done) -> tuple[list[int], Any]:
        """Lengths and tokens of the documents that filters keep which decide in order."""
        stays = np.ones(len(done.lengths), bool)
        for number, measures in done.measures.items():
            name, rule = self.work.request.filters[int(number)], self.work.filters[int(number)]
            for place in np.flatnonzero(stays):
                stays[place] = rule.keeps(measures[place])
                self.report.dropped[name] += int(not stays[place])
        lengths = np.array(done.lengths, np.int64)
        return lengths[stays].tolist(), done.tokens[np.repeat(stays, lengths)]

    def _save(self) -> None:
        """Brings what was written to the disk, and then how far that is."""
        begun = time.monotonic()
        for file in self._files:
            files.sync(file)
        about = {
            "request": self.request, "kind": self.kind, "report": asdict(self.report),
            "num_files": len(self.request["files"]), "file": self.file,
            "behind": self.behind, "tokens": self.num_tokens, "documents": self.num_documents,
        }  # fmt: skip
        states: dict[str, Any] = {
            f"state{n}": rule.state() for n, rule in enumerate(self.work.filters)
        }
        buffer = io.BytesIO()
        text = np.frombuffer(json.dumps(about).encode(), np.uint8)
        np.savez(buffer, about=text, **states)  # one file, so that they are of one moment
        files.write(self.out / PROGRESS, buffer.getvalue())
        took = time.monotonic() - begun
        self._due_s = begun + max(SAVED_EVERY_S, min(30 * SAVED_EVERY_S, 20 * took))

    def _restore(self) -> None:
        about, states = progress_of(self.out, with_states=True)
        mine = json.loads(json.dumps({**self.request, "tokenizer": self.kind}))
        theirs = {**about["request"], "tokenizer": about.get("kind")}
        wanted = [key for key in mine if key != "sources" and theirs.get(key) != mine[key]]
        if wanted:
            raise ValueError(
                f"{self.out} was begun with another {' and '.join(wanted)}; go on with the "
                "same, or name another --out"
            )
        for number, rule in enumerate(self.work.filters):
            rule.restore(states[f"state{number}"])
        self.report = _Report(**about["report"])
        self.file, self.behind = about["file"], about["behind"]
        self.num_tokens, self.num_documents = about["tokens"], about["documents"]

    def publish(self) -> dict[str, Any]:
        """Writes the description: from here on the directory is prepared."""
        if not self.num_documents:
            raise ValueError(f"no document is left of {self.report.documents} that were read")
        self._save()
        tokenizer = self.work.tokenizer
        if isinstance(tokenizer, data.BPETokenizer):
            tokenizer.save(self.out / "tokenizer.json")
        tokens, documents = (digest.hexdigest() for digest in self._digests)
        about = {
            "schema": prepared.SCHEMA, "tokenizer": tokenizer.name,
            "template": self.work.template, "dtype": self.work.dtype.name,
            "is_marked": self.work.request.has_messages, "tokens": self.num_tokens,
            "documents": self.num_documents,
            "sha256": {"tokens": tokens, "documents": documents},
            "request": self.request, "report": asdict(self.report),
        }  # fmt: skip
        files.write(self.out / prepared.DESCRIPTION, json.dumps(about, indent=2) + "\n")
        (self.out / PROGRESS).unlink()
        return about


def progress_of(
    out: Path, *, with_states: bool = False
) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """How far a directory is that is not finished, and the states of its filters.

    Raises:
        FileNotFoundError: it is finished, or not begun.
        PreparedError: the file is damaged.
    """
    content = files.open_to_read(out / PROGRESS)
    try:
        with content, np.load(content, allow_pickle=False) as found:
            states = {name: found[name] for name in found.files if with_states or name == "about"}
        return json.loads(states.pop("about").tobytes()), states
    except (KeyError, ValueError, zipfile.BadZipFile) as error:
        raise prepared.PreparedError(f"{out / PROGRESS} is damaged: {error}") from error


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
