"""What moves the bytes of ranks' calls: the part of communication that a chip may bring itself.

All else is the same on every chip, and the core's: a group checks arguments, counts, compares calls
between the ranks, notices losses and says who is to blame. A chip with a torch.distributed backend
writes nothing; one that has wishes about it calls :meth:`Job.library`; one with a library of its
own subclasses :class:`Transport`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from anychip.contract.communicator import Capabilities, Reduction, Transfer, Work
    from anychip.contract.errors import CommunicationError, DeviceError


class Membership(NamedTuple):
    """The place of this rank in a group.

    Attributes:
        ranks: the members' ranks in the world, in the order of the group.
        rank: of this one, counted in the group.
        number: of the group, alike on its members; 0 is the world, and no two groups have one.
        name: for messages.
    """

    ranks: tuple[int, ...]
    rank: int
    number: int = 0
    name: str = "world"


class CollectiveCall(NamedTuple):
    """A collective that all ranks of a group make, with this rank's tensors.

    Attributes:
        name: of the communicator's method.
        inputs: tensors that are read; in place, they are among the outputs.
        outputs: tensors that are written.
        reduction: of all_reduce and reduce_scatter.
        sizes: elements of each rank, of all_gather and reduce_scatter.
        source: of broadcast, which reads there and writes elsewhere.
        tag: the same on the ranks that make the call, and on none of some thousand others: a
            transport with ``num_tags`` sends it along, and messages of different tags never meet.
        is_watched: of all_to_all: ranks whose sizes differ are found, if such parts never meet.
    """

    name: str
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    reduction: Reduction = "sum"
    sizes: Sequence[int] = ()
    source: int = 0
    tag: int = 0
    is_watched: bool = False


class Transport(ABC):
    """Moves the bytes of one group's calls, which are :class:`~anychip.contract.Communicator`'s.

    It is given calls whose arguments have been checked and are alike where they must be on all
    ranks; it counts, compares and blames nothing. A call returns at once, with work that may be
    under way with others. A failure is a :class:`~anychip.contract.TransportError`, or any
    RuntimeError of a library, raised by the call or by ``wait()`` of its work.

    Attributes:
        device: torch's device type of the tensors that it takes.
        capabilities: dtypes and reductions that it takes.
        description: for reports: what it is, order of sums, detours.
        reduces_on_host: sums are the core's own, pairwise over the ranks: the same bits on every
            transport that has this.
        num_tags: tags are below it; 0: it takes none; from 2**19 on they keep apart what differs.
    """

    device: str
    capabilities: Capabilities
    description: str
    reduces_on_host: bool = False
    num_tags: int = 0

    @abstractmethod
    def all_reduce(self, call: CollectiveCall) -> Work:
        """One tensor, input and output."""

    @abstractmethod
    def all_gather(self, call: CollectiveCall) -> Work:
        """One input, which may be its own part of the one output."""

    @abstractmethod
    def reduce_scatter(self, call: CollectiveCall) -> Work:
        """One input; one output, which may be its own part of that."""

    @abstractmethod
    def broadcast(self, call: CollectiveCall) -> Work:
        """One tensor: input of the source, output of the others."""

    @abstractmethod
    def all_to_all(self, call: CollectiveCall) -> Work:
        """One input and output per rank. Sizes of a pair that differ are ``wrong``, if noticed."""

    @abstractmethod
    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        """Of some ranks; at least one transfer."""

    @abstractmethod
    def barrier(self, call: CollectiveCall) -> Work:
        """Work that is done when all ranks have come; the host waits for it."""

    @abstractmethod
    def part(self, group: Membership) -> Transport:
        """The transport of some of this group's ranks, which alone call this, in one order.

        Raises:
            UnsupportedError: there are too many groups, or none of such ranks.
        """

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        """Sees to it that work gets on before it is waited for; by default it does so by itself.

        Args:
            on_error: called when it fails before it is waited for, if that is noticed.
        """
        return None

    def drain(self) -> None:
        """Waits, before all is closed, for what is queued on the device; by default nothing is."""
        return None

    @abstractmethod
    def abort(self) -> None:
        """Makes calls under way fail: the job has ended. From any thread; twice is allowed."""

    @abstractmethod
    def close(self) -> None:
        """Gives up connections and threads, after :meth:`abort`."""


class Job(ABC):
    """The ranks that were started together, as one of them sees them.

    Attributes:
        rank: of this process.
        timeout_s: seconds that any wait for another rank may take.
        store: shared by the ranks; keys of a transport begin with its name.
        has_failed: nothing can be called any more.
        world: the group of all ranks.
    """

    rank: int
    world_size: int
    timeout_s: float
    store: Store
    world: Membership

    @property
    @abstractmethod
    def has_failed(self) -> bool: ...

    @abstractmethod
    def host(self, group: Membership, device: str | None = None) -> Transport:
        """For tensors on the host, or by way of it on a device; first called by all ranks."""

    @abstractmethod
    def library(
        self,
        name: str,
        device: str,
        *,
        capabilities: Capabilities | None = None,
        identity: str | None = None,
        connect: Callable[[Any], object] | None = None,
        abort: Callable[[Any], object] | None = None,
    ) -> Transport | None:
        """The transport over a backend of torch.distributed; None for the host's, which needs none.

        Args:
            name: of the backend, for torch.distributed.
            device: torch's device type.
            capabilities: None: what every such backend is expected to take.
            identity: this rank's device, in words that only the same one of the same host has: two
                ranks with one are refused, of which libraries say little, or wait for ever.
            connect: called with each process group, on all its ranks, before its first call.
            abort: called with a process group, makes calls under way fail; None: its own abort().

        Raises:
            CommunicationError: on all ranks; two have one device.
        """

    @abstractmethod
    def blame(self, where: str, error: DeviceError) -> CommunicationError:
        """The error to raise when a device's error is that of a call between ranks; ends the job.

        It names the ranks that are lost, or have not made the last call of this one.
        """

    @abstractmethod
    def at_close(self, call: Callable[[], object]) -> None:
        """Registers what a chip does when the job ends."""
