"""One process of :class:`anychip.bench.ranks.Ranks`: calls what it is told, and answers.

The first line of stdin says what it is, each further one is ``[function, arguments]``; a line of
its pipe is ``{"value": ...}`` or ``{"error": "..."}``.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import anychip
from anychip.bench.ranks import TIMEOUT_S
from anychip.contract import HOST_LIBRARY, Backend


@dataclass(slots=True)
class Place:
    """Where this process stands, and what it keeps from one call to the next.

    Attributes:
        held: of the module whose functions are called.
    """

    rank: int
    world_size: int
    chip: Backend
    held: Any = None

    @property
    def device(self) -> torch.device:
        """This rank's own, as far as there are enough."""
        return self.chip.device(self.rank % max(1, self.chip.device_count()))


def main() -> None:
    """Joins the others, then answers until stdin ends. Argument: file descriptor of the pipe."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    told = json.loads(sys.stdin.readline())

    def answer(make: Callable[[], Any]) -> bool:
        try:
            found = {"value": make()}
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers)
        return "value" in found

    place: Place | None = None
    module: Any = None

    def start() -> None:
        nonlocal place, module
        sys.path += [entry for entry in told["path"] if entry not in sys.path]
        place = _join(told)
        module = importlib.import_module(told["module"])

    if not answer(start):
        return
    for line in sys.stdin:
        function, arguments = json.loads(line)
        if not answer(partial(getattr(module, function), place, **arguments)):
            return


def _join(told: dict[str, Any]) -> Place:
    torch.set_num_threads(1)
    chip = anychip.use(told["backend"])
    place = Place(told["rank"], told["world_size"], chip)
    if place.device.index is not None:
        chip.set_device(place.device.index)
    limit = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", told["port"], None, False, limit)
    dist.init_process_group(
        chip.c10d_backend or HOST_LIBRARY, store=store, rank=place.rank,
        world_size=place.world_size, timeout=limit,
    )  # fmt: skip
    return place


if __name__ == "__main__":
    main()
