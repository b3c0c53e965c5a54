"""One script and several ranks on two chips, ours and a third party's, with nothing changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.integration.plugins.environments import Environment
from tests.integration.train.forked import Server
from tests.unit.train.stored_tensors import stored

pytestmark = pytest.mark.grid

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "examples" / "own_loop_ranks.py")
STEPS = 30
TOY = {"adamw", "cross_entropy", "dropout", "rms_norm"}
NATIVE = {"toy": TOY, "cpu": {*TOY, "sums_of_squares"}}
# Both sum in double and round results to float32, of which no two differ by more than one unit in
# the last place; a step passes on what the steps before differ by, and adds a rounding of its own.
BOUND = STEPS * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Ranks that find two distributions: ours, and the example as if it were installed."""
    environment = Environment(tmp_path_factory.mktemp("environment"))
    for name in ("cpu", "toy"):
        plugin = {"anychip.backends": {name: f"anychip_{name}"}}
        environment.add_distribution(f"plugin-{name}", plugin)
    paths = [ROOT, ROOT / "backends" / "cpu", ROOT / "examples" / "third_party_backend"]
    variables = environment.variables()
    variables["PYTHONPATH"] += "".join(f":{path}" for path in paths)
    server = Server(variables)
    yield server
    server.close()


def _train(server: Server, backend: str, cwd: Path, *, steps: int, out: str) -> list[float]:
    """The losses that rank 0 printed; who served is checked."""
    ended = server.run(SCRIPT, backend, out, str(steps), world_size=2, cwd=cwd)
    assert [(rank.code, rank.err) for rank in ended] == [(0, ""), (0, "")]
    assert ended[1].out == ""
    rows = [line.split() for line in ended[0].out.splitlines()]
    assert {row[0] for row in rows if "native" in row and backend in row} == NATIVE[backend]
    return [float(row[3].rstrip(",")) for row in rows if row[0] == "step"]


def _model(out: Path) -> dict[str, Tensor]:
    tensors = stored(out / "checkpoint")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


@pytest.fixture(scope="module")
def ours(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses on ``cpu``."""
    return _train(server, "cpu", tmp_path_factory.mktemp("ours"), steps=STEPS, out="out")


def test_script_learns_alike_on_both_chips(
    server: Server, ours: list[float], tmp_path: Path
) -> None:
    theirs = _train(server, "toy", tmp_path, steps=STEPS, out="toy")
    assert theirs == pytest.approx(ours, rel=BOUND)
    assert len(theirs) == STEPS
    assert theirs[-1] < 0.6 * theirs[0]


def test_script_goes_on_with_another_chip(
    server: Server, ours: list[float], tmp_path: Path
) -> None:
    assert _train(server, "cpu", tmp_path, steps=STEPS - 10, out="out") == ours[:-10]
    before = _model(tmp_path / "out")
    ended = _train(server, "toy", tmp_path, steps=STEPS, out="out")
    assert ended == pytest.approx(ours[-10:], rel=BOUND)
    after = _model(tmp_path / "out")
    assert all(not torch.equal(after[name], before[name]) for name in before)
