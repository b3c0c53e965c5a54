"""Does the launcher start ranks, end them together, and say which one failed?"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from anychip.train.interruption import Interrupted
from anychip.train.launch import RankFailedError, first_failure, launch, raise_if_interrupted

# Ranks that do not import torch start at once; the last test has real ones.
PREAMBLE = """
import os, signal, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
"""


def python(source: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + source]


def test_ranks_get_their_places_arguments_and_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "print(rank, size, os.environ['COLOUR'], flush=True); print('e', file=sys.stderr)"
    launch(3, python(source), tmp_path / "logs", environment={"COLOUR": "deep blue"})
    assert capfd.readouterr() == ("0 3 deep blue\n", "e\n")
    for rank in (1, 2):
        assert (tmp_path / "logs" / f"rank{rank}.out").read_text() == f"{rank} 3 deep blue\n"
        assert (tmp_path / "logs" / f"rank{rank}.err").read_text() == "e\n"


def test_failing_rank_ends_the_others_and_is_shown(tmp_path: Path) -> None:
    source = """
if rank == 1:
    print("no such file", file=sys.stderr)
    sys.exit(7)
open(sys.argv[1] + str(rank), "w").write(str(os.getpid()))
time.sleep(100)
"""
    with pytest.raises(RankFailedError, match="rank 1 ended with exit code 7") as caught:
        launch(3, [*python(source), str(tmp_path / "pid")], tmp_path)
    assert (caught.value.rank, caught.value.exit_code) == (1, 7)
    assert "rank1.err:\n  no such file" in str(caught.value)
    for rank in (0, 2):
        path = tmp_path / f"pid{rank}"
        assert not path.exists() or not Path("/proc", path.read_text()).exists()


def failures(codes: dict[int, int]) -> dict[int, ProcessFailure]:
    return {rank: ProcessFailure(rank, 1000 + rank, code, "") for rank, code in codes.items()}


@pytest.mark.parametrize(
    ("codes", "missed", "first"),
    [
        ({0: 1, 1: 1, 2: 1}, (1,), 2), ({0: 1, 1: 1, 2: 1}, (1, 2), 0),
        ({0: 1, 1: -9, 2: 1}, (), 1), ({0: 1, 1: -15, 2: 3}, (), 2), ({0: 2, 1: -15}, (), 0),
        ({1: 1, 2: -6}, (1,), 2),
    ],
)  # fmt: skip
def test_first_failure_is_the_one_that_others_missed(
    tmp_path: Path, codes: dict[int, int], missed: tuple[int, ...], first: int
) -> None:
    for rank in missed:
        text = f"world, rank {rank} of 3: barrier #4: rank {first} is lost\n"
        (tmp_path / f"rank{rank}.err").write_text(text)
    assert first_failure(failures(codes), tmp_path).local_rank == first


def test_killed_rank_is_named_before_those_that_missed_it(tmp_path: Path) -> None:
    source = """
if rank == 2:
    os.mkfifo(sys.argv[1] + "made")
    os.rename(sys.argv[1] + "made", sys.argv[1])
    open(sys.argv[1], "w")
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
open(sys.argv[1]).read()  # until the other end is closed, by death
sys.exit(1)
"""
    with pytest.raises(RankFailedError, match="rank 2 was ended by SIGKILL") as caught:
        launch(3, [*python(source), str(tmp_path / "pipe")], tmp_path)
    assert caught.value.exit_code == 128 + signal.SIGKILL


INTERRUPTED = """
import signal, sys
from pathlib import Path
from anychip.train.interruption import Interrupted
from anychip.train.launch import launch

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    launch(2, [sys.executable, "-c", sys.argv[2], sys.argv[1]], Path(sys.argv[1]))
except Interrupted as stop:
    sys.exit(128 + stop.signal)
"""
COUNTS_SIGNALS = """
count = 0
def note(number, frame):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
open(f"{sys.argv[1]}/ready{rank}", "w").close()
while not count:
    time.sleep(0.01)
time.sleep(1)
open(f"{sys.argv[1]}/count{rank}", "w").write(f"{count} {os.getpid()}")
"""


def test_interrupt_from_the_terminal_reaches_each_rank_once(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path), PREAMBLE + COUNTS_SIGNALS],
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"ready{rank}").exists() for rank in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(launcher.pid, signal.SIGINT)  # what a terminal does
    assert launcher.wait(timeout=60) == 128 + signal.SIGINT
    for rank in (0, 1):
        count, process = (tmp_path / f"count{rank}").read_text().split()
        assert count == "1"
        assert not Path("/proc", process).exists()


@pytest.mark.parametrize(("codes", "number", "said"), [
    ({0: 143, 1: 143}, signal.SIGTERM, ""), ({0: 130, 1: 130}, signal.SIGINT, ""),
    ({0: 143, 1: -15}, signal.SIGTERM, ""),
    ({0: -15, 1: -15}, signal.SIGTERM, "a rank got SIGTERM before the first step"),
    ({0: -15, 1: 130}, signal.SIGINT, "a rank got SIGINT before the first step"),
    ({1: -2}, signal.SIGINT, "a rank got SIGINT before the first step"),
])  # fmt: skip
def test_ranks_that_were_asked_to_end_have_not_failed(
    codes: dict[int, int], number: signal.Signals, said: str
) -> None:
    with pytest.raises(Interrupted) as caught:
        raise_if_interrupted(failures(codes))
    assert (str(caught.value), caught.value.signal) == (said, number)
    raise_if_interrupted(failures({**codes, 2: 1}))


def test_launch_of_no_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1 expected, got 0"):
        launch(0, python(""), tmp_path)


REAL = """
import torch
import anychip
comm = anychip.use("cpu").communicator(timeout_s=60)
value = torch.full((2,), float(rank + 1))
comm.all_reduce(value)
print(comm.world_size, value.tolist(), flush=True)
if rank == 1:
    raise ArithmeticError("of its own")
comm.barrier()
"""


def test_communicator_joins_the_ranks_that_were_launched(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailedError, match=r"rank1.err:[^:]*(\n.*)*of its own") as caught:
        launch(2, python(REAL), tmp_path, environment={"OMP_NUM_THREADS": "1"})
    assert caught.value.exit_code == 1
    shown = capfd.readouterr()
    assert shown.out == "2 [3.0, 3.0]\n"
    assert "rank 0 of 2: barrier" in shown.err
    assert "rank 1 ended with ArithmeticError: of its own" in shown.err
