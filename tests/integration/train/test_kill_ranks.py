"""A few ranks killed and stopped at random; ``benchmarks/kill_ranks.py`` does it many times."""

import subprocess
import sys
from pathlib import Path

from tests.integration.train.processes import variables

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "kill_ranks.py"


def test_lost_ranks_are_noticed_and_the_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    words = ["--times", "2", "--stops", "1", "--layouts", "1", "--seed", "3"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        cwd=tmp_path,
        env=variables(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    kills, stops = done.stdout.splitlines()[-2:]
    assert kills.startswith("SIGKILL 2 times")
    assert kills.endswith("checkpoint whole 2/2; resumed bit for bit 2/2; problems 0")
    assert stops.startswith("SIGSTOP 1 times")
    assert stops.endswith("checkpoint whole 1/1; resumed bit for bit 1/1; problems 0")
