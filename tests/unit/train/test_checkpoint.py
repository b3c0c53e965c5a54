"""Checkpoints: complete or not there, equal in bits, and nobody else's."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anychip.contract import SoloCommunicator
from anychip.train import checkpoint, data, optim, zero
from anychip.train.checkpoint import CheckpointError, State


class Parts:
    """A small model in training, with dropout, tied weights and data."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 4))
        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
        self.optimizer = zero.Optimizer(self.model, rule, SoloCommunicator())
        text = data.encode(bytes(range(250)))
        self.data = data.Loader(text, context=4, batch_size=2, seed=0)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x, y = self.data.next_batch()
            loss = ((self.model(x / 250.0) - y / 250.0) ** 2).mean()
            self.optimizer.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, step: int = 3, **extra: Any) -> Path:
        return checkpoint.save(
            directory,
            step=step,
            model=self.model,
            optimizer=self.optimizer,
            data=self.data,
            extra=extra,
        )

    def resume(self, directory: Path) -> State:
        return checkpoint.resume(
            directory, model=self.model, optimizer=self.optimizer, data=self.data
        )

    def bits(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.*")}


def test_run_resumed_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    straight = Parts()
    straight.train(3)
    straight.save(tmp_path, note="text", numbers=[1, 2])
    host, python = torch.rand(3), random.random()
    torch.manual_seed(99)
    losses = straight.train(4)

    second = Parts(seed=1)
    state = second.resume(tmp_path)
    assert state == State(3, {"note": "text", "numbers": [1, 2]})
    assert torch.equal(torch.rand(3), host)
    assert random.random() == python
    torch.manual_seed(99)
    assert second.train(4) == losses
    assert second.bits() == straight.bits()
    assert second.optimizer.num_steps == 7


def test_directory_without_a_checkpoint_begins_at_step_0(tmp_path: Path) -> None:
    parts = Parts()
    before = parts.bits()
    assert parts.resume(tmp_path / "absent") == State(0, {})
    assert parts.bits() == before
    assert not (tmp_path / "absent").exists()


def test_checkpoint_holds_one_manifest_and_the_three_files_it_names(tmp_path: Path) -> None:
    parts = Parts()
    for step in range(3):
        parts.train(1)
        folder = parts.save(tmp_path, step=step)
    manifest = json.loads((folder / "manifest.json").read_text())
    named = {entry["name"] for entry in manifest["files"].values()}
    assert manifest["step"] == 2
    assert {path.name for path in folder.iterdir()} == named | {"manifest.json"}


def test_same_state_saved_again_is_the_same_checkpoint(tmp_path: Path) -> None:
    parts = Parts()
    parts.save(tmp_path)
    before = contents(tmp_path)
    parts.save(tmp_path)
    assert contents(tmp_path) == before


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "answer"),
    [(_truncate, "were written"), (_flip, "is not what was written"), (Path.unlink, "is missing")],
    ids=["truncated", "bit_flipped", "missing"],
)
@pytest.mark.parametrize("part", checkpoint.PARTS)
def test_damaged_file_is_named_and_nothing_is_loaded_or_changed(
    tmp_path: Path, part: str, damage: Callable[[Path], None], answer: str
) -> None:
    parts = Parts()
    folder = parts.save(tmp_path)
    (path,) = folder.glob(f"{part}-*.pt")
    damage(path)
    files, other = contents(tmp_path), Parts(seed=1)
    before = other.bits()
    with pytest.raises(CheckpointError, match=answer) as caught:
        other.resume(tmp_path)
    assert path.name in str(caught.value)
    assert str(folder) in str(caught.value)
    assert other.bits() == before
    assert (other.data.position, other.optimizer.num_steps) == (0, 0)
    assert contents(tmp_path) == files


@pytest.mark.parametrize(
    ("manifest", "answer"),
    [
        ("", "manifest.json is damaged"),
        ("{}", "manifest.json is damaged"),
        ("[1]", "manifest.json is damaged"),
        ('{"format": "other"}', "format 'anychip-checkpoint' expected, got 'other'"),
        (
            '{"format": "anychip-checkpoint", "version": 9, "anychip": "9.0"}',
            "version 9 of the format, written by anychip 9.0",
        ),
        (
            '{"format": "anychip-checkpoint", "version": 2, "files": {"model": {}}}',
            "manifest.json is damaged",
        ),
    ],
)
def test_manifest_that_is_not_ours_is_refused(tmp_path: Path, manifest: str, answer: str) -> None:
    folder = Parts().save(tmp_path)
    (folder / "manifest.json").write_text(manifest)
    with pytest.raises(CheckpointError, match=answer):
        Parts().resume(tmp_path)


def test_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(tmp_path / "ran"),))

    class Optimizer:
        def state_dict(self) -> dict[str, Any]:
            return {"evil": Evil()}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    model = nn.Linear(1, 1)
    checkpoint.save(tmp_path, step=1, model=model, optimizer=Optimizer())
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.resume(tmp_path, model=model, optimizer=Optimizer())
    assert not (tmp_path / "ran").exists()


def test_checkpoint_of_another_model_is_refused_by_the_parameter(tmp_path: Path) -> None:
    Parts(width=8).save(tmp_path)
    other = Parts(width=6)
    before = other.bits()
    with pytest.raises(CheckpointError) as caught:
        other.resume(tmp_path)
    assert "0.weight is float32[6, 4] in this model and float32[8, 4]" in str(caught.value)
    assert "(and 2 more)" in str(caught.value)
    assert other.bits() == before


def test_checkpoint_of_other_data_is_refused_and_the_model_is_as_it_was(tmp_path: Path) -> None:
    Parts().save(tmp_path)
    other = Parts(seed=1)
    other.data = data.Loader(data.encode(bytes(range(100))), context=4, batch_size=2)
    before = other.bits()
    with pytest.raises(CheckpointError, match=r"does not fit the data: .* another text"):
        other.resume(tmp_path)
    assert other.bits() == before


def test_checkpoint_of_another_optimizer_is_refused_and_the_model_is_as_it_was(
    tmp_path: Path,
) -> None:
    Parts().save(tmp_path)
    other = Parts(seed=1)
    groups = [{"params": [p]} for p in other.model.parameters()]
    other.optimizer = zero.Optimizer(groups, optim.adamw(1e-2), SoloCommunicator())
    before = other.bits()
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        other.resume(tmp_path)
    assert other.bits() == before


def test_checkpoint_without_data_is_refused_by_a_run_with_data(tmp_path: Path) -> None:
    parts = Parts()
    checkpoint.save(tmp_path, step=1, model=parts.model, optimizer=parts.optimizer)
    with pytest.raises(CheckpointError, match="without a position in the data"):
        parts.resume(tmp_path)


def test_folder_with_files_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "weights.bin").write_bytes(b"mine")
    for action in (Parts().save, Parts().resume):
        with pytest.raises(CheckpointError, match="nothing was changed") as caught:
            action(tmp_path)
        assert "it holds 'weights.bin'" in str(caught.value)
    assert contents(tmp_path) == {"checkpoint/weights.bin": b"mine"}


@pytest.mark.parametrize("at", ["model", "optimizer", "progress", "manifest"])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_full_disk_leaves_the_checkpoint_before_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, first: bool
) -> None:
    parts = Parts()
    parts.train(2)
    if not first:
        parts.save(tmp_path, step=2)
    before = contents(tmp_path)
    parts.train(1)
    real = Path.open

    def open_full(self: Path, *args: Any, **kwargs: Any) -> Any:
        return real(Path("/dev/full") if self.name == f"{at}.partial" else self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(OSError, match="the checkpoint of step 3 was not written") as caught:
        parts.save(tmp_path, step=3)
    monkeypatch.undo()
    assert caught.value.errno == errno.ENOSPC
    assert ("there was none before" if first else "the one before is intact") in str(caught.value)
    assert contents(tmp_path) == before
    assert Parts().resume(tmp_path).step == (0 if first else 2)


def test_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may end before any rename or removal; the manifest decides in one of them."""
    parts = Parts()
    parts.save(tmp_path, step=1)

    class Killed(BaseException):
        pass

    steps = []
    for limit in range(20):
        calls = 0

        def guard(real: Callable[..., Any], limit: int = limit) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > limit:
                    raise Killed
                return real(*args)

            return call

        parts.train(1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", guard(Path.replace))
            patch.setattr(Path, "unlink", guard(Path.unlink))
            try:
                parts.save(tmp_path, step=limit + 2)
            except Killed:
                steps.append(Parts().resume(tmp_path).step)
            else:
                break
    # Three files and the manifest are renamed; from then on the new checkpoint is the one.
    assert steps[:4] == [1, 1, 1, 1]
    assert steps[4:] == list(range(6, 2 + len(steps)))
    assert len(steps) > 4
    assert Parts().resume(tmp_path).step == len(steps) + 2
