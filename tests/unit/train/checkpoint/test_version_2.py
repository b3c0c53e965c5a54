"""Checkpoints of version 2, in whole tensors: still read, at any arrangement, and as carefully."""

import hashlib
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import checkpoint, run
from anychip.train.checkpoint import randomness
from tests.unit.train.checkpoint import test_arrangements as arrangements
from tests.unit.train.test_checkpoint import (
    IN_PROGRESS,
    Parts,
    assert_refused,
    changed,
    deep,
    everything,
    flip_bits,
)
from tests.unit.train.zero_oracle import ragged, units_of


def write(directory: Path, step: int, **states: Any) -> Path:
    """As version 2 was written: three files of torch, and a manifest with their hashes."""
    folder, entries = directory / "checkpoint", {}
    folder.mkdir(parents=True)
    random_state = [randomness.state(torch.device("cpu"))]
    beside = {"step": step, "data": None, "random": random_state, "extra": {"note": "text"}}
    states["progress"] = {**beside, **states.get("progress", {})}
    for part in ("model", "optimizer", "progress"):
        content = io.BytesIO()
        torch.save(states[part], content)
        entries[part] = put_file(folder, part, content.getvalue())
    about = {"format": "anychip-checkpoint", "version": 2, "step": step, "anychip": "0.1.0"}
    (folder / "manifest.json").write_text(json.dumps({**about, "files": entries}))
    return folder


def put_file(folder: Path, part: str, content: bytes) -> dict[str, Any]:
    digest = hashlib.sha256(content).hexdigest()
    name = f"{part}-{digest[:16]}.pt"
    (folder / name).write_bytes(content)
    return {"name": name, "nbytes": len(content), "sha256": digest}


def crafted(folder: Path, part: str, content: bytes) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][part] = put_file(folder, part, content)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def written(parts: Parts, directory: Path) -> Path:
    return write(
        directory, 3, model=parts.model.state_dict(), optimizer=parts.optimizer.state_dict(),
        progress={"data": parts.data.state_dict()},
    )  # fmt: skip


def test_run_goes_on_from_version_2_and_saves_version_3(tmp_path: Path) -> None:
    straight = Parts()
    straight.train(3)
    folder = written(straight, tmp_path)
    torch.manual_seed(99)
    losses = straight.train(4)
    second = Parts(seed=1)
    state = second.resume(tmp_path)
    assert (state.step, state.extra) == (3, {"note": "text"})
    torch.manual_seed(99)
    assert second.train(4) == losses
    assert second.bits() == straight.bits()
    second.save(tmp_path, step=7)
    assert sorted(p.suffix for p in folder.iterdir()) == [".json", ".pt", ".safetensors"]
    assert Parts(seed=2).resume(tmp_path).step == 7


@pytest.mark.parametrize("after", ["2-stage0", "2-stage3", "2x1", "2x2-stage2"])
def test_version_2_is_loaded_at_any_arrangement(tmp_path: Path, after: str) -> None:
    def save(ours: run.Run) -> Any:
        x, y = ours.loader.next_batch()
        ours.optimizer.backward(ours.model(x, y))
        ours.optimizer.step()
        states = {"model": ours.model.state_dict(), "optimizer": ours.optimizer.state_dict()}
        write(tmp_path, 1, **states, progress={"data": ours.loader.state_dict()})
        return arrangements.held_by(ours)

    def load(ours: run.Run) -> Any:
        run.restore(ours, tmp_path)
        return arrangements.held_by(ours)

    want = arrangements.joined(arrangements.at("1", "run.steps=1", work=save))
    arrangements.assert_same(
        arrangements.joined(arrangements.at(after, "run.steps=1", work=load)), want
    )


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (2, 3)])
def test_masters_of_version_2_are_those_that_were_saved(
    tmp_path: Path, world_size: int, stage: int
) -> None:
    """They are not the weights, which have lost their last digits."""

    def work(comm: Communicator) -> Any:
        model = models[comm.rank]
        opt = arrangements.ragged_optimizer(model, comm, stage=stage, units=units_of(model))
        if comm.world_size == 1 and not (tmp_path / "checkpoint").exists():
            opt.backward(arrangements.loss_in_16_bits(model, 0, 0, 0))
            opt.step()
            write(tmp_path, 1, model=model.state_dict(), optimizer=opt.state_dict())
        else:
            checkpoint.resume(tmp_path, model=model, optimizer=opt, comm=comm)
        return arrangements.held(model, opt)

    models = [ragged().bfloat16()]
    (want,) = run_ranks(1, work)
    models = [ragged().bfloat16() for _ in range(world_size)]
    arrangements.assert_same(arrangements.joined(run_ranks(world_size, work)), want)


NAN, WRONG_STEP = math.nan, torch.tensor(-3.0)
SPARSE = torch.eye(8, 4).to_sparse()
CRAFTED = [
    *[("progress", place, value) for place, value in [*IN_PROGRESS, ("extra", deep())]
      if place and not place.startswith(("optimizer", "others"))],
    *[(part, "", value) for part in checkpoint.PARTS for value in ([], None, 7, {}, "text")],
    *[("model", "0.weight", value) for value in (7, None, SPARSE, torch.ones(8, 4).double())],
    *[("optimizer", "num_steps", value) for value in (-1, NAN, "1", None, 1.0)],
    *[("optimizer", "param_groups", value) for value in (None, {}, [], [7], [{}])],
    *[("optimizer", "param_groups/0/params", value) for value in (None, [[0]], [0, 1, 2], ["0"])],
    *[("optimizer", "param_groups/0/weight_decay", value) for value in (NAN, {}, [[[]]])],
    *[("optimizer", "state", value) for value in (None, [], {"0": {}}, {0: []}, {})],
    *[("optimizer", "state/0", value) for value in ([], {}, {"step": WRONG_STEP})],
    *[("optimizer", "state/0/step", value) for value in (WRONG_STEP, NAN, torch.tensor(NAN), 3)],
    *[("optimizer", "state/0/exp_avg", value) for value in (None, SPARSE, torch.ones(8, 4) > 0)],
    *[("optimizer", "state/0/exp_avg", torch.empty(8, 4, device="meta"))],
]  # fmt: skip


def test_crafted_values_are_refused_in_a_sentence_and_nothing_is_changed(tmp_path: Path) -> None:
    folder, other = written(Parts(), tmp_path), Parts(seed=1)
    before, manifest = everything(other), (folder / "manifest.json").read_text()
    for part, place, value in CRAFTED:
        saved = folder / json.loads(manifest)["files"][part]["name"]
        crafted(folder, part, changed(saved, place, value))
        assert_refused(other, tmp_path, before, (part, place, value))
        (folder / "manifest.json").write_text(manifest)


@pytest.mark.parametrize("part", [*checkpoint.PARTS, "manifest"])
def test_flipped_bits_are_refused_in_a_sentence_or_harmless(tmp_path: Path, part: str) -> None:
    folder = written(Parts(), tmp_path)
    (path,) = folder.glob(f"{part}*")
    is_manifest = part == "manifest"
    flip_bits(tmp_path, path, path.write_bytes if is_manifest else partial(crafted, folder, part))
