"""How the processes of a job meet, and agree on who has not come.

Processes do not start at the same time, and so their time limits do not end at the same time: the
first that gives up would be gone, with the store if that is its own, while another still waits and
would then blame it. Whoever gives up first therefore says so in the place of each rank that is not
there. That wakes all who wait, and it is what such a rank finds if it comes after all.
"""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from typing import TYPE_CHECKING

from anychip.contract.collectives.ledger import ranks_text
from anychip.contract.errors import CommunicationError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_HERE = "here"
_NEWS_S = 3.0
"""How long a rank that gives up keeps its process, and so perhaps the store, for the others."""


def meet(store: Store, rank: int, world_size: int, *, timeout_s: float, where: str) -> None:
    """Waits until every rank is there.

    Args:
        store: with keys of this job alone.
        rank: of this process.
        timeout_s: seconds that a rank waits for the others.
        where: what an error says first.

    Raises:
        CommunicationError: ranks did not come within the time limit of the first that waited.
            Every rank that does come names the same ones; or rank 0, if the store is gone.
    """
    places = [f"place/{other}" for other in range(world_size)]
    try:
        store.compare_set(places[rank], "", _HERE)
        try:
            store.wait(places, timedelta(seconds=timeout_s))
        except RuntimeError:  # the time is up, or the store is gone, which the next call tells
            _give_up(store, places)
        found = [value.decode() for value in store.multi_get(places)]
        absent = tuple(
            sorted({late for text in found if text != _HERE for late in json.loads(text)})
        )
        if not absent:
            return
        store.set(f"told/{rank}", "")
        told = [f"told/{other}" for other, text in enumerate(found) if text == _HERE]
        with contextlib.suppress(RuntimeError):
            store.wait(told, timedelta(seconds=_NEWS_S))
    except RuntimeError as error:
        text = "the store cannot be reached any more, nor the process of rank 0 that has it"
        raise CommunicationError(where, text, ranks=(0,)) from error
    text = f"{ranks_text(absent)} did not come within {timeout_s:g} s"
    raise CommunicationError(where, text, ranks=absent)


def _give_up(store: Store, places: list[str]) -> None:
    absent = [rank for rank, place in enumerate(places) if not store.check([place])]
    for rank in absent:
        store.compare_set(places[rank], "", json.dumps(absent))
