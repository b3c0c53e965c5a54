"""What every test runs under: this checkout's code, no settings of the person, no time limits."""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

hypothesis.settings.register_profile("anychip", deadline=None, derandomize=True)
hypothesis.settings.load_profile("anychip")


def pytest_configure(config: pytest.Config) -> None:
    """Child processes import what the tests import, installed or not."""
    # A job in the background starts with SIGINT ignored, and so would what the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    roots = [str(path) for path in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(autouse=True)
def settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes ANYCHIP_* from the environment, so that no choice made outside decides a test.

    Which emulated CUDA kernels are tested, and in which order of threads, is what the caller asks.
    """
    asked = ("ANYCHIP_CUDA_EMULATED", "ANYCHIP_EMULATOR_")
    for name in [name for name in os.environ if name.startswith("ANYCHIP_")]:
        if not name.startswith(asked):
            monkeypatch.delenv(name)
