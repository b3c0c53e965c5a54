"""What test_errors.py and test_backend.py run in processes of their own: programs on the backend.

Each asserts what it can see itself, and prints what the test looks at.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import anychip
from anychip import Backend
from anychip.contract import Communicator
from anychip_npu import cann

MIB = 1 << 20


def said(error: BaseException) -> None:
    """One line on an error: type, code, and its message."""
    text = " ".join(str(error).split())
    print(type(error).__name__, getattr(error, "code", "-"), getattr(error, "ranks", "-"), text)


def kernel_fails(blocking: str) -> None:
    """Five additions; says at which step the error came, and what it is."""
    os.environ["ASCEND_LAUNCH_BLOCKING"] = blocking
    backend = anychip.use("npu")
    x = torch.ones(16, device="npu")
    torch.npu.synchronize()
    step = "call"
    try:
        for _ in range(5):
            x = x + 1
        step = "synchronize"
        backend.synchronize()
        print("no error")
    except RuntimeError as error:
        print(step)
        said(error)


def row_fails() -> None:
    """A row whose kernel fails, with launches that wait for it."""
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    backend = anychip.use("npu")
    x, weight = torch.ones(4, 64, device="npu"), torch.ones(64, device="npu")
    step = "call"
    try:
        anychip.ops.rms_norm(x, weight, eps=1e-6)
        step = "synchronize"
        backend.synchronize()
    except RuntimeError as error:
        print(step)
        said(error)


def memory_runs_out() -> None:
    """Asks for more than there is, three times; then the device computes, and the sum is right."""
    backend = anychip.use("npu")
    kept = torch.full((1000,), 2.0, device="npu")
    for _ in range(3):
        try:
            backend.memory.allocate(256 * MIB)
        except torch.OutOfMemoryError as error:
            said(error)
    assert float((kept * 3).sum()) == 6000.0
    print("worked on")


def pinned_runs_out() -> None:
    """More page-locked memory than there are addresses."""
    try:
        anychip.use("npu").memory.pinned(1 << 50)
        print("no error")
    except torch.OutOfMemoryError as error:
        said(error)


def allocation_fails() -> None:
    """One allocation fails for good; the next is served, and the device computes."""
    backend = anychip.use("npu")
    try:
        backend.memory.allocate(34 * MIB)
    except torch.OutOfMemoryError as error:
        said(error)
    assert backend.memory.allocate(34 * MIB).nbytes() == 34 * MIB
    assert float(torch.ones(1000, device="npu").sum()) == 1000.0
    print("worked on")


def device_is_lost() -> None:
    """Works until the device is gone; then waits for it twice."""
    backend = anychip.use("npu")
    # torch_npu may notice at the next operator that it queues, in words of its own.
    with contextlib.suppress(RuntimeError):
        for _ in range(20):
            torch.ones(16, device="npu") + 1
    _wait_twice(backend)


def launch_finds_device_lost() -> None:
    """The fourth piece of work is queued when the third has met the end of the device."""
    backend = anychip.use("npu")
    x = torch.ones(16, device="npu")
    for _ in range(3):
        time.sleep(0.3)
        x += 1
    _wait_twice(backend)


def _wait_twice(backend: Backend) -> None:
    for _ in range(2):
        try:
            backend.synchronize()
            print("no error")
        except RuntimeError as error:
            said(error)


def joined(port: int, **limits: float) -> tuple[Backend, Communicator]:
    """The backend with this rank's device, and the communicator of the job."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist: Any = torch.distributed
    limit = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, None, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    backend = anychip.use("npu")
    backend.set_device(rank)
    return backend, backend.communicator(**limits)  # type: ignore[arg-type]


def sums(port: int, calls: int = 3) -> None:
    """Some sums over the ranks, and how long they took."""
    backend, comm = joined(port, timeout_s=60)
    begin = time.monotonic()
    for number in range(calls):
        x = torch.full((100,), float(comm.rank + number), device="npu")
        comm.all_reduce(x)
        assert x.tolist() == [float(sum(range(comm.world_size)) + comm.world_size * number)] * 100
    backend.synchronize()
    print("seconds", time.monotonic() - begin)
    comm.close()


def sum_read_after_close(port: int) -> None:
    """The last call before close() has its result, however late the device comes to it."""
    _, comm = joined(port, timeout_s=60)
    x = torch.full((100,), float(comm.rank + 1), device="npu")
    comm.all_reduce(x)
    comm.close()
    print(set(x.tolist()))


def refusals(port: int) -> None:
    """What HCCL does not take is an error before the call; what only travels does."""
    _, comm = joined(port)
    for call, dtype in ((comm.all_reduce, torch.bool), (_scattered(comm), torch.uint8)):
        try:
            call(torch.ones(4, device="npu").to(dtype))
            print("no error")
        except anychip.UnsupportedError as error:
            said(error)
        whole = torch.zeros(2 * comm.world_size, device="npu").to(dtype)
        comm.all_gather(whole, torch.tensor([0, comm.rank], device="npu").to(dtype))
        assert whole.tolist() == [n for rank in range(comm.world_size) for n in (0, rank)]
    comm.close()


def _scattered(comm: Communicator) -> Callable[[torch.Tensor], Any]:
    return lambda x: comm.reduce_scatter(x[: x.numel() // comm.world_size].clone(), x)


def rank_dies(port: int, dying: int) -> None:
    """One rank ends in the middle; the others say so, and how long they took to know."""
    backend, comm = joined(port, timeout_s=30, heartbeat_s=20)
    x = torch.ones(100, device="npu")
    comm.all_reduce(x)
    assert float(x[0]) == comm.world_size
    if comm.rank == dying:
        os._exit(7)
    _expect_failure(backend, comm)


def link_is_down(port: int) -> None:
    """No collective of one rank ever begins."""
    backend, comm = joined(port, timeout_s=30, heartbeat_s=20)
    _expect_failure(backend, comm)


def _expect_failure(backend: Backend, comm: Communicator) -> None:
    begin, x = time.monotonic(), torch.ones(100, device="npu")
    for _ in range(2):
        try:
            comm.all_reduce(x)
            backend.synchronize()
            print("no error")
        except (anychip.CommunicationError, anychip.DeviceError) as error:
            said(error)
    print("seconds", time.monotonic() - begin)
    os._exit(3)


def ranks_disagree(port: int) -> None:
    """Two shapes in one collective are an error on both ranks, before anything is sent."""
    backend, comm = joined(port, timeout_s=30, heartbeat_s=20)
    try:
        comm.all_reduce(torch.ones(100 + comm.rank, device="npu"))
        backend.synchronize()
        print("no error")
    except anychip.CommunicationError as error:
        said(error)
    comm.close()
    print("closed")


def aborts_while_calls_are_queued(port: int) -> None:
    """torch_npu's queue has a sum to issue yet when the job is ended; the host goes on."""
    backend, comm = joined(port, timeout_s=30, heartbeat_s=20)
    x = torch.ones(100, device="npu")
    with contextlib.suppress(anychip.CommunicationError):  # the other rank may be the first
        for _ in range(1000):
            x = x.softmax(0)
        for _ in range(50):
            comm.all_reduce(x, async_op=True)
        comm.abort("enough")
        backend.synchronize()
    comm.close()
    print("closed")


def facts() -> None:
    """What the backend says of itself, as JSON."""
    backend = anychip.use("npu")
    probe, known = backend.probe(), backend.properties(0)
    told = {
        "probe": [probe.status, probe.device_count, probe.reason], "name": known.name,
        "total_memory": known.total_memory, "dtypes": sorted(map(str, known.dtypes)),
        "identity": backend.identity(), "reach": cann.can_reach(0, 1),
    }  # fmt: skip
    print(json.dumps(told))


def memory_by_device() -> None:
    """What is taken on one device is missing there and not on the other."""
    backend = anychip.use("npu")
    before = [backend.memory.info(index) for index in (0, 1)]
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="npu:1")
    after = [backend.memory.info(index) for index in (0, 1)]
    assert [info.total for info in after] == [256 * MIB] * 2
    assert after[0] == before[0]
    assert before[1].free - after[1].free >= kept.nbytes
    assert backend.memory.stats(1).allocated >= kept.nbytes
    backend.set_device(1)
    assert backend.memory.info() == after[1]
