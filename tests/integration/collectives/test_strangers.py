"""Can anybody from outside a machine reach a job that is all on it?"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration import quiet_network
from tests.integration.train.processes import TINY, command, variables

ROOT = Path(__file__).parents[3]


def test_stranger_reaches_nothing_of_a_job_on_one_machine(tmp_path: Path) -> None:
    prefix = quiet_network.prefix()
    if prefix is None or not shutil.which("ip") or not shutil.which("nsenter"):
        pytest.skip("no network namespace joined by a veth pair: that needs root, ip and nsenter")
    ranks = command(*TINY, "--steps", "100000", "--nproc", "2", "--out", "out", "--backend", "cpu")
    scene = [sys.executable, "-m", "tests.integration.collectives.attack", str(tmp_path), *ranks]
    ended = subprocess.run(
        [*prefix, *scene], cwd=ROOT, env=variables(), capture_output=True, text=True, timeout=250
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert (found["open"], found["reached"], found["executed"]) == ([], [], False)
    assert found["code"] == 130
    assert "anychip: interrupted after step " in found["errors"]
