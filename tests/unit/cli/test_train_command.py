"""What a process of several takes for itself before it trains."""

from pathlib import Path
from typing import Any

import pytest

import anychip
from anychip.cli import group
from anychip.cli.exit_codes import CANNOT_RUN
from tests.meta.honest import HonestBackend


def test_rank_without_a_device_of_its_own_does_not_train_on_the_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def use(*asked: Any, **named: Any) -> HonestBackend:
        return HonestBackend()

    monkeypatch.setattr(anychip, "use", use)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert group.run(["train", "--steps", "1", "--out", str(tmp_path / "out")]) == CANNOT_RUN
    assert "rank 2 of this machine has no device: there are 2" in capsys.readouterr().err
