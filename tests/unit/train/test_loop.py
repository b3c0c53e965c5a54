"""The trainer: it learns, accumulates, resumes equal in bits, and stops when it must."""

import hashlib
import math
import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anychip
from anychip.train import config, files, loop, report
from anychip.train.interruption import Interrupted, Interruption
from anychip.train.loop import TrainingError
from anychip.train.report import StepRecord
from tests.unit.train import small_runs
from tests.unit.train.small_runs import bits, nothing, without_time

OWN = ("run.steps=8", "model.layers=1", "checkpoint.every=3", "data.prefetch=2")
build = partial(small_runs.build, *OWN)
LLAMA = ["model.kind=llama", "model.kv_heads=1"]


@pytest.mark.parametrize("settings", [[], LLAMA], ids=["gpt", "llama"])
def test_training_learns_a_repeated_text(tmp_path: Path, settings: list[str]) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be, " * 50)
    run = build(f'data.files=["{text}"]', "run.steps=120", "optimizer.lr=1e-2", *settings)
    rows = loop.train(run, tmp_path, nothing)
    assert [row.step for row in rows] == list(range(1, 121))
    # Alike for all bytes is log 256; the text has 9 bytes, and what follows on most is certain.
    assert abs(rows[0].loss - math.log(256)) < 0.5
    assert rows[-1].loss < math.log(9) / 2


@pytest.mark.parametrize("settings", [["model.dropout=0.2"], LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("ends", ["error", "steps"])
def test_run_resumed_has_the_rows_and_bits_of_one_that_was_not_ended(
    tmp_path: Path, settings: list[str], ends: str
) -> None:
    straight = build(*settings)
    (tmp_path / "straight").mkdir()
    wanted = loop.train(straight, tmp_path / "straight", nothing)

    out = tmp_path / "broken"
    out.mkdir()
    first = build(*settings)

    def die_at_step_5(row: StepRecord) -> None:
        if row.step == 5 and ends == "error":
            raise ZeroDivisionError

    if ends == "error":
        with pytest.raises(ZeroDivisionError):
            loop.train(first, out, die_at_step_5)
        assert len(report.read_metrics(out / "metrics.jsonl")) == 5
    else:
        loop.train(first, out, nothing)

    second = build(*settings)
    loop.restore(second, out)
    assert second.step == (3 if ends == "error" else 8)
    assert without_time(loop.train(second, out, nothing)) == without_time(wanted)
    assert without_time(report.read_metrics(out / "metrics.jsonl")) == without_time(wanted)
    assert bits(second) == bits(straight)
    assert loop.sample(second) == loop.sample(straight)


@pytest.mark.parametrize("settings", [[], LLAMA], ids=["gpt", "llama"])
def test_accumulation_of_two_halves_equals_the_whole_batch(
    tmp_path: Path, settings: list[str]
) -> None:
    whole = build("data.batch_size=4", "run.steps=1", "optimizer.max_norm=0", *settings)
    halves = build("data.accumulation=2", "run.steps=1", "optimizer.max_norm=0", *settings)
    grads = []
    for name, run in (("whole", whole), ("halves", halves)):
        (tmp_path / name).mkdir()
        run.optimizer.zero_grad = lambda *args: None  # type: ignore[method-assign]
        grads.append((loop.train(run, tmp_path / name, nothing)[0], run))
    (first, _), (second, _) = grads
    eps = np.finfo(np.float32).eps
    # Means of 64 tokens, summed in another order: each sum is off by at most 64 roundings.
    assert abs(first.loss - second.loss) <= 64 * eps * first.loss
    for p, q in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        bound = 64 * eps * first.grad_norm
        assert (p.grad - q.grad).abs().max().item() <= bound


def test_row_has_the_loss_and_norm_that_plain_torch_computes(tmp_path: Path) -> None:
    run, twin = build("run.steps=1"), build("run.steps=1")
    tokens, targets = twin.loader.next_batch()
    loss = torch.nn.functional.cross_entropy(twin.model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    grads = [p.grad.double().numpy() for p in twin.model.parameters() if p.grad is not None]
    norm = math.sqrt(sum((g**2).sum() for g in grads))
    (row,) = loop.train(run, tmp_path, nothing)
    # Both are float32 sums of at most a few thousand terms.
    assert abs(row.loss - loss.item()) <= 1e-5 * loss.item()
    assert abs(row.grad_norm - norm) <= 1e-4 * norm


def test_learning_rate_rises_then_falls_to_its_final_part(tmp_path: Path) -> None:
    run = build("run.steps=20", "schedule.warmup=0.25", "schedule.final=0.5", "optimizer.lr=1e-3")
    rates = [row.lr for row in loop.train(run, tmp_path, nothing)]
    wanted = [1e-3 * (i + 1) / 5 for i in range(5)]
    wanted += [1e-3 * (0.5 + 0.25 * (1 + math.cos(math.pi * i / 15))) for i in range(15)]
    assert np.allclose(rates, wanted, rtol=1e-12, atol=0)


def test_learning_rate_of_the_kind_constant_stays(tmp_path: Path) -> None:
    run = build("run.steps=3", "schedule.kind=constant", "optimizer.lr=1e-3")
    assert [row.lr for row in loop.train(run, tmp_path, nothing)] == [1e-3] * 3


@pytest.mark.parametrize(("batches", "step"), [(4, 5), (0, 1)], ids=["later", "at_once"])
def test_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, batches: int, step: int
) -> None:
    run = build()

    def poison(row: StepRecord) -> None:
        if row.step == batches:
            next(iter(run.model.parameters())).data.fill_(math.nan)

    if not batches:
        poison(StepRecord(step=0, loss=0, lr=0, grad_norm=0, tokens_per_s=0))
    with pytest.raises(TrainingError, match=f"step {step}: loss nan") as caught:
        loop.train(run, tmp_path, poison)
    assert len(report.read_metrics(tmp_path / "metrics.jsonl")) == batches
    resumed = build()
    if batches:
        loop.restore(resumed, tmp_path)
        assert resumed.step == 3
    else:
        with pytest.raises(FileNotFoundError, match=r"no checkpoint in .* To begin anew"):
            loop.restore(resumed, tmp_path)
    advice = "anychip train --resume" if batches else "begin again with a lower optimizer.lr"
    assert advice in str(caught.value)
    assert all(p.isfinite().all() for p in resumed.model.parameters())


def test_resume_takes_the_settings_of_the_optimizer_from_the_configuration(tmp_path: Path) -> None:
    loop.train(build(), tmp_path, nothing)
    run = build("optimizer.weight_decay=0.5")
    loop.restore(run, tmp_path)
    assert [group["weight_decay"] for group in run.optimizer.param_groups] == [0.5, 0.0]


def test_resume_past_the_last_step_is_refused_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    loop.train(build(), tmp_path, nothing)
    run = build("run.steps=5")
    before = bits(run)
    with pytest.raises(ValueError, match=r"trained for 8 steps already, and run\.steps is 5"):
        loop.restore(run, tmp_path)
    assert bits(run) == before


def test_resume_with_nothing_to_do_leaves_what_describes_the_run(tmp_path: Path) -> None:
    first = build()
    loop.finish(first, tmp_path, loop.train(first, tmp_path, nothing))
    names = ("config.toml", "metrics.jsonl", "provenance.json")
    before = {name: (tmp_path / name).read_bytes() for name in names}
    run = build("optimizer.lr=9.0")
    loop.restore(run, tmp_path)
    anychip.use("cpu")  # a new process has counted nothing
    rows = loop.train(run, tmp_path, nothing)
    loop.finish(run, tmp_path, rows)
    assert len(rows) == 8
    assert {name: (tmp_path / name).read_bytes() for name in names} == before


def test_equal_runs_save_equal_files(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        random.random()  # a process begins with a state of its own
        run = build("model.dropout=0.2")
        (tmp_path / name).mkdir()
        loop.train(run, tmp_path / name, nothing)
        paths = (tmp_path / name / "checkpoint").iterdir()
        found.append({p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in paths})
    assert len(found[0]) == 3
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["config.toml.partial", "metrics.jsonl", "metrics.jsonl.partial"])
def test_link_in_the_directory_of_a_run_is_not_written_through(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    out = tmp_path / "out"
    out.mkdir()
    (out / name).symlink_to(victim)
    loop.train(build("run.steps=1"), out, nothing)
    assert victim.read_text() == "mine"


def _fail_as_rank(listening: Interruption, number: signal.Signals | None) -> None:
    with listening, listening:
        if number is not None:
            signal.raise_signal(number)
        raise ZeroDivisionError


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
@pytest.mark.parametrize("is_noted", [False, True])
def test_rank_that_ends_by_an_error_is_not_ended_by_its_launcher(
    number: signal.Signals, is_noted: bool
) -> None:
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    of_rank = Interruption(of_rank=True)
    try:
        with pytest.raises(ZeroDivisionError):
            _fail_as_rank(of_rank, number if is_noted else None)
        signal.raise_signal(number)
        assert of_rank.signal == (number if is_noted else None)
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
    for how in (False, True):
        with pytest.raises(SystemExit), Interruption(of_rank=how):
            raise SystemExit
        assert {each: signal.getsignal(each) for each in handlers} == handlers


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["sigint", "sigterm"])
def test_signal_ends_the_run_after_its_step_with_a_checkpoint(tmp_path: Path, number: int) -> None:
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    def interrupt(row: StepRecord) -> None:
        if row.step == 4:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="interrupted after step 4 of 8") as caught:
        loop.train(build(), tmp_path, interrupt)
    assert caught.value.signal == number
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    run = build()
    loop.restore(run, tmp_path)
    assert run.step == 4


def test_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    def interrupt_twice(row: StepRecord) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        loop.train(build(), tmp_path, interrupt_twice)
    assert not isinstance(caught.value, Interrupted)


def test_finish_leaves_sample_plot_and_provenance(tmp_path: Path) -> None:
    run = build("run.sample_tokens=40")
    rows = loop.train(run, tmp_path, nothing)
    text = loop.finish(run, tmp_path, rows)
    assert (tmp_path / "sample.txt").read_text() == text
    assert 0 < len(text) <= 40
    assert {path.name for path in tmp_path.iterdir()} == {
        "checkpoint", "config.toml", "loss.png", "metrics.jsonl", "provenance.json", "sample.txt",
    }  # fmt: skip
    assert config.load(tmp_path / "config.toml") == run.config
    assert '"adamw"' in (tmp_path / "provenance.json").read_text()


def test_signal_during_finish_ends_the_run_when_all_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build()
    rows = loop.train(run, tmp_path, nothing)
    draw = report.plot_loss

    def interrupt(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        draw(*args)

    monkeypatch.setattr(report, "plot_loss", interrupt)
    with pytest.raises(Interrupted, match="interrupted after step 8 of 8; to go on") as caught:
        loop.finish(run, tmp_path, rows)
    assert caught.value.signal == signal.SIGTERM
    assert {"sample.txt", "loss.png", "provenance.json"} <= {p.name for p in tmp_path.iterdir()}


def test_full_disk_during_finish_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build()
    rows = loop.train(run, tmp_path, nothing)

    def full(file: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(files.NotWrittenError, match="it was not written: No space left") as caught:
        loop.finish(run, tmp_path, rows)
    assert caught.value.filename == str(tmp_path / "sample.txt")


def test_bf16_trains_with_parameters_and_moments_in_float32(tmp_path: Path) -> None:
    run = build("run.precision=bf16", "run.steps=20", "optimizer.lr=1e-2")
    rows = loop.train(run, tmp_path, nothing)
    assert rows[-1].loss < rows[0].loss
    states = [t for state in run.optimizer.state.values() for t in state.values()]
    assert {t.dtype for t in [*run.model.parameters(), *states]} == {torch.float32}
