"""Which samples are in a tar file, as WebDataset has them? One after the other, from a stream.

Members that follow each other and have a name in common up to the first dot of its last part are a
sample; what is behind that dot says what a member is. Nothing is unpacked to the disk.

Source: the format of WebDataset, https://github.com/webdataset/webdataset.
"""

import tarfile
from collections.abc import Iterator
from typing import IO

from anychip.contract import AnychipError

_BLOCK = 512


class DamagedArchiveError(AnychipError, ValueError):
    """The archive ends before its end."""


class _Tail:
    """A stream that knows the last block that was read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.last = file, b""

    def read(self, size: int) -> bytes:
        found = self.file.read(size)
        self.last = (self.last + found[-_BLOCK:])[-_BLOCK:]
        return found


def samples(file: IO[bytes]) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Name of a sample, and its members.

    Raises:
        DamagedArchiveError, tarfile.TarError: it is no tar file, or not all of it is there.
    """
    tail, name, members = _Tail(file), "", dict[str, bytes]()
    with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            archive.members = []  # it would keep one for each, as long as the archive is open
            if not info.isfile():
                continue
            folder, slash, last = info.name.rpartition("/")
            stem, _, kind = last.partition(".")
            if members and name != folder + slash + stem:
                yield name, members
                members = {}
            name = folder + slash + stem
            content = archive.extractfile(info)
            assert content is not None
            members[kind.lower()] = content.read()
            if len(members[kind.lower()]) != info.size:
                raise DamagedArchiveError(f"it ends inside of the member {info.name!r}")
    # tarfile takes an archive that stops between two members for a whole one.
    if tail.last.strip(b"\0") or not tail.last:
        raise DamagedArchiveError("it ends without the empty block that an archive ends with")
    if members:
        yield name, members
