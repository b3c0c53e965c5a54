"""What the suite's process sets before torch is there."""

import os

import pytest

from anychip.cli import group
from anychip.cli.exit_codes import WRONG_USE


def test_threads_that_wait_are_told_to_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is as it was afterwards
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert group.run(["conformance", "--backend", "of-nobody"]) == WRONG_USE
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
