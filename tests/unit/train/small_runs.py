"""Runs of a model that does a step in some milliseconds, for the tests of the trainer."""

from dataclasses import replace

import anychip
from anychip.contract import Communicator
from anychip.train import config, loop
from anychip.train.report import StepRecord

TINY = (
    "run.sample_tokens=5", "data.prefetch=0", "data.batch_size=2", "model.layers=2",
    "model.heads=2", "model.width=16", "model.context=16",
)  # fmt: skip


def tiny(*settings: str) -> list[str]:
    """Settings of such a run; of those that are given twice, the last one counts."""
    return list({setting.split("=")[0]: setting for setting in (*TINY, *settings)}.values())


def build(*settings: str, comm: Communicator | None = None) -> loop.Run:
    return loop.build(config.load(None, tiny(*settings)), anychip.use("cpu"), comm)


def nothing(row: object) -> None:
    """Shows no row."""


def bits(run: loop.Run) -> list[bytes]:
    with run.optimizer.whole():
        return [p.detach().numpy().tobytes() for p in run.model.parameters()]


def without_time(rows: list[StepRecord]) -> list[StepRecord]:
    return [replace(row, tokens_per_s=0.0) for row in rows]
