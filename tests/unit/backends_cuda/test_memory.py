"""Where memory differs from the contract's defaults: before the first use, and page-locked."""

from typing import Any

import pytest
import torch

from anychip.contract import Memory
from anychip_cuda.backend import CudaBackend
from anychip_cuda.memory import CudaMemory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CudaMemory:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = CudaBackend().memory
    assert isinstance(made, CudaMemory)
    return made


def test_reset_peak_starts_the_allocator_first(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "init", lambda: log.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", log.append)
    memory.reset_peak()
    assert log == ["init", torch.device("cuda", 0)]


def test_any_lack_of_memory_names_the_sizes(
    memory: CudaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own error names none above 2^60 bytes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (77, 1234))
    words = r"cannot allocate 9999 bytes on cuda:0: 77 of 1234 bytes are free \(more than 1EB\)"
    with pytest.raises(torch.OutOfMemoryError, match=words), memory.out_of_memory(9999):
        raise torch.OutOfMemoryError("more than 1EB")


@pytest.mark.parametrize(("raised", "becomes", "words"), [
    (RuntimeError("CUDA error: out of memory"), torch.OutOfMemoryError, "4096 bytes of page-"),
    (RuntimeError("CUDA error: invalid argument"), RuntimeError, "invalid argument"),
    (torch.OutOfMemoryError("torch's own"), torch.OutOfMemoryError, "torch's own"),
], ids=["out of memory", "another error", "torch's own"])  # fmt: skip
def test_pinned_that_the_driver_refuses_is_out_of_memory_with_the_size(
    raised: Exception, becomes: type[Exception], words: str, memory: CudaMemory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(self: Memory, nbytes: int) -> torch.Tensor:
        raise raised

    monkeypatch.setattr(Memory, "pinned", refuse)
    with pytest.raises(becomes, match=words) as caught:
        memory.pinned(4096)
    assert type(caught.value) is becomes
