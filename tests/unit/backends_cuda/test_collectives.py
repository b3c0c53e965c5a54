"""What NCCL takes, and what is said before it is called."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from anychip import CommunicationError
from anychip.comm import native
from anychip.comm.native import NativeCommunicator
from anychip.comm.world import Settings, world
from anychip.contract import CALLS
from anychip_cuda import collectives
from anychip_cuda.collectives import NcclCommunicator, capabilities

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


def test_the_device_of_a_rank_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    known = SimpleNamespace(uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: known)
    monkeypatch.setattr(native.socket, "gethostname", lambda: "host")
    store = HashStore()
    job: Any = SimpleNamespace(rank=0, world_size=2, store=store, where="world, rank 0 of 2")
    store.set("device/1", "abc on host")
    with pytest.raises(CommunicationError, match=r"NCCL needs .* ranks 0 and 1 have device abc on"):
        NcclCommunicator(job, 0, (0, 1), "world", backend="nccl", device="cuda")


def test_the_watchdog_is_asked_to_leave_the_process_alone_unless_the_user_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setattr(NativeCommunicator, "__init__", lambda self, *args, **how: None)
    monkeypatch.setattr(collectives, "_uuid", lambda: "abc")
    monkeypatch.setattr(collectives, "compare_devices", lambda *given: None)
    job: Any = None
    monkeypatch.delenv(name, raising=False)
    NcclCommunicator(job, 0, (0, 1), "world", backend="nccl", device="cuda")
    assert os.environ[name] == "2"
    monkeypatch.setenv(name, "1")
    NcclCommunicator(job, 0, (0, 1), "world", backend="nccl", device="cuda")
    assert os.environ[name] == "1"


class Recorded(NativeCommunicator):
    """One that only keeps what it is made with."""

    def __init__(self, job: Any, group: int, ranks: Any, name: str, **how: str) -> None:
        self.job, self.ranks, self.name, self.is_closed = job, ranks, name, True
        self.backend, self.device = how["backend"], how["device"]


def test_groups_of_a_chips_communicator_are_of_its_class() -> None:
    job: Any = "job"
    part = Recorded(job, 0, (0, 1), "world", backend="b", device="d")._of_group(3, (1,), "tp")
    assert type(part) is Recorded
    assert (part.job, part.ranks, part.name, part.backend) == ("job", (1,), "tp", "b")


def test_world_of_a_chip_with_collectives_is_of_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from anychip.comm import c10d, job
    from anychip.comm import world as module

    places = job.Rendezvous(HashStore(), 0, 2, "127.0.0.1", SimpleNamespace)
    monkeypatch.setattr(job, "Job", lambda place, **how: SimpleNamespace(rank=0, world_size=2))
    monkeypatch.setattr(c10d, "ProcessGroupCommunicator", lambda *args: None)
    monkeypatch.setattr(module, "_worlds", {})
    settings = Settings(timeout_s=1.0, heartbeat_s=1.0, check="off")
    chip: Any = SimpleNamespace(
        device_type="acme", c10d_backend="acmccl", native_communicator=lambda: Recorded
    )
    made = world(chip, lambda timeout_s: places, settings)
    assert type(made) is Recorded
    assert (made.ranks, made.backend, made.device) == ((0, 1), "acmccl", "acme")
