"""DTensor on two ranks: sharded results equal whole ones; what has no rule is refused by name."""

import json
from pathlib import Path

import pytest

from tests import warm_python
from tests.integration.dispatch.sharded import cases

WORLD = 2
LABELS = [f"{label}/{door}" for label in cases() for door in ("short cut", "library")]
DROPPED = ("dropout", "bias_dropout_add", "dropout_add_rms_norm", "dropout_add_layer_norm")
REFUSED = [f"refused/{name}" for name in (*DROPPED, "attention_dropout", "clip", "l2_norm")]


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """The cases of this run, which need not be all."""
    ours = [item for item in request.session.items if item.path == Path(__file__)]
    return [item.callspec.params["label"] for item in ours if hasattr(item, "callspec")]


@pytest.fixture(scope="module")
def results(asked: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank found, by case."""
    folder = tmp_path_factory.mktemp("dtensor")
    worker = str(Path(__file__).with_name("sharded.py"))
    done = warm_python.run(worker, str(WORLD), str(folder), json.dumps(asked), timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.grid
@pytest.mark.parametrize("label", [*LABELS, *REFUSED])
def test_sharded_operator_equals_the_whole_one_or_is_refused(
    label: str, results: list[dict[str, str]]
) -> None:
    assert [found[label] for found in results] == [""] * WORLD


def test_every_case_was_run(asked: list[str], results: list[dict[str, str]]) -> None:
    for found in results:
        assert sorted(found) == sorted(asked)
