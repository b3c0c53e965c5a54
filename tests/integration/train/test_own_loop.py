"""The loop that people copy: it learns, and goes on after an end in mid-run."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anychip.train import checkpoint
from tests import warm_python
from tests.integration.train.processes import variables

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_loop.py"


def test_example_as_a_command_learns_and_leaves_a_checkpoint(tmp_path: Path) -> None:
    done = warm_python.run(str(EXAMPLE), "cpu", "out", cwd=tmp_path, env=variables(), timeout=250)
    assert done.returncode == 0, done.stderr
    first, *_, last = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert float(last.split()[3].rstrip(",")) < float(first.split()[3].rstrip(",")) < 5.0
    assert (tmp_path / "out/checkpoint/manifest.json").exists()


@pytest.mark.grid
def test_example_that_died_and_is_started_again_ends_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main: Callable[[str, str], float] = runpy.run_path(str(EXAMPLE))["main"]
    wanted = main("cpu", str(tmp_path / "straight"))

    class Died(BaseException):
        pass

    def save_and_die(directory: str, *, step: int, **parts: Any) -> None:
        save(directory, step=step, **parts)
        if step == 40:
            raise Died

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", save_and_die)
    with pytest.raises(Died):
        main("cpu", str(tmp_path / "broken"))
    monkeypatch.undo()
    assert main("cpu", str(tmp_path / "broken")) == wanted
