"""Does a rank leave a record of its last calls when its job fails, and only then?"""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from anychip.comm.threads import run_ranks
from anychip.contract import CommunicationError, Communicator


def records(folder: Path) -> list[list[dict[str, Any]]]:
    files = sorted(folder.iterdir())
    assert [file.name for file in files] == [f"rank{rank}.jsonl" for rank in range(len(files))]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


@pytest.mark.parametrize("check", ["step", "off"])
def test_record_says_what_each_rank_was_at(tmp_path: Path, check: str) -> None:
    def work(comm: Communicator) -> None:
        pair = comm.split([[1, 0]], name="pair")
        pair.barrier()
        if comm.rank == 0:
            comm.send(torch.ones(2), 1, tag=7)
            comm.all_reduce(torch.ones(3), "max")
        comm.recv(torch.ones(2), 0, tag=7)
        while not comm.job.has_failed:  # type: ignore[attr-defined]
            time.sleep(0.01)

    begun = time.time()
    settings = {"timeout_s": 0.4, "check": check, "flight_record": tmp_path / "to be made"}
    with pytest.raises(CommunicationError, match=r"#2: rank 1 did not come within 0\.4 s"):
        run_ranks(2, work, **settings)
    ended = time.time()
    for rank, (head, *calls) in enumerate(records(tmp_path / "to be made")):
        assert (head["rank"], head["world_size"], head["ranks at fault"]) == (rank, 2, [1])
        assert head["failure"].startswith("rank 1 did not come within 0.4 s")
        found = [(c["group"], c["ranks"], c["number"], c["call"], c["state"]) for c in calls]
        last = ("world", [0, 1], 2, "all_reduce max (3,) torch.float32", "waited for")
        assert found == [
            ("world", [0, 1], 1, "split pair [[1, 0]]", "done"),
            ("pair", [1, 0], 1, "barrier", "done"),
            ("world", [0, 1], 1, "(2,) torch.float32", "done"), *([last] if rank == 0 else []),
        ]  # fmt: skip
        assert [calls[2][name] for name in ("source", "destination", "tag")] == [0, 1, 7]
        times = [c[name] for c in calls[:3] for name in ("begun", "waited", "ended")]
        assert times == sorted(times)
        assert begun - 0.01 < times[0] < times[-1] < ended + 0.01


def test_record_of_a_later_generation_replaces_none_of_an_earlier(tmp_path: Path) -> None:
    for generation in (0, 2):
        with pytest.raises(CommunicationError, match="enough"):
            run_ranks(2, lambda comm: (comm.barrier(), comm.abort("enough"), comm.barrier()),
                      flight_record=tmp_path, generation=generation)  # fmt: skip
    names = {path.name: json.loads(path.read_text().splitlines()[0]) for path in tmp_path.iterdir()}
    assert {name: head["generation"] for name, head in names.items()} == {
        "rank0.jsonl": 0, "rank1.jsonl": 0,
        "rank0.generation2.jsonl": 2, "rank1.generation2.jsonl": 2,
    }  # fmt: skip


def test_job_that_does_not_fail_leaves_no_record(tmp_path: Path) -> None:
    run_ranks(2, lambda comm: comm.barrier(), flight_record=tmp_path)
    assert records(tmp_path) == []


def test_record_that_cannot_be_written_is_said_and_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CommunicationError, match="enough"):
        run_ranks(2, lambda comm: (comm.barrier(), comm.abort("enough"), comm.barrier()),
                  flight_record=tmp_path / "file")  # fmt: skip
    assert "anychip: rank 1: no flight record: " in capsys.readouterr().err
