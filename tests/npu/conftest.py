"""What tests on the emulated CANN share: programs in processes of their own, and ranks of a job."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.npu.emulator_process import Ended, Program, run_ranks

RunJob = Callable[..., list[Ended]]


@pytest.fixture
def run_job() -> RunJob:
    """Runs ``program(port, ...)`` as the ranks of a job whose store this process holds."""
    from torch.distributed import TCPStore

    def run(program: Program, ranks: int, *arguments: Any, **settings: Any) -> list[Ended]:
        store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), False)
        return run_ranks(program, ranks, store.port, *arguments, **settings)

    return run
