"""What NCCL takes, and what is said before it is called."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anychip.contract import CALLS
from anychip_cuda import anychip_backend
from anychip_cuda.collectives import capabilities

MOVED = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8,
    torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", MOVED, ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype_that_nccl_moves_is_in_the_table(dtype: torch.dtype) -> None:
    table = capabilities()
    for call in ("all_gather", "broadcast", "all_to_all", "send", "recv"):
        assert table.supports(call, dtype)
    reduced = dtype not in (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
    for call in ("all_reduce", "reduce_scatter"):
        for reduction in ("sum", "max", "min"):
            assert table.supports(call, dtype, reduction) is reduced
        assert table.supports(call, dtype, "avg") is (reduced and dtype.is_floating_point)


def test_what_nccl_does_not_move_is_not_in_the_table() -> None:
    table = capabilities()
    assert set(table.dtypes) == set(CALLS)
    assert not any(table.supports(call, torch.int16) for call in CALLS)
    assert not table.supports("barrier", torch.float32)


class Recorded:
    """A job that keeps what the transport is asked for with."""

    def __init__(self) -> None:
        self.asked: tuple[Any, ...] = ()

    def library(self, *words: str, **wishes: Any) -> str:
        self.asked = (*words, wishes, os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        return "the transport"


@pytest.mark.parametrize(("set_before", "found"), [(None, "2"), ("1", "1")])
def test_transport_is_nccl_with_a_device_of_its_own_and_a_watchdog_that_leaves_the_process_alone(
    monkeypatch: pytest.MonkeyPatch, set_before: str | None, found: str
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, set_before or "")
    if set_before is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    known = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    job: Any = Recorded()
    assert anychip_backend().transport(job) == "the transport"
    assert job.asked == ("nccl", "cuda", {"capabilities": capabilities(), "identity": "abc"}, found)
