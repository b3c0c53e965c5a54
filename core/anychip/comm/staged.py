"""Collectives for a chip that has none: by way of the host, with the host's sums and failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from anychip.contract.communicator import (
    Capabilities,
    Communicator,
    Reduction,
    Traffic,
    Transfer,
    Work,
)

if TYPE_CHECKING:
    import torch


class HostStagedCommunicator(Communicator):
    """Copies to the host, lets ``host`` communicate, and copies back when the work is waited for.

    The copy to the host waits for what is queued on the current stream. Values and bits are the
    host's, so that a chip without collectives trains like every other, only slower.

    Args:
        host: the communicator of the same ranks for tensors on the host.
        device: torch's device type of the tensors here.
    """

    def __init__(self, host: Communicator, device: str) -> None:
        self.host, self.device = host, device
        self.rank, self.world_size = host.rank, host.world_size
        self.name, self.ranks, self.timeout_s = host.name, host.ranks, host.timeout_s
        self.traffic = Traffic()
        self.description = f"{device} tensors staged through the host; {host.description}"

    @property
    def capabilities(self) -> Capabilities:
        return self.host.capabilities

    def abort(self, reason: str) -> None:
        self.host.abort(reason)

    def close(self) -> None:
        self.is_closed = True
        self.host.close()

    def _all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Work:
        copy = _to_host(tensor)
        return self._staged(self.host.all_reduce(copy, reduction, async_op=True), [(tensor, copy)])

    def _all_gather(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Sequence[int]) -> Work:
        copy = _room(output)
        work = self.host.all_gather(copy, _to_host(tensor), sizes=sizes, async_op=True)
        return self._staged(work, [(output, copy)])

    def _reduce_scatter(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        reduction: Reduction,
        sizes: Sequence[int],
    ) -> Work:
        copy, whole = _room(output), _to_host(tensor)
        work = self.host.reduce_scatter(copy, whole, reduction, sizes=sizes, async_op=True)
        return self._staged(work, [(output, copy)])

    def _broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        copy = _to_host(tensor)
        work = self.host.broadcast(copy, source, async_op=True)
        return self._staged(work, [] if source == self.rank else [(tensor, copy)])

    def _all_to_all(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Work:
        copies = [_room(output) for output in outputs]
        work = self.host.all_to_all(copies, [_to_host(t) for t in inputs], async_op=True)
        return self._staged(work, list(zip(outputs, copies, strict=True)))

    def _exchange(self, transfers: Sequence[Transfer]) -> Work:
        staged = [
            t._replace(tensor=_to_host(t.tensor) if t.kind == "send" else _room(t.tensor))
            for t in transfers
        ]
        back = [
            (transfer.tensor, copy.tensor)
            for transfer, copy in zip(transfers, staged, strict=True)
            if transfer.kind == "recv"
        ]
        return self._staged(self.host.exchange(staged, async_op=True), back)

    def _barrier(self) -> None:
        self.host.barrier()

    def _split(self, groups: Sequence[tuple[int, ...]], name: str) -> Communicator:
        return HostStagedCommunicator(self.host.split(groups, name=name), self.device)

    def _staged(self, work: Work, back: list[tuple[torch.Tensor, torch.Tensor]]) -> Work:
        return _Staged(work, back)


class _Staged(Work):
    """The host's work, and the copies to make when it is done."""

    def __init__(self, work: Work, back: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work, self._back = work, back

    def is_done(self) -> bool:
        return self._work.is_done()

    def wait(self) -> None:
        import torch

        self._work.wait()
        with torch.no_grad():
            for tensor, copy in self._back:
                tensor.copy_(copy)
        self._back = []


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _room(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype)
