"""Run by test_host_memory.py in a process of its own: what keeping changes holds for all of one."""

import resource
from collections.abc import Iterator
from multiprocessing import get_context
from threading import Thread

import pytest
import torch

import anychip
from anychip import host_memory
from anychip.train.models.gpt import GPT, GPTConfig

MIB = 1 << 20
SHAPE = (1024, 1024)  # 4 MiB of float32


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    anychip.use("cpu")
    host_memory.keep(256 * MIB)
    yield
    host_memory.stop()


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_steps_of_training_have_no_page_faults_and_the_bits_of_torchs_allocator() -> None:
    def run() -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=16384, context=128, layers=2, heads=2, width=64))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(16384, (8, 128))
        losses, found = [], []
        for _ in range(10):
            before = faults()
            loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            found.append(faults() - before)
        return losses, found

    losses, found = run()  # logits of 64 MiB, which the C library never keeps
    # The C library's heap, for small tensors, may still grow by some pages, of 4 KiB.
    assert max(found[6:]) <= 64, found
    host_memory.stop()
    plain, of_torch = run()
    assert losses == plain
    assert min(of_torch[3:]) > 1000, "the measurement tells nothing: torch's own has no faults"


def test_tensors_outlive_the_switch_in_both_directions() -> None:
    mine = torch.full(SHAPE, 2.0)
    before = host_memory.statistics()
    assert before.allocated >= mine.nbytes
    host_memory.stop()
    theirs = torch.full(SHAPE, 3.0)
    assert host_memory.statistics().allocated == before.allocated
    assert (mine + theirs).sum() == 5 * mine.numel()
    del mine
    assert host_memory.statistics()[:2] == (0, 0)
    host_memory.keep()
    del theirs
    assert torch.ones(SHAPE).sum() == 1024 * 1024
    assert host_memory.statistics().reserved > 0


def test_storage_that_grows_keeps_its_numbers() -> None:
    x = torch.arange(1 << 20, dtype=torch.float32)
    x.resize_(1 << 22)
    assert torch.equal(x[: 1 << 20], torch.arange(1 << 20, dtype=torch.float32))
    x.untyped_storage().resize_(0)
    assert host_memory.statistics().allocated < 4 * MIB


def test_shared_tensors_and_numpy_and_deepcopy_hold() -> None:
    x = torch.full(SHAPE, 4.0)
    array = x.numpy()
    copied = x.clone()
    x.share_memory_()
    assert array.sum() == 4.0 * x.numel()  # the block lives as long as the array does
    assert torch.equal(x, copied)
    assert torch.equal(torch.from_dlpack(copied), copied)


def _sum_in_child(queue: object, x: torch.Tensor) -> None:
    queue.put(float((x + torch.ones(SHAPE)).sum()))  # type: ignore[attr-defined]


def test_forked_children_allocate_while_threads_of_the_parent_do() -> None:
    x, running = torch.ones(SHAPE), True

    def allocate() -> None:
        while running:
            torch.empty(SHAPE)

    threads = [Thread(target=allocate) for _ in range(3)]
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    for thread in threads:
        thread.start()
    context = get_context("fork")
    try:
        for _ in range(10):
            queue = context.Queue()
            child = context.Process(target=_sum_in_child, args=(queue, x))
            child.start()
            assert queue.get(timeout=60) == 2.0 * x.numel()
            child.join(60)
            assert child.exitcode == 0
    finally:
        running = False
        for thread in threads:
            thread.join()


def test_statistics_of_the_backend_count_blocks_and_empty_cache_gives_them_back() -> None:
    memory = anychip.use("cpu").memory
    before = memory.stats()
    x = torch.empty(64 * MIB, dtype=torch.uint8)
    during = memory.stats()
    # Statistics are of the whole process, in which something small may come and go meanwhile.
    assert during.allocated - before.allocated >= 63 * MIB
    del x
    after = memory.stats()
    assert during.allocated - after.allocated >= 63 * MIB
    assert after.reserved >= after.allocated
    assert host_memory.statistics().reserved >= 64 * MIB
    memory.empty_cache()
    assert host_memory.statistics().reserved == host_memory.statistics().allocated
    host_memory.reset_peak()
    assert host_memory.statistics().peak_allocated == host_memory.statistics().allocated


def test_limit_holds_and_other_sizes_are_refused_as_torch_refuses_them() -> None:
    host_memory.keep(8 * MIB)
    for _ in range(3):
        several = [torch.empty(n * MIB, dtype=torch.uint8) for n in (3, 4, 5, 6)]
        del several
        found = host_memory.statistics()
        assert found.reserved - found.allocated <= 8 * MIB
    with pytest.raises(RuntimeError, match=r"can't allocate memory: you tried to allocate \d+"):
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        anychip.backend().memory.allocate(1 << 50)
    with pytest.raises(ValueError, match="limit must be at least 0 bytes, got -1"):
        host_memory.keep(-1)
    assert torch.ones(SHAPE).sum() == 1024 * 1024


def test_profiler_sees_the_memory_of_blocks() -> None:
    from torch.profiler import ProfilerActivity, profile

    options = {"profile_memory": True, "acc_events": True}  # which torch 2.11 warns without
    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        torch.empty(32 * MIB, dtype=torch.uint8)
    assert sum(max(0, each.self_cpu_memory_usage) for each in seen.key_averages()) >= 32 * MIB
