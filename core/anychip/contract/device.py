"""What a chip says about its devices: how many, which is current, streams, events, generators.

Every default stands on ``torch.get_device_module(device_type)``, so a chip with a torch adapter
has nothing to write here. Memory is in :mod:`.memory`, operators in :mod:`.operator`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anychip.contract.errors import ContractError, UnsupportedError

if TYPE_CHECKING:
    import torch


HOST, HOST_LIBRARY = "cpu", "gloo"
"""torch's device type of tensors in the host's memory, and torch.distributed's backend for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceProperties:
    """What is known about one device. A figure that nobody knows is None, never a guess.

    Attributes:
        name: the vendor's name for the part.
        total_memory: bytes.
        dtypes: floating-point dtypes that the device computes in.
        flops: peak dense matrix rate in flop/s by dtype, from the vendor or measured.
        bandwidth: bytes/s of the device's memory.
        link_bandwidth: bytes/s to another device of the same kind, per direction.
    """

    name: str
    total_memory: int
    dtypes: frozenset[torch.dtype]
    flops: Mapping[torch.dtype, float] = field(default_factory=dict)
    bandwidth: float | None = None
    link_bandwidth: float | None = None


class Graph(ABC):
    """Work of a device that was recorded, and is queued again as a whole, like a cudaGraphExec.

    Attributes:
        result: what the recorded call returned; every replay writes to its tensors again.
    """

    result: Any = None

    @abstractmethod
    def replay(self) -> None:
        """Queues the work on the calling thread's current stream.

        It reads and writes the memory that it was recorded with, whatever that holds by now.
        """


class DeviceInterface:
    """The device part of a :class:`Backend`; one object speaks for all devices of its type.

    An index is an int from 0 to ``device_count() - 1``; None means the current device. An index out
    of range raises ValueError with the range. No method here moves the current device except
    ``set_device``. Methods may be called from any thread; what is current is per thread.
    """

    name: str
    device_type: str
    capabilities: Mapping[str, int] = {
        "streams": 1, "memory_stats": 1, "memory_peak": 1, "pinned_memory": 1,
    }  # fmt: skip
    """Optional groups that the backend has, with the version of each. To declare one says that its
    methods work; it says nothing of their speed. ``graphs`` is a group that few have."""

    @property
    def is_host(self) -> bool:
        """The device is the host itself, and its tensors are in the host's memory."""
        return self.device_type == HOST

    def require(self, capability: str, operation: str) -> None:
        """Raises UnsupportedError unless ``capability`` is declared."""
        if capability not in self.capabilities:
            raise UnsupportedError(
                f"backend {self.name!r} has no {operation}: it does not declare the capability "
                f"{capability!r} (it declares {sorted(self.capabilities) or 'none'})"
            )

    def device_module(self) -> Any:
        """The adapter's torch module, like ``torch.get_device_module("cpu")``."""
        import torch

        return torch.get_device_module(self.device_type)

    def device_count(self) -> int:
        """Number of devices that this process can use, at least 0. Never raises."""
        return int(self.device_module().device_count())

    def device(self, index: int | None = None) -> torch.device:
        """The torch device for an index; without an index the current device.

        A backend whose type has only one device (a host) may leave the index out of the result. If
        it counts more, ``cpu:0`` and ``cpu:1``, these are one memory: torch's tensors say ``cpu``.
        """
        import torch

        return torch.device(self.device_type, self.check_index(index))

    def check_index(self, index: int | None) -> int:
        """``index``, or the current device's for None; ValueError when it is out of range."""
        if index is None:
            return self.current_device()
        count = self.device_count()
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
            raise ValueError(f"backend {self.name!r} has devices 0 to {count - 1}, got {index!r}")
        return index

    def current_device(self) -> int:
        """Index of the calling thread's current device: always an int. A new thread starts at 0."""
        return int(self.device_module().current_device())

    def set_device(self, index: int) -> None:
        """Makes a device current for the calling thread."""
        self.device_module().set_device(self.check_index(index))

    def synchronize(self, index: int | None = None) -> None:
        """Returns when all work queued on the device before the call, on any stream, is done.

        An error of that work is raised here at the latest.
        """
        self.device_module().synchronize(self.check_index(index))

    def properties(self, index: int | None = None) -> DeviceProperties:
        """What is known about a device. Cheap; no work is queued."""
        import torch

        known = self.device_module().get_device_properties(self.check_index(index))
        return DeviceProperties(
            name=str(getattr(known, "name", self.name)),
            total_memory=int(getattr(known, "total_memory", 0)),
            dtypes=frozenset({torch.float32, torch.float16, torch.bfloat16}),
        )

    def stream(self, index: int | None = None) -> torch.Stream:
        """A new stream. Work on one stream runs in order; two streams are not ordered.

        Like cudaStreamCreate. Needs the capability ``streams``.
        """
        import torch

        self.require("streams", "stream()")
        # An adapter's streams may equal those of its own class alone.
        kind: type[torch.Stream] = getattr(self.device_module(), "Stream", torch.Stream)
        return kind(device=self.device(index))

    def current_stream(self, index: int | None = None) -> torch.Stream:
        """The stream on which the calling thread's torch operators are queued."""
        self.require("streams", "current_stream()")
        stream: torch.Stream = self.device_module().current_stream(self.check_index(index))
        return stream

    def use_stream(self, stream: torch.Stream) -> AbstractContextManager[Any]:
        """Context in which ``stream`` is the calling thread's current stream.

        However the block ends, the stream before it is current again.
        """
        self.require("streams", "use_stream()")
        context: AbstractContextManager[Any] = self.device_module().stream(stream)
        return context

    def event(self, *, timing: bool = False) -> torch.Event:
        """A new event: ``record(stream)``, ``wait(stream)``, ``query()``, ``synchronize()``.

        An event that was never recorded is complete. A stream that waits for one does so though
        nobody holds it any more. With ``timing`` the method ``elapsed_time(end)`` gives
        milliseconds between two recorded events.
        """
        import torch

        self.require("streams", "event()")
        return torch.Event(self.device(), enable_timing=timing)

    def generator(self, seed: int, index: int | None = None) -> torch.Generator:
        """A new random generator on the device, seeded; its stream depends on nothing else."""
        import torch

        return torch.Generator(device=self.device(index)).manual_seed(seed)

    def random_state(self, index: int | None = None) -> torch.Tensor:
        """State of torch's own generator of the device, as bytes on the host."""
        import torch

        device, module = self.device(index), None if self.is_host else self.device_module()
        state: torch.Tensor = module.get_rng_state(device) if module else torch.get_rng_state()
        return state

    def set_random_state(self, state: torch.Tensor, index: int | None = None) -> None:
        """What is drawn from that generator next is what followed :meth:`random_state`."""
        import torch

        device, state = self.device(index), state.clone()  # torch reads it from its storage's start
        if self.is_host:
            return torch.set_rng_state(state)
        self.device_module().set_rng_state(state, device)

    def capture(self, work: Callable[[], Any]) -> Graph:
        """Records what ``work`` queues, like cudaStreamBeginCapture.

        Needs the capability ``graphs``; a backend that declares it overrides this.
        ``work`` is called some times before, for real, and once while it is recorded, when nothing
        runs. It must not wait for the device, nor look at values on the host; tensors that it is to
        read anew at each replay must live outside of it.

        Raises:
            UnsupportedError: the backend does not declare ``graphs``.
        """
        self.require("graphs", "capture()")
        raise ContractError(f"backend {self.name!r} declares 'graphs' and has no capture()")

    @property
    def compile_backend(self) -> str:
        """Which ``torch.compile`` backend produces code for this chip; aot_eager always works."""
        return "aot_eager"

    def identity(self) -> str:
        """Driver and hardware in one line, for reports: part name, driver or library version."""
        return self.properties(0).name if self.device_count() else "no device"
