"""Saved while training goes on: what was there when it was asked for, and published in one step.

Writers wait at a gate of the test's: that a step does not wait for them needs no clock.
"""

import errno
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import checkpoint, files, loop, run
from anychip.train.checkpoint import CheckpointError, Saver, publishing, writing
from anychip.train.interruption import Interrupted, Interruption
from anychip.train.loop import TrainingError
from anychip.train.report import StepRecord
from tests.unit.train.checkpoint import test_arrangements as arrangements
from tests.unit.train.checkpoint.test_keeping import steps
from tests.unit.train.stored_tensors import stored
from tests.unit.train.test_checkpoint import Parts
from tests.unit.train.zero_oracle import descend, on_models, ragged, ragged_loss, units_of


class Gate:
    """Before every file of tensors: closed until somebody opens it, or says which rank fails."""

    def __init__(self) -> None:
        self.opened, self.fails = threading.Event(), ""
        self.real = writing.write_tensors

    def __call__(self, *given: Any) -> Any:
        assert self.opened.wait(30)
        if self.fails and self.fails in threading.current_thread().name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.real(*given)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate()
    monkeypatch.setattr(writing, "write_tensors", found)
    yield found
    found.opened.set()


def published(directory: Path) -> int:
    """The step of the checkpoint, when there is one."""
    deadline = time.monotonic() + 30
    while checkpoint.saved_step(directory) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return checkpoint.saved_step(directory) or 0


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (3, 2), (2, 3)])
def test_steps_that_follow_change_nothing_of_what_is_written_and_nothing_is_sent(
    tmp_path: Path, gate: Gate, world_size: int, stage: int
) -> None:
    def work(comm: Communicator, model: nn.Module) -> Any:
        opt = arrangements.ragged_optimizer(model, comm, stage=stage, units=units_of(model))
        saver = Saver()
        for step in range(4):
            descend(opt, ragged_loss(model, step, 0, 0))
            if step == 1:
                want = arrangements.held(model, opt)
                checkpoint.save(
                    tmp_path, step=2, model=model, optimizer=opt, comm=comm, saver=saver
                )
        assert checkpoint.saved_step(tmp_path) is None
        comm.barrier()
        sent = comm.traffic.nbytes.copy()
        gate.opened.set()
        assert published(tmp_path) == 2
        assert comm.traffic.nbytes == sent
        saver.close()
        return want

    want = arrangements.joined(on_models(world_size, ragged, work))
    arrangements.assert_same(stored(tmp_path / "checkpoint"), want)
    assert steps(tmp_path / "checkpoint") == [2]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, None], ids=["torch", "zero"])
def test_all_of_a_checkpoint_is_of_the_step_at_which_it_was_asked_for(
    tmp_path: Path, gate: Gate, kind: Any
) -> None:
    """Weights, states, generators, position in the data and what the caller gave beside."""
    parts = Parts()
    if kind is not None:
        parts.optimizer = kind(parts.model.parameters())
        parts.optimizer.backward = lambda loss: loss.backward()
    parts.train(2)
    extra = {"seen": torch.ones(2)}
    with Saver() as saver:
        checkpoint.save(
            tmp_path, step=2, model=parts.model, optimizer=parts.optimizer, data=parts.data,
            extra=extra, saver=saver,
        )  # fmt: skip
        extra["seen"].zero_()
        losses = parts.train(3)
        gate.opened.set()
    other = Parts(seed=1)
    if kind is not None:
        other.optimizer = kind(other.model.parameters())
        other.optimizer.backward = lambda loss: loss.backward()
    assert other.resume(tmp_path).extra["seen"].tolist() == [1, 1]
    assert other.train(3) == losses
    assert other.bits() == parts.bits()


def test_host_holds_one_copy_of_what_a_rank_writes_and_uses_it_again(tmp_path: Path) -> None:
    def work(comm: Communicator, model: nn.Module) -> int:
        opt = arrangements.ragged_optimizer(model, comm, stage=3, units=units_of(model))
        with Saver() as saver:
            places, sizes = set[int](), set[int]()
            for step in (1, 2, 3):
                checkpoint.save(
                    tmp_path, step=step, model=model, optimizer=opt, comm=comm, saver=saver
                )
                sizes.add(saver.nbytes)
                places.add(saver._memory.data_ptr())  # type: ignore[union-attr]
        assert len(sizes) == len(places) == 1
        return sizes.pop()

    copies = on_models(2, ragged, work)
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    written = [entry["nbytes"] - entry["header_nbytes"] for entry in manifest["files"].values()]
    assert sorted(copies) == sorted(written)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("at_end", [True, False], ids=["close", "next_save"])
def test_error_of_a_writer_is_told_to_all_ranks_at_the_next_save_or_at_the_end(
    tmp_path: Path, gate: Gate, rank: int, at_end: bool
) -> None:
    def work(comm: Communicator) -> str:
        def save(step: int) -> None:
            checkpoint.save(tmp_path, step=step, model=model, optimizer=opt, comm=comm, saver=saver)

        model, saver = models[comm.rank], Saver()
        opt = arrangements.ragged_optimizer(model, comm, stage=2)
        save(1)
        save(2)  # waits for the first
        assert checkpoint.saved_step(tmp_path) == 1
        comm.barrier()
        gate.fails = f"rank {rank}"
        gate.opened.set()
        with pytest.raises(files.NotWrittenError) as caught:
            saver.close() if at_end else save(3)
        comm.barrier()
        gate.fails = ""
        save(4)
        saver.close()
        return str(caught.value)

    def first_is_written(*given: Any) -> Any:
        nonlocal count
        count += 1
        return gate.real(*given) if count <= 2 else gate(*given)

    count = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "write_tensors", first_is_written)
        models = [ragged() for _ in range(2)]
        told = run_ranks(2, work)
    assert all("of step 2 was not written; the one before is intact" in text for text in told)
    assert all("No space left on device" in text for text in told)
    assert steps(tmp_path / "checkpoint") == [4]


def test_what_is_not_written_yet_is_given_up_with_an_exception(tmp_path: Path, gate: Gate) -> None:
    parts, saver = Parts(), Saver()

    def save(step: int) -> None:
        checkpoint.save(
            tmp_path, step=step, model=parts.model, optimizer=parts.optimizer, saver=saver
        )

    def fail() -> None:
        with saver:
            save(1)
            threading.Timer(0.05, gate.opened.set).start()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert checkpoint.saved_step(tmp_path) is None
    assert [*(tmp_path / "checkpoint").iterdir()] == []
    with saver:
        save(2)
    assert steps(tmp_path / "checkpoint") == [2]


def test_ranks_that_write_into_different_directories_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        out = tmp_path / f"{comm.rank}"
        (out / "checkpoint").mkdir(parents=True)
        opt = arrangements.ragged_optimizer(model, comm, stage=1)
        for saver in (None, Saver()):
            if saver is not None:
                checkpoint.save(out, step=1, model=model, optimizer=opt, comm=comm, saver=saver)
            with pytest.raises(CheckpointError, match="the ranks see different directories"):
                checkpoint.save(out, step=2, model=model, optimizer=opt, comm=comm, saver=saver)

    monkeypatch.setattr(publishing, "WAIT_S", 0.1)
    on_models(2, ragged, work)


def test_host_without_memory_for_a_copy_is_told_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = arrangements.ragged_optimizer(model, comm, stage=1)
        comm.barrier()
        if comm.rank == 1:
            broken.append(threading.current_thread())
        comm.barrier()
        with pytest.raises(OSError, match=r"for a copy of what is saved; save without a saver"):
            checkpoint.save(tmp_path, step=1, model=model, optimizer=opt, comm=comm, saver=Saver())

    def empty(*given: Any, **how: Any) -> Any:
        if threading.current_thread() in broken and set(how) == {"dtype", "device"}:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(*given, **how)

    real, broken = torch.empty, list[Any]()
    monkeypatch.setattr(torch, "empty", empty)
    on_models(2, ragged, work)
    assert not (tmp_path / "checkpoint" / "manifest.json").exists()


@pytest.mark.parametrize("arrangement", ["2-stage2", pytest.param("2x1", marks=pytest.mark.grid)])
def test_run_that_saves_so_leaves_the_files_of_one_that_waits(
    tmp_path: Path, arrangement: str
) -> None:
    """Ended by a signal between two saves, too."""

    def work(ours: run.Run) -> Any:
        run.restore(ours, out)
        asked = Interruption()
        if ours.is_first and out.name == "asked":
            asked.signal = 15
        try:
            loop.train(ours, out, lambda row: None, asked)
        except Interrupted:
            assert ours.step == 1
        return arrangements.held_by(ours)

    found = {}
    arrangements.at("1", "run.steps=5", work=lambda ours: run.save(ours, tmp_path / "begun"))
    for kind in ("waits", "goes_on", "asked"):
        out = tmp_path / kind
        shutil.copytree(tmp_path / "begun", out)
        settings = [f"checkpoint.asynchronous={str(kind != 'waits').lower()}"]
        want = arrangements.joined(
            arrangements.at(arrangement, "run.steps=5", "checkpoint.every=2", *settings, work=work)
        )
        arrangements.assert_same(stored(out / "checkpoint"), want)
        found[kind] = {p.name for p in (out / "checkpoint").iterdir()}
    assert found["waits"] == found["goes_on"] != found["asked"]


def test_run_whose_loss_is_not_finite_waits_for_the_checkpoint_before(
    tmp_path: Path, gate: Gate
) -> None:
    def work(ours: run.Run) -> str:
        def poison(row: StepRecord) -> None:
            next(iter(ours.model.parameters())).data.fill_(math.nan)
            threading.Timer(0.1, gate.opened.set).start()

        with pytest.raises(TrainingError) as caught:
            loop.train(ours, tmp_path, poison)
        return str(caught.value)

    settings = ("run.steps=5", "checkpoint.every=1", "checkpoint.asynchronous=true")
    for told in arrangements.at("2-stage2", *settings, work=work):
        assert "step 2: loss nan" in told
        assert f"the last good checkpoint is in {tmp_path}" in told
    assert steps(tmp_path / "checkpoint") == [1]


def test_process_that_does_not_close_its_saver_ends_when_all_is_written(tmp_path: Path) -> None:
    code = f"""
import time, torch
from anychip.train import checkpoint
from anychip.train.checkpoint import writing
model = torch.nn.Linear(2, 2)
real = writing.write_tensors
writing.write_tensors = lambda *given: time.sleep(0.2) or real(*given)
given = dict(model=model, optimizer=torch.optim.SGD(model.parameters()))
checkpoint.save({str(tmp_path)!r}, step=7, saver=checkpoint.Saver(), **given)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert checkpoint.saved_step(tmp_path) == 7
