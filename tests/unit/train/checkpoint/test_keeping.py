"""The last few checkpoints: each whole, and nothing beside them."""

import json
from pathlib import Path

import pytest

from anychip.train import checkpoint
from tests.unit.train.test_checkpoint import Parts


def save(parts: Parts, directory: Path, step: int, keep: int) -> Path:
    return checkpoint.save(
        directory, step=step, model=parts.model, optimizer=parts.optimizer, data=parts.data,
        keep=keep,
    )  # fmt: skip


def steps(folder: Path) -> list[int]:
    """Of the checkpoints that manifests name, when the folder has nothing else."""
    found, named = [], set()
    for path in sorted(folder.glob("manifest*.json")):
        manifest = json.loads(path.read_text())
        found.append(int(manifest["step"]))
        named |= {path.name, manifest["progress"]["name"], *manifest["files"]}
    assert {path.name for path in folder.iterdir()} == named
    return sorted(found)


def test_last_checkpoints_are_kept_and_each_is_whole(tmp_path: Path) -> None:
    parts, bits = Parts(), {}
    for step in range(1, 6):
        parts.train(1)
        folder, bits[step] = save(parts, tmp_path, step, keep=3), parts.bits()
        assert steps(folder) == [*range(max(1, step - 2), step + 1)]
    other = Parts(seed=1)
    assert other.resume(tmp_path).step == 5
    (folder / "manifest-3.json").replace(folder / "manifest.json")
    assert other.resume(tmp_path).step == 3
    assert other.bits() == bits[3]
    # What the run had done after it is another run now.
    other.train(1)
    assert steps(save(other, tmp_path, 4, keep=3)) == [3, 4]
    assert steps(save(other, tmp_path, 5, keep=1)) == [5]


def test_save_that_fails_leaves_all_that_were_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts()
    for step in (1, 2):
        parts.train(1)
        folder = save(parts, tmp_path, step, keep=2)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    parts.train(1)
    monkeypatch.setattr(checkpoint.writing, "write_values", full)
    with pytest.raises(OSError, match="the one before is intact"):
        save(parts, tmp_path, 3, keep=2)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_same_step_saved_again_is_kept_once_and_a_damaged_one_not(tmp_path: Path) -> None:
    parts = Parts()
    for step in (1, 2, 2):
        parts.train(1)
        folder = save(parts, tmp_path, step, keep=3)
    assert steps(folder) == [1, 2]
    (folder / "manifest-1.json").write_text("{")
    parts.train(1)
    assert steps(save(parts, tmp_path, 3, keep=3)) == [2, 3]
