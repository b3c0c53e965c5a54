"""How is data trained on that memory does not hold, and that nobody has prepared? It is, before.

Each set of files has a directory of its own, named after what they are now: paths, sizes, times of
the last change, and what makes tokens of them. Of the processes that want one, on this host or on
others that share the place, one prepares it and the others wait; who comes later finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from anychip.train import data, lock
from anychip.train.config import Config
from anychip.train.data.prepared import DESCRIPTION
from anychip.train.preparing.pipeline import PROGRESS, Progress, prepare
from anychip.train.preparing.work import Preparer, Request

PAUSE_S = 0.2

Show = Callable[[Path, Progress], object]
"""Is told how far a directory is."""


def cached(config: Config, *, show: Show = lambda out, progress: None) -> Config:
    """The settings with prepared directories in the place of files, where ``data.cache`` is set.

    Waits while another process prepares one, and goes on with what one has left.

    Raises:
        OSError, ValueError, MissingExtraError, WorkerError: as :func:`.prepare`, but that the
            directory may be there.
    """
    settings = config.data
    if not settings.cache:
        return config
    asked = [(settings.files, bool(settings.weights)), (config.eval.files, False)]
    files, held_out = (
        tuple(name for part in _parts(names, alone) for name in _found(part, config, show))
        for names, alone in asked
    )
    return replace(
        config,
        data=replace(settings, files=files, cache=""),
        eval=replace(config.eval, files=held_out),
    )


def _parts(names: Sequence[str], alone: bool) -> list[list[str]]:
    """Files that become one directory; each its own, where a mixture weighs them."""
    groups = [[*group] for _, group in groupby(names, lambda name: data.is_prepared(Path(name)))]
    return [[name] for name in names] if alone else groups


def _found(names: list[str], config: Config, show: Show) -> list[str]:
    if data.is_prepared(Path(names[0])):
        return names
    request = Request(
        sources=tuple(names), field=config.data.field, tokenizer=config.tokenizer_path
    )
    out = Path(config.data.cache) / _key(request)
    while not (out / DESCRIPTION).exists():
        _prepare(request, out, show)
    return [str(out)]


def _key(request: Request) -> str:
    made = Preparer(request)
    paths = data.find_files([*request.sources])
    files = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in paths]
    what = [request.field, made.tokenizer.name, made.template, made.dtype.name, files]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]


def num_workers() -> int:
    """All cores but the one that reads and writes."""
    return len(os.sched_getaffinity(0)) - 1


def _prepare(request: Request, out: Path, show: Show) -> None:
    """Prepares it, or waits a little for who does."""
    is_begun = (out / PROGRESS).exists()
    try:
        prepare(
            request, out, num_workers=num_workers(), resume=is_begun,
            show=lambda progress: show(out, progress),
        )  # fmt: skip
    except (lock.DirectoryInUseError, FileExistsError, FileNotFoundError) as error:
        is_another = out.exists() and (lock.is_held(out) or (out / PROGRESS).exists() != is_begun)
        if not (is_another or (out / DESCRIPTION).exists()):
            if isinstance(error, FileExistsError):
                raise data.PreparedError(
                    f"{out} was begun, and has nothing to go on with; remove it to begin anew"
                ) from None
            raise
        time.sleep(PAUSE_S)
