"""What test_emulator_*.py run in processes of their own: small programs on torch_npu.

Each asserts what it can see itself, and prints what the test looks at.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

MIB = 1 << 20


def library() -> ctypes.CDLL:
    """CANN's C functions of the emulator, which torch_npu has loaded."""
    return ctypes.CDLL("libascendcl.so")


class Gate:
    """Work on a stream that waits until the host opens it: what is queued behind cannot begin."""

    def __init__(self, stream: Any) -> None:
        self._opened = threading.Event()
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self._function = call(lambda _: self._opened.wait())
        pointer = ctypes.c_void_p(stream.npu_stream)
        assert library().aclrtLaunchHostFunc(pointer, self._function, None) == 0

    def open(self) -> None:
        """Lets the stream go on."""
        self._opened.set()


def said(error: BaseException) -> None:
    """Prints an exception as a test reads it: its class, then its text in one line."""
    print(type(error).__name__, " ".join(str(error).split()))


def fill_memory() -> None:
    """Allocates until there is no more, says how far it came, and works on."""
    torch.npu.set_device(0)
    free, total = torch.npu.mem_get_info()
    blocks = []
    try:
        while True:
            blocks.append(torch.empty(MIB * 8, dtype=torch.uint8, device="npu"))
    except torch.OutOfMemoryError as error:
        said(error)
    print("allocated", len(blocks), "free", free // MIB, "total", total // MIB)
    left = torch.npu.mem_get_info()[0]
    del blocks
    torch.npu.empty_cache()
    assert torch.npu.mem_get_info()[0] - left >= 24 * MIB, "freed memory comes back"
    assert (torch.ones(MIB, device="npu") + 1).sum().item() == 2 * MIB


def out_of_memory_by_fault() -> None:
    """One allocation more than the fault lets through, and then the same again."""
    kept = torch.ones(4 * MIB, device="npu")
    try:
        torch.ones(8 * MIB, device="npu")
    except torch.OutOfMemoryError as error:
        said(error)
    assert (kept + 1)[0].item() == 2
    assert torch.ones(8 * MIB, device="npu").sum().item() == 8 * MIB
    print("worked on")


def free_memory() -> list[int]:
    """Of both devices. torch_npu's mem_get_info(device) answers for the current one."""
    free = []
    for device in (0, 1):
        torch.npu.set_device(device)
        free.append(torch.npu.mem_get_info()[0])
    return free


def two_devices() -> None:
    """Memory of one device is not that of the other."""
    before = free_memory()
    kept = torch.ones(MIB, device="npu:1")
    after = free_memory()
    assert before[0] == after[0]
    assert before[1] > after[1]
    assert torch.equal(kept.to("npu:0").cpu(), torch.ones(MIB))


def missing_wait() -> None:
    """What one stream reads of another's work: without a wait, and with one."""
    side = torch.npu.Stream()
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    gate = Gate(side)
    with torch.npu.stream(side):
        x.add_(1)
    print("without", x.sum().item())
    torch.npu.current_stream().wait_stream(side)
    y = x.clone()
    ready = torch.npu.Event()
    ready.record()
    # Long enough for torch_npu's own thread to hand over all of it, if nothing held it up.
    time.sleep(0.5)
    assert not ready.query()
    gate.open()
    ready.synchronize()
    assert ready.query()
    print("with", y.sum().item())


def late_work() -> None:
    """What the host reads through another stream of forty pieces of work, as soon as it can."""
    side = torch.npu.Stream()
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        for _ in range(40):
            x.add_(1)
    print("early", x[0].item())
    side.synchronize()
    print("late", x[0].item())


def elapsed_time() -> None:
    """The time between two events is that of the work between them, to their order."""
    start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    stream = torch.npu.current_stream()
    start.record()
    stream.synchronize()
    gate = Gate(stream)
    time.sleep(0.05)
    gate.open()
    end.record()
    end.synchronize()
    assert 50 <= start.elapsed_time(end) < 60_000
    assert end.elapsed_time(start) <= -50
    pointer = ctypes.c_void_p()
    assert library().aclrtCreateEvent(ctypes.byref(pointer)) == 0
    milliseconds = ctypes.c_float()
    refused = library().aclrtEventElapsedTime(ctypes.byref(milliseconds), pointer, pointer)
    print("never recorded", refused)


def host_reads_device_memory() -> None:
    """Follows the address of a tensor on the device, as code written for the CPU would."""
    x = torch.full((4,), 3.0, device="npu")
    torch.npu.synchronize()
    print("read", ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_float))[0])


def host_reads_device_memory_watched() -> None:
    """The same under Python's own watch, which pytest switches on too."""
    faulthandler.enable()
    host_reads_device_memory()


def host_follows_null() -> None:
    """A crash that has nothing to do with the device."""
    torch.zeros(1, device="npu")
    ctypes.string_at(8)


def add_five_times() -> None:
    """Five additions, each waited for; what the failing one says, and whether later ones do."""
    x = torch.zeros(4, device="npu")
    for number in range(1, 6):
        try:
            x = x + 1
            torch.npu.synchronize()
        except RuntimeError as error:
            print("failed", number, end=" ")
            said(error)
            break
    else:
        print("five", x.sum().item())


def failure_reaches_waiting_stream() -> None:
    """A stream that waits for a failed one fails too, and an event of it says so."""
    side = torch.npu.Stream()
    x = torch.zeros(4, device="npu")
    torch.npu.synchronize()
    with torch.npu.stream(side):
        x.mul_(2)
        event = torch.npu.Event()
        event.record()
    torch.npu.current_stream().wait_event(event)
    y = x + 1
    for wait in (event.synchronize, y.cpu):
        try:
            wait()
        except RuntimeError as error:
            said(error)


def forty_additions() -> None:
    """Work until the device is lost: every way to wait ends with an error, none hangs."""
    event = torch.npu.Event()
    x = torch.zeros(4, device="npu")
    try:
        for _ in range(40):
            x = x + 1
        event.record()
        torch.npu.synchronize()
    except RuntimeError as error:
        said(error)
    idle = torch.npu.Stream().synchronize
    for wait in (x.cpu, torch.npu.synchronize, torch.npu.current_stream().synchronize, idle):
        try:
            wait()
        except RuntimeError as error:
            said(error)
        else:
            print("no error")
    # torch_npu ends a process that cleans up on a lost device by a signal; that is not asked here.
    os._exit(0)


def unknown_operator() -> None:
    """An operator without a row, twice, and one with a row between."""
    for _ in range(2):
        try:
            torch.erfinv(torch.ones(2, device="npu")).cpu()
        except RuntimeError as error:
            said(error)
        assert (torch.ones(2, device="npu") + 1).sum().item() == 4


def bad_calls() -> None:
    """Calls that the emulator must answer with a status: nothing may be thrown to C."""
    functions, collectives = library(), ctypes.CDLL("libhccl.so")
    functions.aclGetRecentErrMsg.restype = ctypes.c_char_p
    torch.zeros(1, device="npu")
    info = ctypes.create_string_buffer(4108)
    handle = ctypes.c_void_p()
    nowhere = ctypes.c_void_p(8)
    assert collectives.HcclGetRootInfo(info) == 0
    calls = {
        "aclrtFree": lambda: functions.aclrtFree(nowhere),
        "aclrtSynchronizeStream": lambda: functions.aclrtSynchronizeStream(nowhere),
        "aclrtSetDevice": lambda: functions.aclrtSetDevice(99),
        "aclrtMemcpy":
            lambda: functions.aclrtMemcpy(None, ctypes.c_size_t(1), None, ctypes.c_size_t(2), 0),
        "too many ranks":
            lambda: collectives.HcclCommInitRootInfo(65, info, 0, ctypes.byref(handle)),
        "no such communicator":
            lambda: collectives.HcclCommInitRootInfo(1, b"0_0_0", 0, ctypes.byref(handle)),
        "no communicator": lambda: collectives.HcclBarrier(None, None),
        "not an id":
            lambda: collectives.HcclCommInitRootInfo(1, b"elsewhere", 0, ctypes.byref(handle)),
        "aclnnAdd": lambda: ctypes.CDLL("libopapi.so").aclnnAddGetWorkspaceSize(
            None, None, None, None, ctypes.byref(ctypes.c_uint64()), ctypes.byref(handle)),
    }  # fmt: skip
    for name, call in calls.items():
        print(f"{name}: {call()} {functions.aclGetRecentErrMsg()!r}")
    assert (torch.ones(2, device="npu") + 1).sum().item() == 4


def rank_and_ranks() -> tuple[int, int]:
    """Joins the process group of hccl; each rank has a device."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    torch.distributed.init_process_group(
        "hccl", init_method=os.environ["INIT_METHOD"], rank=rank, world_size=ranks
    )
    return rank, ranks


def numbers(rank: int, dtype: torch.dtype = torch.float32, count: int = 12) -> torch.Tensor:
    """Numbers that differ between ranks and are exact in each dtype, on the host."""
    return (torch.arange(count) % 5 + rank + 1).to(dtype)


def collectives() -> None:
    """Every collective against what the ranks' numbers say that it must be."""
    rank, ranks = rank_and_ranks()
    group = torch.distributed
    own = [numbers(r) for r in range(ranks)]
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64):
        for operation, joined in (
            (group.ReduceOp.SUM, sum(own)), (group.ReduceOp.MAX, own[ranks - 1]),
            (group.ReduceOp.MIN, own[0]),
        ):  # fmt: skip
            x = own[rank].to(dtype).npu()
            group.all_reduce(x, operation)
            assert torch.equal(x.cpu(), torch.as_tensor(joined).to(dtype)), (dtype, operation)
    gathered = torch.empty(ranks * 12, device="npu")
    group.all_gather_into_tensor(gathered, own[rank].npu())
    assert torch.equal(gathered.cpu(), torch.cat(own))
    parts = numbers(rank, count=3 * ranks)
    shard = torch.empty(3, device="npu")
    group.reduce_scatter_tensor(shard, parts.npu())
    total = torch.stack([numbers(r, count=3 * ranks) for r in range(ranks)]).sum(0)
    assert torch.equal(shard.cpu(), total[3 * rank : 3 * rank + 3])
    exchanged = torch.empty(3 * ranks, device="npu")
    group.all_to_all_single(exchanged, parts.npu())
    sent = [numbers(r, count=3 * ranks)[3 * rank : 3 * rank + 3] for r in range(ranks)]
    assert torch.equal(exchanged.cpu(), torch.cat(sent))
    x = own[rank].npu()
    group.broadcast(x, src=ranks - 1)
    assert torch.equal(x.cpu(), own[ranks - 1])
    # A ring; more than a mailbox holds, so that both sides must make progress together.
    large = numbers(rank, count=MIB).npu()
    received = torch.empty_like(large)
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    send = group.P2POp(group.isend, large, after)
    receive = group.P2POp(group.irecv, received, before)
    for work in group.batch_isend_irecv([send, receive]):
        work.wait()
    assert torch.equal(received.cpu(), numbers(before, count=MIB))
    group.barrier()
    group.destroy_process_group()
    print("done")


def uneven_sums() -> None:
    """Sums whose value depends on the order: every rank must get the same bits."""
    rank, ranks = rank_and_ranks()
    generator = torch.Generator().manual_seed(rank)
    x = (torch.randn(1000, generator=generator) * 10.0 ** (3 * rank)).npu()
    torch.distributed.all_reduce(x)
    # More than the window between the ranks holds at once.
    large = torch.full((3 * MIB,), float(rank + 1), device="npu")
    torch.distributed.all_reduce(large)
    assert torch.equal(large.cpu(), torch.full((3 * MIB,), ranks * (ranks + 1) / 2))
    print(x.cpu().view(torch.int32).double().sum().item(), x.cpu().double().sum().item())
    torch.distributed.destroy_process_group()


def reduce_twice(killed: int = -1) -> None:
    """Two sums; a rank may kill itself between them. Says which were right, and the error."""
    rank, ranks = rank_and_ranks()
    x = torch.ones(4, device="npu")
    try:
        for number in (1, 2):
            if number == 2 and rank == killed:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(x)
            # Its error has CANN's message; that of a copy has not.
            torch.npu.synchronize()
            print(x.cpu()[0].item() == ranks**number, end=" ")
    except RuntimeError as error:
        said(error)
    sys.stdout.flush()
    os._exit(0)


def reduce_twice_with_child() -> None:
    """The same; the second rank is a child of the first, which does not ask how it ended."""
    os.environ["WORLD_SIZE"] = "2"
    if os.fork() == 0:
        os.environ["RANK"] = "1"
    reduce_twice(1)


def multiply_int16() -> None:
    """A product of 16-bit integers, which HCCL's reference does not list."""
    # torch_npu's own thread may not have told of the refusal yet when the device is waited for.
    os.environ["ASCEND_LAUNCH_BLOCKING"] = "1"
    rank_and_ranks()
    x = torch.ones(4, device="npu", dtype=torch.int16)
    try:
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.PRODUCT)
        torch.npu.synchronize()
    except RuntimeError as error:
        said(error)
    sys.stdout.flush()
    # After a refusal torch_npu's thread does nothing right any more.
    os._exit(0)


def killed_while_joining() -> None:
    """The first rank makes a communicator's file and dies before the other comes to it."""
    rank, _ = rank_and_ranks()
    store = torch.distributed.distributed_c10d._get_default_store()
    hccl = ctypes.CDLL("libhccl.so")
    info = ctypes.create_string_buffer(4108)
    if rank == 0:
        assert hccl.HcclGetRootInfo(info) == 0
        store.set("info", info.raw)
        os.kill(os.getpid(), signal.SIGKILL)
    given = store.get("info")
    while b"cann_emulator_board" in open_files(int(given.split(b"_")[0])):
        time.sleep(0.01)
    status = hccl.HcclCommInitRootInfo(2, given, 1, ctypes.byref(ctypes.c_void_p()))
    message = library().aclGetRecentErrMsg
    message.restype = ctypes.c_char_p
    print(status, message().decode())
    os._exit(0)


def open_files(process: int) -> bytes:
    """The names of what a process has open; none when it has ended."""
    folder = f"/proc/{process}/fd"
    try:
        return b" ".join(os.readlink(f"{folder}/{name}").encode() for name in os.listdir(folder))
    except FileNotFoundError:
        return b""


def versions() -> None:
    """What the settings of devices and versions change."""
    assert torch.zeros(1, device="npu").item() == 0
    print(torch.npu.device_count(), torch.npu.get_device_name(0), end=" ")
    text = ctypes.create_string_buffer(128)
    assert library().aclsysGetVersionStr(None, text) == 0
    print(text.value.decode())
