"""Each thing that may happen to a run, once; ``benchmarks/kill_ranks.py`` does it many times."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.train.processes import variables

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kill_ranks.py"


def campaign(cwd: Path, *kinds: str) -> None:
    words = ["--trials", str(len(kinds)), "--kinds", ",".join(kinds), "--layouts", "1", "--json"]
    command = [sys.executable, str(SCRIPT), *words, "--seed", "3"]
    how = {"env": variables(), "capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run(command, cwd=cwd, **how)
    assert done.returncode == 0, done.stderr + done.stdout
    trials = json.loads(done.stdout)
    assert sorted(trial["kind"] for trial in trials) == sorted(kinds)
    for trial in trials:
        assert trial["problems"] == []
        assert (trial["is_lost"], trial["orphans"], trial["is_ending_wrong"]) == (False, 0, False)


@pytest.mark.grid
@pytest.mark.parametrize("kind", [
    *("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "full disk", "read-only", "two writers"),
    "stray environment",
])  # fmt: skip
def test_what_happens_to_a_run_loses_nothing_and_ends_as_documented(
    tmp_path: Path, kind: str
) -> None:
    campaign(tmp_path, kind)
