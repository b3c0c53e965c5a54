"""Has it worked on every rank? What one rank cannot do, none goes on with."""

import errno
from collections.abc import Callable
from typing import Any, TypeVar

from anychip.comm import gather_objects
from anychip.contract import Communicator
from anychip.train import files, lock
from anychip.train.checkpoint.folder import CheckpointError

T = TypeVar("T")

_KINDS: dict[str, type[Exception]] = {
    "CheckpointError": CheckpointError,
    "DirectoryInUseError": lock.DirectoryInUseError,
}


def attempt(comm: Communicator | None, action: Callable[[], T]) -> T:
    """Does something on each rank; when it fails on one, all raise. A collective call.

    Raises:
        OSError, CheckpointError, DirectoryInUseError: this rank's; else the first other rank's.
    """
    mine, result = None, None
    try:
        result = action()
    except (OSError, CheckpointError, lock.DirectoryInUseError) as error:
        mine = error
    if comm is not None and comm.world_size > 1:
        told = gather_objects(comm, None if mine is None else _told(mine))
        for rank, other in enumerate(told if mine is None else ()):
            if other is not None:
                raise _raised(rank, other)
    if mine is not None:
        raise mine
    return result  # type: ignore[return-value]  # nothing was raised: it is there


def _told(error: Exception) -> dict[str, Any]:
    number = error.errno if isinstance(error, OSError) else None
    text = error.strerror if isinstance(error, OSError) else str(error)
    return {"kind": type(error).__name__, "errno": number or errno.EIO, "text": text}


def _raised(rank: int, told: dict[str, Any]) -> Exception:
    text = f"rank {rank}: {told['text']}"
    if told["kind"] in _KINDS:
        return _KINDS[told["kind"]](text)
    return files.NotWrittenError(told["errno"], text)


def gather(comm: Communicator | None, value: Any, *, to_rank: int | None = None) -> list[Any]:
    """As :func:`anychip.comm.gather_objects`, also without others."""
    return [value] if comm is None else gather_objects(comm, value, to_rank=to_rank)


def is_first(comm: Communicator | None) -> bool:
    """This is the rank that publishes."""
    return comm is None or comm.rank == 0
