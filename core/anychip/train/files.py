"""How is a file of a run written, so that it is whole or not there, and where it seems to be?

It is made under a fresh name, brought to the disk, and renamed over the one before. No link that
somebody has put in the directory is followed, in writing or in reading, and nothing is waited for
that is no file.
"""

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from anychip.contract import AnychipError

PARTIAL = ".partial"
"""How the name of a file ends that is being written."""


class NotWrittenError(AnychipError, OSError):
    """What a run has to keep could not be written, whatever the number of the error."""


@contextmanager
def fresh(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside ``path``, durable when the block ends; the block renames it."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with partial.open("xb") as file:  # exclusive: follows no link
            yield file
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(file: IO[bytes]) -> Path:
    """Brings what was written to the disk, and returns the file's path, to rename it."""
    file.flush()
    os.fsync(file.fileno())
    return Path(file.name)


def write(path: Path, content: str | bytes) -> None:
    """Writes a file whole or not at all; one that was there is replaced in one step.

    Raises:
        NotWrittenError: the disk is full, or the directory cannot be written.
    """
    try:
        with fresh(path) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            sync(file).replace(path)
    except OSError as error:
        text = f"it was not written: {error.strerror}"
        raise NotWrittenError(error.errno, text, str(path)) from error


def open_to_append(path: Path) -> IO[str]:
    """A text file, made when it is not there."""
    return open(path, "a", encoding="utf-8", opener=_not_through_links)


def open_to_read(path: Path) -> IO[bytes]:
    """A file that is there.

    Raises:
        OSError: there is none, or it is a link, a pipe, a directory, a device.
    """
    file = open(path, "rb", opener=_not_through_links)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "a plain file expected, got something else", str(path))
    return file


def _not_through_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
