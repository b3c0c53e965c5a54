"""Do the bytes of a whole ZeRO step, and no others, pass through the kernel's network interface?"""

import json
import os
import sys
from pathlib import Path

import pytest

from anychip.comm import wire_nbytes
from anychip.train.zero.layout import ALIGNMENT, BLOCK
from tests.integration import quiet_network
from tests.integration.train.forked import Server
from tests.integration.train.processes import on_two_hosts
from tests.integration.train.zero_bytes import SIZES

pytestmark = pytest.mark.grid

ROOT = Path(__file__).parents[3]
SCRIPT = str(Path(__file__).with_name("zero_bytes.py"))
WORLD_SIZE = 2
PSI = sum(SIZES)
PADDING = 4 * (ALIGNMENT + 2 * BLOCK * WORLD_SIZE) * len(SIZES)


def test_loopback_counter_sees_what_the_formula_of_every_stage_says(tmp_path: Path) -> None:
    """Rajbhandari et al. 2020, section 7: stages 1 and 2 send what plain data parallel does, 2 Psi;
    stage 3 gathers before backward once more, all units but the last.
    """
    prefix = quiet_network.prefix()
    if prefix is None:
        pytest.skip("this system does not let us make a network namespace")
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    variables = {"PYTHONPATH": os.pathsep.join(paths), "ANYCHIP_TRANSPORT": "sockets"}
    server = Server({**os.environ, **variables}, prefix=prefix)
    ended = server.run(SCRIPT, "loopback", "out.json", world_size=WORLD_SIZE, cwd=tmp_path)
    server.close()
    assert [rank.code for rank in ended] == [0] * WORLD_SIZE, ended[0].err
    stages = json.loads((tmp_path / "out.json").read_text())
    for stage, (seen, told) in enumerate((found["seen"], found["told"]) for found in stages):
        gathered = 2 * PSI - SIZES[-1] if stage == 3 else PSI
        large = {"reduce_scatter": PSI, "all_gather": gathered} if stage else {"all_reduce": PSI}
        for call, numel in large.items():
            assert 4 * numel <= told[call] <= 4 * numel + 2 * PADDING, (stage, call)
        payload = sum(wire_nbytes(call, nbytes, WORLD_SIZE) for call, nbytes in told.items())
        formula = sum(wire_nbytes(call, 4 * numel, WORLD_SIZE) for call, numel in large.items())
        assert formula <= payload
        # Above it are what ranks ask each other, headers of packets, and what the store is told.
        assert payload * WORLD_SIZE <= min(seen) <= 1.01 * formula * WORLD_SIZE, (stage, told)


def test_backward_gathers_nothing_from_another_host_where_neighbours_keep_weights(
    tmp_path: Path,
) -> None:
    """Wang et al. 2023 (ZeRO++), section 3.2: hpZ. Two hosts of two ranks; gradients stay.

    What a host lacks comes to it once, and not once for each of its ranks.
    """
    with on_two_hosts(2, sys.executable, SCRIPT, "cable", "out.json", cwd=tmp_path) as job:
        _, errors = job.communicate(timeout=200)
    assert job.returncode == 0, errors
    found = json.loads((tmp_path / "out.json").read_text())
    # Both hosts lack the half of the weights that the other one's ranks have.
    forward, backward = 4 * PSI, 4 * (PSI - SIZES[-1])
    for kept_by in ("None", "2"):
        assert forward <= found[kept_by][0] <= 1.02 * forward + 2 * PADDING
    assert backward <= found["None"][1] <= 1.02 * backward + 2 * PADDING
    assert found["2"][1] < 0.01 * backward
