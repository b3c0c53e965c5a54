"""What is held out: each target once, the same number on any ranks, and nothing of it in training.

Ranks are threads, which begin with what one run has saved: they share the generator of weights.
"""

import math
import random
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import anychip
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import asking, checkpoint, data, evaluation, loop, report
from anychip.train import run as running
from anychip.train.report import Evaluation, StepRecord
from tests.unit.train import small_runs
from tests.unit.train.small_runs import bits, nothing, without_time

CONTEXT = 8
build = partial(small_runs.build, f"model.context={CONTEXT}", "run.steps=8", "checkpoint.every=3")
DROPOUT = ("model.dropout=0.2",)
EMA = ("optimizer.ema_decay=0.9", "eval.ema=true")
STAGES = ("parallel.pipeline=2", "data.accumulation=2")


def written(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    """Settings of what is trained on and of what is held out: 13 windows, the last one short."""
    trained = written(tmp_path / "trained.txt", "to be or not to be, that is the question; " * 9)
    asked = written(tmp_path / "asked.txt", "whether 'tis nobler in the mind to suffer " * 3)
    return f'data.files=["{trained}"]', f'eval.files=["{asked}"]'


def folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("num_tokens", [2, CONTEXT, CONTEXT + 1, CONTEXT + 2, 5 * CONTEXT])
def test_every_token_but_the_first_is_a_target_once_behind_the_one_before(
    num_tokens: int, size: int
) -> None:
    tokens = torch.randint(1, 255, (num_tokens,), dtype=torch.uint8)
    held_out = data.HeldOut(tokens, context=CONTEXT, tokenizer=data.ByteTokenizer())
    pairs = []
    for first in range(0, held_out.num_windows, size):
        inputs, targets = held_out.batch(range(first, first + size))
        assert inputs.shape == targets.shape == (size, CONTEXT)
        is_target = targets != data.IGNORED_TARGET
        pairs += [*zip(inputs[is_target].tolist(), targets[is_target].tolist(), strict=True)]
    assert pairs == [*pairwise(tokens.tolist())]
    _, beyond = held_out.batch(range(held_out.num_windows, held_out.num_windows + size))
    assert (beyond == data.IGNORED_TARGET).all()


def test_first_token_of_a_document_is_no_target_where_none_crosses() -> None:
    tokens = torch.tensor([5, 6, 0, 7, 0, 8], dtype=torch.uint8)
    held_out = data.HeldOut(
        tokens, context=4, tokenizer=data.ByteTokenizer(), cross_document_targets=False
    )
    _, targets = held_out.batch(range(2))
    assert targets.tolist() == [[6, 0, -100, 0], [-100, -100, -100, -100]]


@pytest.mark.parametrize("mode", [True, False], ids=["training", "eval"])
def test_evaluation_is_the_mean_that_torch_computes_of_all_windows(
    texts: tuple[str, str], mode: bool
) -> None:
    run = build(*texts, *DROPOUT)
    assert run.held_out is not None
    tokens = torch.from_numpy(run.held_out.tokens.read(np.array([0]), len(run.held_out.tokens))[0])
    run.model.eval()
    losses, hits = [], 0
    for first in range(0, len(tokens) - 1, CONTEXT):
        window = tokens[first : first + CONTEXT + 1]
        logits = run.model(window[None, :-1])[0].detach()
        losses += torch.nn.functional.cross_entropy(
            logits.double(), window[1:], reduction="none"
        ).tolist()
        hits += int((logits.argmax(-1) == window[1:]).sum())
    run.model.train(mode)
    found = evaluation.evaluate(run)
    assert run.model.training is mode
    assert found.targets == len(losses) == len(tokens) - 1 == 125
    # Each loss is one of float32, of numbers near 5; their sum has no further error.
    want = float(np.mean(losses))
    assert found.loss == pytest.approx(want, rel=8 * float(np.finfo(np.float32).eps))
    assert found.perplexity == pytest.approx(math.exp(want), rel=1e-5)
    assert found.accuracy == hits / len(losses)


def test_first_batches_alone_are_asked_where_the_settings_say_so(texts: tuple[str, str]) -> None:
    assert evaluation.evaluate(build(*texts, "eval.batches=3")).targets == 3 * 2 * CONTEXT


@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_has_the_same_bits_at_any_number_of_ranks(
    tmp_path: Path, texts: tuple[str, str], stage: int
) -> None:
    one = build(*texts, *DROPOUT)
    loop.save(one, tmp_path)
    want = evaluation.evaluate(one)

    def work(comm: Communicator) -> tuple[Evaluation, Evaluation]:
        run = build(*texts, *DROPOUT, f"optimizer.stage={stage}", comm=comm)
        loop.restore(run, tmp_path)
        return evaluation.evaluate(run), evaluation.evaluate(run)

    for world_size in (1, 2, 3, 4):
        assert run_ranks(world_size, work) == [(want, want)] * world_size


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("stage", [0, 3])
def test_evaluation_of_stages_is_that_of_the_whole_model(
    tmp_path: Path, texts: tuple[str, str], schedule: str, stage: int
) -> None:
    one = build(*texts)
    loop.save(one, tmp_path)
    want = evaluation.evaluate(one)
    stages = ("parallel.pipeline=2", f"parallel.schedule={schedule}", "data.accumulation=3")

    def work(comm: Communicator) -> Evaluation:
        run = build(*texts, *stages, f"optimizer.stage={stage}", comm=comm)
        loop.restore(run, tmp_path)
        return evaluation.evaluate(run)

    found = run_ranks(4, work)
    assert found == [found[0]] * 4
    assert found[0].loss == pytest.approx(want.loss, rel=1e-6)
    assert (found[0].targets, found[0].accuracy) == (want.targets, want.accuracy)


def test_training_has_the_same_bits_with_and_without_evaluation(
    tmp_path: Path, texts: tuple[str, str]
) -> None:
    trained, asked = texts
    runs = []
    evaluated = (asked, "eval.every=1", "eval.keep_best=true")
    for name, more in (("without", ()), ("with", evaluated), ("of_averages", (*evaluated, *EMA))):
        run = build(trained, *DROPOUT, *more)
        rows = loop.train(run, folder(tmp_path / name), nothing)
        runs.append((without_time(rows), bits(run), torch.get_rng_state().tolist()))
    assert runs[0] == runs[1] == runs[2]
    assert not (tmp_path / "without" / "eval.jsonl").exists()


@pytest.mark.parametrize(("world_size", "how"), [
    pytest.param(2, ("optimizer.stage=3",), id="stage 3"),
    *(
        pytest.param(2, (f"optimizer.stage={n}",), id=f"stage {n}", marks=pytest.mark.grid)
        for n in range(3)
    ),
    pytest.param(2, STAGES, id="pipeline", marks=pytest.mark.grid),
    pytest.param(4, (*STAGES, "optimizer.stage=3"), id="pipeline, stage 3", marks=pytest.mark.grid),
])  # fmt: skip
def test_training_of_ranks_goes_on_as_if_nothing_had_been_asked_even_of_averages(
    tmp_path: Path, texts: tuple[str, str], world_size: int, how: tuple[str, ...]
) -> None:
    trained, asked = texts
    before = folder(tmp_path / "before")
    loop.save(build(trained, *EMA[:1]), before)

    def work(comm: Communicator, name: str, *more: str) -> Any:
        run = build(trained, *EMA[:1], *how, *more, comm=comm)
        loop.restore(run, before)
        rows = loop.train(run, folder(tmp_path / name), nothing)
        return without_time(rows), bits(run)

    want = run_ranks(world_size, lambda comm: work(comm, "without"))
    of_weights = (asked, "eval.every=1")
    assert run_ranks(world_size, lambda comm: work(comm, "with", *of_weights)) == want
    of_averages = (*of_weights, *EMA[1:], "eval.keep_best=true")
    assert run_ranks(world_size, lambda comm: work(comm, "of_averages", *of_averages)) == want
    rows, others = (evaluation.rows_of(tmp_path / name) for name in ("of_averages", "with"))
    assert min(row.loss for row in others) < min(row.loss for row in rows[:-1])
    for out, row in ((tmp_path / "of_averages", rows[-1]), (tmp_path / "with", others[-1])):
        is_of_averages = row is rows[-1]
        settings, chip = asking.settings_of(out), anychip.use("cpu")
        found = evaluation.evaluate(asking.trained(out, settings, chip, averaged=is_of_averages))
        assert found.loss == pytest.approx(row.loss, rel=1e-6 if len(how) > 1 else 0)


def test_fraction_is_the_last_part_and_never_trained_on(tmp_path: Path) -> None:
    file = written(tmp_path / "text.txt", "a" * 900 + "b" * 100)
    run = build(f'data.files=["{file}"]', "eval.fraction=0.1")
    assert run.held_out is not None
    held_out = run.held_out.tokens.read(np.array([0]), len(run.held_out.tokens))
    assert held_out.tolist() == [[ord("b")] * 100]
    seen = [run.loader.next_batch() for _ in range(2 * run.loader.num_windows)]
    assert {value for batch in seen for part in batch for value in part.unique().tolist()} == {97}
    with pytest.raises(ValueError, match=r"at least 2 tokens expected .* got 1"):
        build(f'data.files=["{file}"]', "eval.fraction=0.001")


def test_run_that_goes_on_has_the_evaluations_of_one_that_was_not_ended(
    tmp_path: Path, texts: tuple[str, str]
) -> None:
    settings = (*texts, *DROPOUT, "eval.every=2", "eval.keep_best=true", "run.steps=9")
    straight = build(*settings)
    loop.train(straight, folder(tmp_path / "straight"), nothing)
    want = evaluation.rows_of(tmp_path / "straight")
    assert [row.step for row in want] == [2, 4, 6, 8, 9]
    out = folder(tmp_path / "broken")

    def die(row: StepRecord) -> None:
        if row.step == 5:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.train(build(*settings), out, die)
    assert [row.step for row in evaluation.rows_of(out)] == [2, 4]
    again = build(*settings)
    loop.restore(again, out)
    assert again.step == 3
    loop.train(again, out, nothing)
    assert evaluation.rows_of(out) == want
    assert bits(again) == bits(straight)


def test_run_with_a_trained_tokenizer_is_asked_with_the_tokenizer_that_it_has_kept(
    tmp_path: Path,
) -> None:
    pytest.importorskip("tokenizers")
    file = written(tmp_path / "text.txt", "to be or not to be, that is the question; " * 40)
    run = build(
        f'data.files=["{file}"]', "data.tokenizer=bpe", "model.vocab_size=270",
        "eval.fraction=0.2", "run.steps=2",
    )  # fmt: skip
    loop.train(run, tmp_path, nothing)
    assert asking.settings_of(tmp_path).data.tokenizer == str(tmp_path / "tokenizer.json")
    found = asking.trained(tmp_path, asking.settings_of(tmp_path), anychip.use("cpu"))
    assert [evaluation.evaluate(found)] == evaluation.rows_of(tmp_path)
    Path(file).write_text("something else is the question; " * 40)
    with pytest.raises(ValueError, match="the data has another text"):
        asking.trained(tmp_path, asking.settings_of(tmp_path), anychip.use("cpu"))


@pytest.mark.parametrize(("stage", "host"), [(0, 0), (1, 0), (2, 1), (3, 0), (3, 1)])
def test_run_is_asked_without_its_optimizers_states_and_with_averages(
    tmp_path: Path, texts: tuple[str, str], stage: int, host: int
) -> None:
    out, more = folder(tmp_path / "out"), ("optimizer.ema_decay=0.9", f"optimizer.stage={stage}")
    more = (*more, *host * ('optimizer.offload="states=host, gradients=host"',))
    loop.train(build(*texts, *more), out, nothing)
    settings = asking.settings_of(out)
    assert settings.optimizer.stage == stage

    def ask(comm: Communicator, averaged: bool) -> tuple[Evaluation, int]:
        run = asking.trained(out, settings, anychip.use("cpu"), comm, averaged=averaged)
        states = run.optimizer.memory().states
        return evaluation.evaluate(run), states

    for averaged in (False, True):
        asked = run_ranks(2, partial(ask, averaged=averaged))
        assert asked[0] == asked[1]
        # Of each group the count of steps, float32.
        assert asked[0][1] == 2 * 4
        is_last = asked[0][0] == evaluation.rows_of(out)[-1]
        assert is_last != averaged


@pytest.fixture
def getting_worse(tmp_path: Path) -> tuple[str, ...]:
    """What is learned makes what is asked less likely, from the first step on."""
    trained, asked = (written(tmp_path / f"{name}.txt", name * 200) for name in "ab")
    files = (f'data.files=["{trained}"]', f'eval.files=["{asked}"]')
    return (*files, "schedule.kind=constant", "eval.every=2")


def test_run_without_a_better_loss_ends_when_its_patience_does(
    tmp_path: Path, getting_worse: tuple[str, ...]
) -> None:
    settings = (*getting_worse, "eval.patience=2")
    out, run, shown = folder(tmp_path / "out"), build(*settings), list[Evaluation]()
    rows = loop.train(run, out, nothing, show_evaluation=shown.append)
    assert (run.step, len(rows)) == (6, 6)
    assert shown == evaluation.rows_of(out)
    assert [row.step for row in shown] == [2, 4, 6]
    assert shown[0].loss < min(row.loss for row in shown[1:])
    loop.finish(run, out, rows)
    kept = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    again = build(*settings)
    loop.restore(again, out)
    assert len(loop.train(again, out, nothing)) == again.step == 6
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == kept
    patient = build(*getting_worse, "eval.patience=3")
    loop.restore(patient, out)
    loop.train(patient, out, nothing)
    assert patient.step == 8


@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_checkpoint_of_the_best_evaluation_stays(
    tmp_path: Path, getting_worse: tuple[str, ...], asynchronous: str
) -> None:
    more = ("eval.keep_best=true", f"checkpoint.asynchronous={asynchronous}")
    out, run = folder(tmp_path / "out"), build(*getting_worse, *more)
    loop.train(run, out, nothing)
    best = report.best_of(evaluation.rows_of(out))
    assert (best.step, run.step) == (2, 8)
    for path, want in ((out / running.BEST, best), (out, evaluation.rows_of(out)[-1])):
        found = asking.trained(path, asking.settings_of(path), anychip.use("cpu"))
        assert evaluation.evaluate(found) == want


def test_link_in_the_place_of_the_best_checkpoint_is_not_followed(
    tmp_path: Path, getting_worse: tuple[str, ...]
) -> None:
    out, elsewhere = folder(tmp_path / "out"), folder(tmp_path / "elsewhere")
    (out / running.BEST).symlink_to(elsewhere)
    with pytest.raises(checkpoint.CheckpointError, match="is a link, which is not followed"):
        loop.train(build(*getting_worse, "eval.keep_best=true"), out, nothing)
    assert [*elsewhere.iterdir()] == []


def test_loss_that_is_not_finite_is_an_error(texts: tuple[str, str]) -> None:
    run = build(*texts)
    next(iter(run.model.parameters())).data.fill_(math.nan)
    with pytest.raises(loop.TrainingError, match="the loss of the held-out data is nan"):
        evaluation.evaluate(run)


def test_model_comes_to_the_entropy_of_a_language_that_it_has_not_seen(tmp_path: Path) -> None:
    """After each of four letters one of two follows, as likely as the other: log 2 per target."""
    draw = random.Random(3)
    state, letters = 0, []
    for _ in range(20_000):
        state = (2 * state + draw.randrange(2)) % 4
        letters.append("abcd"[state])
    file = written(tmp_path / "text.txt", "".join(letters))
    run = build(
        f'data.files=["{file}"]', "eval.fraction=0.2", "run.steps=150", "model.layers=1",
        "data.batch_size=16", "optimizer.lr=2e-2", "checkpoint.every=1000",
    )  # fmt: skip
    loop.train(run, tmp_path, nothing)
    (row,) = evaluation.rows_of(tmp_path)
    assert (row.step, row.targets) == (150, 3999)
    assert row.loss == pytest.approx(math.log(2), rel=0.02)
    # 3999 choices of two: within three deviations.
    assert abs(row.accuracy - 0.5) < 1.5 / math.sqrt(3999)
