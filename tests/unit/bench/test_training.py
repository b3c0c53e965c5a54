"""Training in turns: every candidate trains the same thing, and ratios are those of the rounds."""

from __future__ import annotations

from dataclasses import asdict
from types import TracebackType
from typing import Any, ClassVar

import pytest
import torch

import anychip
from anychip.bench.rank import Place
from anychip.bench.ranks import RankError, Ranks
from benchmarks import peers, training
from benchmarks.trainees import ALONE, CANDIDATES, LEARNING_RATE, Sizes, batch, decoder

TINY = Sizes(vocab=32, context=8, layers=2, heads=2, width=16, batch=8, microbatches=4)
STEPS = 4


def losses_of_one_process() -> list[float]:
    """Plain torch on the whole batch: what all candidates but the first must find."""
    place = Place(0, 2, anychip.use("cpu"))
    model = decoder(TINY, torch.device("cpu"))
    tokens, targets = batch(TINY, place, whole=True)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, foreach=False)
    losses = []
    for _ in range(STEPS + 1):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.grid
def test_every_candidate_trains_what_one_process_trains() -> None:
    wanted = losses_of_one_process()
    here = [name for name in peers.CANDIDATES if peers.missing(name) is None]
    with Ranks(2, "cpu", "benchmarks.turns") as ranks:
        for name in (*CANDIDATES, *here):
            started = ranks.call("start", candidate=name, sizes=asdict(TINY))
            first = training._mean([answer["loss"] for answer in started])
            assert first == pytest.approx(wanted[0], abs=2e-5), name
            turns = ranks.call("turn", steps=STEPS)
            last = training._mean([answer["loss"] for answer in turns])
            if name != ALONE:
                assert last == pytest.approx(wanted[-1], abs=1e-4), name
            assert all(answer["seconds"] > 0 for answer in turns), name
            assert all(answer["peak"] > 50e6 for answer in turns), name
        with pytest.raises(RankError, match="KeyError: 'something else'"):
            ranks.call("start", candidate="something else", sizes=asdict(TINY))


@pytest.mark.grid
def test_rank_that_is_killed_is_named() -> None:
    with Ranks(1, "cpu", "benchmarks.turns") as ranks:
        ranks._members[0].process.kill()
        with pytest.raises(RankError, match="rank 0: the process died with SIGKILL"):
            ranks.call("turn", steps=1)


class Scripted:
    """Instead of processes: answers with what is written here, by candidate and round."""

    seconds: ClassVar[dict[str, list[list[float]]]] = {
        ALONE: [[1.0, 1.0], [2.0, 1.0], [4.0, 4.0]],
        "data parallel": [[1.0, 2.0], [2.0, 2.0], [1.0, 5.0]],
        "torch DDP": [[4.0, 1.0], [4.0, 1.0], [16.0, 1.0]],
    }

    def __init__(self, world_size: int, backend: str, module: str) -> None:
        assert (world_size, backend, module) == (2, "cpu", "benchmarks.turns")
        self.name, self.round = "", 0

    def __enter__(self) -> Scripted:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def call(self, function: str, **arguments: Any) -> list[Any]:
        if function == "start":
            self.name = arguments["candidate"]
            if self.name not in self.seconds:
                raise RankError("it does not work here")
            return [{"loss": None, "layers": "0-1"}, {"loss": 3.0, "layers": "2-3"}]
        self.round += 1
        return [
            {"seconds": s, "cpu_seconds": 2 * s, "slept": 0.0, "loss": loss, "peak": peak}
            for s, loss, peak in zip(self.seconds[self.name][self.round - 1], (None, 2.5),
                                     (7_000_000 * self.round, 5_000_000), strict=True)
        ]  # fmt: skip


def test_bench_train_takes_ratios_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Ranks", Scripted)
    names = ("data parallel", "torch DDP", "torch FSDP2")
    sizes = Sizes(batch=8, context=16)
    seen: list[int] = []
    report = training.run(
        anychip.use("cpu"), rounds=3, progress=seen.append, names=names, sizes=sizes
    )
    rows = {row.name: row for row in report.rows}
    assert list(rows) == [ALONE, "data parallel", "torch DDP"]
    assert seen[-3:] == [1, 2, 3]
    ours = rows["data parallel"]
    assert ours.microseconds == 2e6  # slowest ranks: 2, 2 and 5
    assert ours.best_microseconds == 2e6
    assert ours.facts["x alone"] == 0.8  # of 1/2, 2/2 and 4/5
    assert rows["torch DDP"].facts["x alone"] == 0.25  # of 1/4, 2/4 and 4/16
    assert ours.facts["tokens/s"] == 64.0
    assert ours.facts["CPU ms"] == 8000.0  # of both: 6, 8 and 12 s
    assert ours.facts["peak MB"] == 21.0
    assert (ours.facts["first loss"], ours.facts["last loss"]) == (3.0, 2.5)
    assert ours.facts["layers"] == "0-1, 2-3"
    assert "torch FSDP2 is left out: it does not work here" in report.notes


def test_bench_train_with_a_candidate_of_ours_that_fails_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "Ranks", Scripted)
    with pytest.raises(RankError, match="it does not work here"):
        training.run(anychip.use("cpu"), rounds=3, progress=lambda _: None, names=("ZeRO-2",))


def test_bench_train_without_deepspeed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "Ranks", Scripted)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    report = training.run(
        anychip.use("cpu"), rounds=3, progress=lambda _: None, names=("DeepSpeed ZeRO-3",)
    )
    assert "pip install anychip[bench]" in report.notes[-1]


@pytest.mark.parametrize(("arguments", "message"), [
    ({"rounds": 2}, "rounds must be at least 3, got 2"),
    ({"rounds": 3, "names": ("ZeRO-9",)}, "no candidate ZeRO-9; there are no communication"),
], ids=["rounds", "candidate"])  # fmt: skip
def test_bench_train_with_a_wrong_argument_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        training.run(anychip.use("cpu"), progress=lambda _: None, **arguments)
