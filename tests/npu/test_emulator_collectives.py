"""HCCL's functions of the emulator between processes, called by torch.distributed over hccl."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch_npu")

from tests.npu import emulator_programs as programs
from tests.npu.emulator_process import run_ranks


def shared_files() -> set[str]:
    """Named shared memory that an emulator could have left."""
    return {path.name for path in Path("/dev/shm").iterdir() if "cann" in path.name}


@pytest.mark.parametrize("ranks", [2, 3], ids=["two", "three"])
def test_every_collective_gives_what_the_ranks_numbers_say(ranks: int) -> None:
    ended = run_ranks(programs.collectives, ranks, DEVICES=ranks)

    assert [one.checked().out for one in ended] == ["done\n"] * ranks


def test_sum_has_the_same_bits_on_every_rank() -> None:
    ended = run_ranks(programs.uneven_sums, 3, DEVICES=3)

    assert len({one.checked().out for one in ended}) == 1
    assert ended[0].out.strip()


def test_late_streams_change_no_result() -> None:
    ended = run_ranks(programs.collectives, 2, DELAY_US=5000, SEED=3)

    assert [one.checked().out for one in ended] == ["done\n"] * 2


def test_killed_ranks_leave_no_shared_memory() -> None:
    before = shared_files()

    run_ranks(programs.reduce_twice, 2, 1)
    dead, late = run_ranks(programs.killed_while_joining, 2, LINK_TIMEOUT_S=5)

    assert dead.code == -9
    assert late.checked().out.startswith("9 HcclCommInitRootInfo: no shared memory")
    assert "which made it, may have ended" in late.out
    assert shared_files() == before


def test_type_without_documented_reduction_is_refused_by_name() -> None:
    for one in run_ranks(programs.multiply_int16, 2):
        assert one.checked().out.startswith("RuntimeError")
        said = one.out + one.err
        assert "HcclAllReduce: data type 1 is not in the documented list for reduction 1" in said
