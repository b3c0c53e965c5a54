"""``anychip train`` with several ranks against one that adds up in the same tree, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anychip.train import parallel
from tests.integration.train.forked import Ended, Server
from tests.integration.train.processes import rows
from tests.unit.train.stored_tensors import stored

STEPS = 6
# Without dropout, which is another one on every rank.
SETTINGS = (
    *("run.sample_tokens=5", "model.context=16", "model.layers=2", "model.heads=2"),
    *("model.width=32", "data.batch_size=2", "--backend", "cpu", "--steps", str(STEPS)),
)
LLAMA = ("model.kind=llama",)  # its head is not tied to the embedding
ZERO = ("optimizer.stage=2",)
STAGES = ("parallel.pipeline=2", "data.accumulation=2")
OUTPUTS = {
    *("checkpoint", "config.toml", "loss.png", "metrics.jsonl", "provenance.json", "sample.txt")
}


class Trained:
    """What a run has left: rows, tensors by name, and the sample."""

    def __init__(self, out: Path) -> None:
        self.rows = rows(out)
        self.norms = [row["grad_norm"] for row in self.rows]
        self.losses = [row["loss"] for row in self.rows]
        self.sample = (out / "sample.txt").read_text()
        self.tensors = stored(out / "checkpoint")

    def assert_same(self, other: Trained, *, losses: bool = True) -> None:
        """Bit for bit; ``losses``: they are summed in the same tree, too."""
        assert self.norms == other.norms
        if losses:
            assert self.rows == other.rows
        # One rank adds its micro-batches' losses in float32, where ranks are added in double.
        assert self.losses == pytest.approx(other.losses, rel=torch.finfo(torch.float32).eps)
        assert self.tensors.keys() == other.tensors.keys()
        for name, tensor in self.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name
        assert self.sample == other.sample


def run(ranks: Server, cwd: Path, *args: str, world_size: int = 1, out: str = "out") -> list[Ended]:
    """Runs to the end, which must be a good one and quiet."""
    ended = ranks.run("train", *args, "--out", out, world_size=world_size, cwd=cwd)
    assert [(rank.code, rank.err) for rank in ended] == [(0, "")] * world_size
    assert not any(rank.out for rank in ended[1:])
    return ended


def trained(ranks: Server, cwd: Path, *args: str, world_size: int = 1, out: str = "out") -> Trained:
    run(ranks, cwd, *SETTINGS, *args, world_size=world_size, out=out)
    return Trained(cwd / out)


@pytest.mark.parametrize(("settings", "stages"), [
    pytest.param((), (0, 2, 3), id="adamw"),
    *(
        pytest.param((setting,), stages, id=name, marks=pytest.mark.grid)
        for name, setting, stages in [
            ("no_clipping", "optimizer.max_norm=0", (0, 2)), ("lamb", "optimizer.kind=lamb", (2,)),
            ("lion", "optimizer.kind=lion", (1,)), ("sgd", "optimizer.kind=sgd", (2,)),
        ]
    ),
])  # fmt: skip
def test_two_replicas_equal_one_rank_with_twice_the_micro_batches(
    ranks: Server, tmp_path: Path, settings: tuple[str, ...], stages: tuple[int, ...]
) -> None:
    wanted = trained(ranks, tmp_path, *settings, "data.accumulation=2", out="one")
    assert wanted.losses[-1] < wanted.losses[0]
    before = None
    for stage in stages:
        args = (*settings, f"optimizer.stage={stage}")
        found = trained(ranks, tmp_path, *args, world_size=2, out=f"stage{stage}")
        found.assert_same(wanted, losses=False)
        if before is not None:
            found.assert_same(before)
        before = found


@pytest.mark.grid
@pytest.mark.parametrize("schedule", parallel.NAMES)
def test_two_ranks_with_stages_equal_one_rank(ranks: Server, tmp_path: Path, schedule: str) -> None:
    args = (*LLAMA, "data.accumulation=4")
    wanted = trained(ranks, tmp_path, *args, out="one")
    stages = ("parallel.pipeline=2", f"parallel.schedule={schedule}")
    trained(ranks, tmp_path, *args, *stages, world_size=2, out="two").assert_same(wanted)


@pytest.mark.grid
def test_replicas_of_stages_equal_replicas(ranks: Server, tmp_path: Path) -> None:
    args = (*LLAMA, *ZERO, "data.accumulation=2")
    wanted = trained(ranks, tmp_path, *args, world_size=2, out="two")
    found = trained(ranks, tmp_path, *args, "parallel.pipeline=2", world_size=4, out="four")
    found.assert_same(wanted)


@pytest.mark.grid
def test_stages_with_tied_weights_equal_one_rank_within_roundings(
    ranks: Server, tmp_path: Path
) -> None:
    """The first and the last stage add their gradients of the embedding in another tree."""
    args = ("data.accumulation=4",)
    wanted = trained(ranks, tmp_path, *args, out="one")
    for number, schedule in enumerate(("1f1b", "interleaved", "zbv")):
        stages = ("parallel.pipeline=2", f"parallel.schedule={schedule}")
        found = trained(ranks, tmp_path, *args, *stages, world_size=2, out=f"two{number}")
        assert found.losses == pytest.approx(wanted.losses, rel=1e-6)
        assert found.norms == pytest.approx(wanted.norms, rel=1e-6)


@pytest.mark.grid
@pytest.mark.parametrize(("before", "after"), [
    ((2, ZERO), (1, ("data.accumulation=2",))),
    ((1, ("data.accumulation=2",)), (2, (*ZERO, "data.accumulation=1"))),
    ((2, STAGES), (2, ("parallel.pipeline=1", "data.accumulation=1", *ZERO))),
    ((2, ()), (2, STAGES)),
    ((2, STAGES), (2, (*STAGES, "parallel.schedule=zbv"))),
    ((2, (*STAGES, "parallel.schedule=interleaved")), (1, ("parallel.pipeline=1",))),
], ids=[
    "replicas_to_one", "one_to_replicas", "stages_to_replicas", "replicas_to_stages",
    "stages_to_a_v", "a_loop_to_one"
])  # fmt: skip
def test_run_goes_on_with_other_ranks_as_if_nothing_had_happened(
    ranks: Server, tmp_path: Path, before: tuple[int, tuple[str, ...]],
    after: tuple[int, tuple[str, ...]],
) -> None:  # fmt: skip
    """Replicas times micro-batches are two, so that a step has the same windows."""
    # A learning rate that does not depend on the steps in all.
    flat = (*LLAMA, "schedule.warmup=0", "schedule.final=1")
    wanted = trained(ranks, tmp_path, *flat, "data.accumulation=2", out="one")
    settings = SETTINGS[: SETTINGS.index("--steps")]
    run(ranks, tmp_path, *settings, *flat, *before[1], "--steps", "4", world_size=before[0])
    more = ("--resume", *after[1], "--steps", str(STEPS))
    (first, *_) = run(ranks, tmp_path, *more, world_size=after[0])
    assert "going on after step 4" in first.out
    Trained(tmp_path / "out").assert_same(wanted, losses=False)


@pytest.mark.grid
@pytest.mark.parametrize(("args", "answer"), [
    (("parallel.pipeline=3",), "do not multiply to the 2 ranks of this job"),
    (("parallel.data=3",), "parallel.data = 3 and parallel.pipeline = 1 do not multiply"),
    (("--data", "absent.txt"), "absent.txt: No such file or directory"),
    (("--nproc", "2"), "--nproc starts the ranks itself; leave it out under torchrun"),
], ids=" ".join)  # fmt: skip
def test_wrong_use_is_a_message_of_every_rank_and_nothing_is_written(
    ranks: Server, tmp_path: Path, args: tuple[str, ...], answer: str
) -> None:
    for rank in ranks.run("train", *SETTINGS, *args, "--out", "out", world_size=2, cwd=tmp_path):
        assert rank.code == 2
        assert rank.err.startswith("anychip: ")
        assert answer in rank.err
    assert not (tmp_path / "out").exists()


@pytest.mark.grid
def test_json_is_said_by_the_first_rank_alone(ranks: Server, tmp_path: Path) -> None:
    args = (*SETTINGS, *ZERO, "--json", "--out", "out")
    first, second = ranks.run("train", *args, world_size=2, cwd=tmp_path)
    assert (first.code, second.code, second.out, second.err) == (0, 0, "", "")
    answer = json.loads(first.out)
    found = rows(tmp_path / "out")
    assert (answer["schema"], answer["backend"], answer["steps"]) == (1, "cpu", STEPS)
    assert (answer["first_loss"], answer["last_loss"]) == (found[0]["loss"], found[-1]["loss"])
    assert "2 ranks: 2 replicas, ZeRO stage 2" in first.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.jsonl"
    texts = [f"document {number}: to be, or not to be, that is all" for number in range(40)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.grid
@pytest.mark.parametrize(("world_size", "settings", "parts"), [
    (2, ZERO, 2),
    (2, ("parallel.pipeline=2", "data.accumulation=4"), 4),
    (4, (*ZERO, "parallel.pipeline=2"), 2),
], ids=["replicas", "stages", "replicas_of_stages"])  # fmt: skip
def test_targets_left_out_count_alike_on_all_ranks(
    ranks: Server, tmp_path: Path, documents: Path, world_size: int, settings: tuple[str, ...],
    parts: int,
) -> None:  # fmt: skip
    """Batches of few and of many targets, bit for bit as on one rank that has them all."""
    args = (*LLAMA, "--data", str(documents))
    args += ("data.cross_document_targets=false",)
    wanted = trained(ranks, tmp_path, *args, f"data.accumulation={parts}", out="one")
    found = trained(ranks, tmp_path, *args, *settings, world_size=world_size, out="ranks")
    found.assert_same(wanted, losses=False)


@pytest.mark.grid
def test_trained_tokenizer_is_kept_and_found_again(
    ranks: Server, tmp_path: Path, documents: Path
) -> None:
    words = ("--data", str(documents), "data.tokenizer=bpe", "model.vocab_size=300", *ZERO)
    found = trained(ranks, tmp_path, *words, world_size=2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == OUTPUTS | {"tokenizer.json"}
    assert found.losses[-1] < found.losses[0]
    tokenizer = (tmp_path / "out/tokenizer.json").read_bytes()
    run(ranks, tmp_path, "--resume", "--steps", str(STEPS + 2), world_size=2)
    assert [row["step"] for row in rows(tmp_path / "out")] == list(range(1, STEPS + 3))
    assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer
    other = (*SETTINGS, "data.tokenizer=out/tokenizer.json", "model.vocab_size=300", *ZERO)
    run(ranks, tmp_path, *other, "--data", str(documents), world_size=2, out="other")
    assert rows(tmp_path / "other") == rows(tmp_path / "out")[:STEPS]
