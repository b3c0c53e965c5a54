"""Collectives for a chip that has none: by way of the host, with the host's sums and failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from anychip.contract import HOST, CollectiveCall, Membership, Transfer, Transport, Work

if TYPE_CHECKING:
    import torch


class Staged(Transport):
    """Copies to the host, lets ``host`` communicate, and copies back when the work is waited for.

    The copy to the host waits for what is queued on the current stream. Values and bits are the
    host's, so that a chip without collectives trains like every other, only slower.

    Args:
        host: the transport of the same ranks for tensors on the host.
        device: torch's device type of the tensors here.
    """

    def __init__(self, host: Transport, device: str) -> None:
        self._host, self.device = host, device
        self.capabilities, self.num_tags = host.capabilities, host.num_tags
        self.reduces_on_host = host.reduces_on_host
        self.description = f"{device} tensors staged through the host; {host.description}"

    def _stage(self, call: CollectiveCall) -> Work:
        copies = {id(tensor): _to_host(tensor) for tensor in call.inputs}
        for tensor in call.outputs:
            copies.setdefault(id(tensor), _room(tensor))
        inputs = [copies[id(tensor)] for tensor in call.inputs]
        outputs = [copies[id(tensor)] for tensor in call.outputs]
        work: Work = getattr(self._host, call.name)(call._replace(inputs=inputs, outputs=outputs))
        return _Staged(work, list(zip(call.outputs, outputs, strict=True)))

    all_reduce = all_gather = reduce_scatter = broadcast = all_to_all = _stage

    def barrier(self, call: CollectiveCall) -> Work:
        return _Staged(self._host.barrier(call), [])  # also of a split, which has another name

    def exchange(self, transfers: Sequence[Transfer]) -> Work:
        staged = [
            t._replace(tensor=_to_host(t.tensor) if t.kind == "send" else _room(t.tensor))
            for t in transfers
        ]
        back = [
            (transfer.tensor, copy.tensor)
            for transfer, copy in zip(transfers, staged, strict=True)
            if transfer.kind == "recv"
        ]
        return _Staged(self._host.exchange(staged), back)

    def part(self, group: Membership) -> Transport:
        return Staged(self._host.part(group), self.device)

    def proceed(self, work: Work, on_error: Callable[[Exception], None]) -> None:
        if isinstance(work, _Staged):
            self._host.proceed(work.host, on_error)

    def drain(self) -> None:
        self._host.drain()

    def abort(self) -> None:
        self._host.abort()

    def close(self) -> None:
        self._host.close()


class _Staged(Work):
    """The host's work, and the copies to make when it is done."""

    def __init__(self, host: Work, back: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.host, self._back = host, back

    def is_done(self) -> bool:
        return self.host.is_done()

    def wait(self) -> None:
        import torch

        self.host.wait()
        with torch.no_grad():
            for tensor, copy in self._back:
                tensor.copy_(copy)
        self._back = []


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(HOST, copy=True)


def _room(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype)
