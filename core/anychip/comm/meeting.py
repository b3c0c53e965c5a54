"""How the processes of a job meet, and agree on who has not come.

Processes do not start at the same time, and so their time limits do not end at the same time: the
first that gives up would be gone, with the store if that is its own, while another still waits and
would then blame it. So each rank has a place in the store, and who gives up first writes into the
empty ones how long it has waited. That wakes all who wait; a rank that comes after all finds it.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING

from anychip.comm.ledger import ranks_text
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
        CommunicationError: ranks did not come within the time limit of the first that gave up.
            Every rank that does come names the same ones; or rank 0, if the store is gone.
    """
    places = [f"place/{other}" for other in range(world_size)]
    try:
        store.compare_set(places[rank], "", _HERE)
        try:
            store.wait(places, timedelta(seconds=timeout_s))
        except RuntimeError:  # the time is up, or the store is gone, which the next call tells
            for place in places:
                store.compare_set(place, "", f"{timeout_s:g}")
        # What is in a place stays there: all ranks read the same.
        found = [value.decode() for value in store.multi_get(places)]
        absent = tuple(other for other, text in enumerate(found) if text != _HERE)
        if not absent:
            return
        store.set(f"told/{rank}", "")
        told = [f"told/{other}" for other in range(world_size) if other not in absent]
        with contextlib.suppress(RuntimeError):
            store.wait(told, timedelta(seconds=_NEWS_S))
    except RuntimeError as error:
        text = "the store, on rank 0's machine, cannot be reached any more"
        raise CommunicationError(where, text, ranks=(0,)) from error
    text = f"{ranks_text(absent)} did not come within {found[absent[0]]} s"
    raise CommunicationError(where, text, ranks=absent)
