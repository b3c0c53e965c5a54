"""DTensor on two ranks: sharded results equal whole ones; what has no rule is refused by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.dispatch.sharded import cases

WORLD = 2
LABELS = [f"{label}/{door}" for label in cases() for door in ("short cut", "library")]
DROPPED = ("dropout", "bias_dropout_add", "dropout_add_rms_norm", "dropout_add_layer_norm")
REFUSED = [f"refused/{name}" for name in (*DROPPED, "clip", "l2_norm")]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """The cases of this run, which need not be all."""
    ours = [item for item in request.session.items if item.path == Path(__file__)]
    return [item.callspec.params["label"] for item in ours if hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def results(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("dtensor")
    store, labels = str(folder / "store"), json.dumps(asked)
    files = [folder / f"rank{rank}.json" for rank in range(WORLD)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    worker = str(Path(__file__).with_name("sharded.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), str(WORLD), store, str(file), labels],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank, file in enumerate(files)
    ]
    errors = [process.communicate(timeout=240)[1] for process in ranks]
    assert [p.returncode for p in ranks] == [0] * WORLD, "\n".join(errors)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.grid
@pytest.mark.parametrize("label", [*LABELS, *REFUSED])
def test_sharded_operator_equals_the_whole_one_or_is_refused(
    label: str, results: list[dict[str, str]]
) -> None:
    assert [found[label] for found in results] == [""] * WORLD


def test_every_case_was_run(asked: list[str], results: list[dict[str, str]]) -> None:
    for found in results:
        assert sorted(found) == sorted(asked)
