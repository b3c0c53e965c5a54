"""How does a checkpoint get to the disk, so that it is complete or not there?

Rank 0 takes the folder, each rank writes what it owns and says so in a small file, and rank 0
publishes the manifest when all of that is on the disk. Ranks talk before and after, and not while
they write: that may be in a thread, while training goes on (``background``).
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from anychip.contract import Communicator
from anychip.train import files, lock
from anychip.train.checkpoint import folder, manifest, writing
from anychip.train.checkpoint.agreement import attempt, is_first
from anychip.train.checkpoint.boxes import Box
from anychip.train.checkpoint.folder import CheckpointError
from anychip.train.checkpoint.manifest import Stored, StoredTensor, TensorFile
from anychip.train.checkpoint.parts import Piece

WAIT_S = 10.0
"""For another process that saves into the same directory; for files that others have written."""
_PAUSE_S = 0.02


class Saving:
    """One save on one rank. :meth:`write` and :meth:`publish` talk to no other rank.

    Attributes:
        token: the same on all ranks, and in names of this save's files only.
        pieces: what this rank writes.
        about: what it tells rank 0 of the tensors that they are of.
        progress: what rank 0 writes beside tensors; bytes: as they go into the file.
        all_have_written: set when that is known.
        given_up: set when nobody waits for the checkpoint any more.
    """

    def __init__(self, path: Path, *, step: int, comm: Communicator | None, keep: int) -> None:
        self.path, self.step, self.comm, self.keep = path, step, comm, keep
        self.all_have_written, self.given_up = threading.Event(), threading.Event()
        self.token, self.about = "", dict[str, Any]()
        self.pieces: Sequence[Piece] = ()
        self.progress: Any = {}
        self._folder = ExitStack()

    def tried(self, action: Callable[[], Any]) -> None:
        """Attempts something; an OSError then says what of this checkpoint and the one before."""
        try:
            attempt(self.comm, action)
        except OSError as error:
            before = "the one before is intact"
            if not folder.has_manifest(self.path):
                before = "there was none before"
            cause: Any = error.__cause__ if isinstance(error.__cause__, OSError) else error
            text = f"the checkpoint of step {self.step} was not written; {before}: {cause.strerror}"
            raise files.NotWrittenError(error.errno, text, str(self.path)) from error

    def take(self) -> None:
        """The folder is this job's until :meth:`close`."""
        if is_first(self.comm):
            folder.require_ours(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._folder.enter_context(lock.hold(self.path, wait_s=WAIT_S))
            self._folder.callback(_clean, self.path)

    def close(self) -> None:
        """Nothing is left of a save that failed, and the folder is free."""
        self._folder.close()

    def finish(
        self, write: Callable[[], Any] | None = None, publish: Callable[[], Any] | None = None
    ) -> None:
        """Writes and publishes, or asks for what a thread has done of it. A collective call."""
        self.tried(write or self.write)
        self.all_have_written.set()
        self.tried(publish or self.publish)

    def _listing(self, rank: int) -> Path:
        return self.path / f"written-{self.token}-{rank}{files.PARTIAL}"

    def write(self) -> None:
        """This rank's file of tensors, and another that says where in it what is."""
        written = writing.write_tensors(self.path, self.pieces, self.check_wanted)
        content = {**self.about, "files": written.files, "boxes": written.boxes}
        listing = self._listing(0 if self.comm is None else self.comm.rank)
        with files.fresh(listing) as file:
            file.write(json.dumps(content).encode())
            file.flush()
            Path(file.name).replace(listing)

    def check_wanted(self) -> None:
        """Raises CheckpointError when nobody waits for the checkpoint any more."""
        if self.given_up.is_set():
            raise CheckpointError(f"the checkpoint of step {self.step} was given up")

    def publish(self) -> None:
        """Writes the manifest when all ranks have written; for rank 0."""
        if is_first(self.comm):
            ranks = range(1 if self.comm is None else self.comm.world_size)
            tensors, named = _put_together([self._wait_for(rank) for rank in ranks])
            file = writing.write_values(self.path, "progress", self.progress)
            if self.keep > 1:
                manifest.keep_as_older(self.path)
            manifest.write(self.path, self.step, file, tensors, named)
            _sweep(self.path, _kept(self.path, self.step, self.keep - 1))

    def _wait_for(self, rank: int) -> dict[str, Any]:
        """What a rank says that it has written."""
        late = None
        while True:
            with suppress(FileNotFoundError):
                return dict(json.loads(self._listing(rank).read_bytes()))
            self.check_wanted()
            # Nobody has to tell when a process ends that has not closed its saver.
            has_come = self.all_have_written.is_set() or not threading.main_thread().is_alive()
            if has_come and late is None:
                late = time.monotonic() + WAIT_S
            if late is not None and time.monotonic() > late:
                raise CheckpointError(
                    f"{self.path} has no file of rank {rank}, which has written one: the ranks see "
                    "different directories; give one that all share"
                )
            self.given_up.wait(_PAUSE_S)


def _clean(path: Path) -> None:
    # Why it failed has been said, and what is left over the next save removes.
    with suppress(OSError, CheckpointError):
        _sweep(path, list(folder.older(path).values()))


def _sweep(path: Path, older: Sequence[str]) -> None:
    """Leaves what the last manifest and some older ones name."""
    named = [lock.NAME]
    for name in [folder.MANIFEST, *older] if folder.has_manifest(path) else []:
        named += [name, *manifest.read(path, name).names]
    folder.sweep(path, keep=named)


def _kept(path: Path, step: int, count: int) -> list[str]:
    """The last manifests before a step that are whole; what is not before it, a run has left."""
    found: list[str] = []
    for before, name in folder.older(path).items():
        if before < step and len(found) < count:
            with suppress(CheckpointError):
                manifest.read(path, name)
                found.append(name)
    return found


def _put_together(
    found: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, StoredTensor], dict[str, TensorFile]]:
    """The tensors that ranks have written boxes of, and the files."""
    tensors: dict[str, StoredTensor] = {}
    stages: dict[str, int] = {}
    aliases: dict[str, str] = {}
    named: dict[str, TensorFile] = {}
    for mine in sorted(found, key=lambda each: int(each["stage"])):
        named |= {name: TensorFile(*about) for name, about in mine["files"].items()}
        aliases |= mine["aliases"]
        for name, (dtype, shape) in mine["tensors"].items():
            # What several stages have (a buffer) is saved as the first of them has it.
            if stages.setdefault(name, mine["stage"]) == mine["stage"]:
                tensors.setdefault(name, StoredTensor(manifest.BY_NAME[dtype], tuple(shape), []))
        for name, (box, *where) in mine["boxes"]:
            if stages[name] == mine["stage"]:
                tensors[name].stored.append(Stored(Box(*map(tuple, box)), *where))
    for name, first in aliases.items():
        tensors.setdefault(name, tensors[first])
    return tensors, named
