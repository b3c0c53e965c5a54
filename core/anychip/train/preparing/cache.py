"""Where is data kept that memory does not hold, and that nobody has prepared? In ``data.cache``.

Each set of files has a directory of its own, named after what they are now: paths, sizes, times of
the last change, and what makes tokens of them. Of the processes that want one, on this host or on
others that share the place, one has it prepared and the others wait; who comes later finds it.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from anychip.train import data
from anychip.train.config import Config
from anychip.train.data.prepared import DESCRIPTION
from anychip.train.data.rows import OPEN
from anychip.train.preparing.growing import Growing, Show, say_nothing
from anychip.train.preparing.work import Preparer, Request


def cached(names: Sequence[str], config: Config, *, show: Show = say_nothing) -> data.Prepared:
    """The tokens of files, when they are made.

    Raises:
        OSError, ValueError, MissingExtraError, WorkerError: as :func:`streamed` and what it gives.
    """
    tokens = streamed(names, config, show=show)
    tokens.wait(OPEN)
    return data.Prepared(tokens.path)


def streamed(
    names: Sequence[str], config: Config, *, share: int = 1, show: Show = say_nothing
) -> Growing:
    """The tokens of files, while they are made.

    Args:
        share: of so many that are made at once, this is one.
        show: is told how far it is, as long as somebody waits.

    Raises:
        OSError, ValueError, MissingExtraError: a file is not there, or a tokenizer or a filter; or
            what was made before is damaged.
    """
    request, out = request_of(names, config)
    if (out / DESCRIPTION).exists() and config.data.verify:
        data.Prepared(out).verify()
    return Growing(
        request, out, num_workers=num_workers() // share,
        skip_corrupt=config.data.skip_corrupt, show=show,
    )  # fmt: skip


def request_of(names: Sequence[str], config: Config) -> tuple[Request, Path]:
    """What is to be prepared of files, and the directory for it."""
    request = Request(
        sources=tuple(names),
        field=config.data.field,
        tokenizer=config.tokenizer_path,
        filters=config.data.filters,
    )
    made = Preparer(request)
    paths = data.find_files(names)
    files = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    what = [request.field, made.tokenizer.name, made.template, made.dtype.name, files]
    text = json.dumps([*what, *request.filters])
    return request, Path(config.data.cache) / hashlib.sha256(text.encode()).hexdigest()[:16]


def num_workers() -> int:
    """All cores but the one that reads and writes."""
    return len(os.sched_getaffinity(0)) - 1
