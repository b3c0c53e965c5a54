"""The host's connections between processes: one gloo context, full mesh."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from anychip.comm.messages import Messages
from anychip.comm.store import part_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from anychip.contract import Membership

_BREAK_TAG = 2**31 - 1


class Gloo:
    """Moves messages between the ranks of a job; connects to all of them when it is made.

    Args:
        address: of this machine, at which its ranks listen.
        why: it is these connections and not others, for reports.

    Attributes:
        description: for reports.
        send: (list of one tensor, rank in the world, tag) gives a Message, done when received.
        recv: the same, with the place where the message goes.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, address: str, timeout_s: float, why: str
    ) -> None:
        import torch.distributed as dist

        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [gloo.create_device(hostname=address)]
        self._group = gloo(part_of(store, "host"), rank, world_size, options)
        self.send, self.recv = self._group.send, self._group.recv
        self._peers = [peer for peer in range(world_size) if peer != rank]
        self._is_broken = False
        self.description = f"gloo messages, reduced on the host pairwise in rank order ({why})"

    def transport(self, group: Membership, timeout_s: float) -> Messages:
        """This rank's end of a group."""
        return Messages(self, group, timeout_s)

    def abort(self) -> None:
        """Closes this process's connections, which wakes whoever waits, here and at their ends.

        A message that was waited for in vain makes gloo close all connections of its context at
        once. Its abort() does not wake those who wait, and to destroy it waits for them.
        """
        import torch

        if self._is_broken:
            return
        self._is_broken, nothing = True, torch.empty(1, dtype=torch.uint8)
        for peer in self._peers:
            with contextlib.suppress(RuntimeError):
                self.recv([nothing], peer, _BREAK_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        del self._group, self.send, self.recv
