"""What is waited for when a job ends."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from anychip.comm.job import Job
from anychip.comm.ledger import Failure
from anychip.comm.solo import Solo


@pytest.mark.parametrize("failure", [None, Failure((1,), "rank 1 is lost")], ids=["well", "failed"])
def test_close_lets_the_device_end_unless_the_job_has_failed(failure: Failure | None) -> None:
    done: list[str] = []

    class Chip(Solo):
        def drain(self) -> None:
            done.append("drained")

        def close(self) -> None:
            done.append("closed")

    news: Any = SimpleNamespace(failure=failure, close=lambda: done.append("told"))
    named: Any = {"news": lambda *calls: news, "connect": lambda store: None}
    job = Job(0, 2, HashStore(), timeout_s=1.0, **named)
    job.hold(Chip("acme"))
    job.close()
    assert done == [*([] if failure else ["drained"]), "told", "closed"]
