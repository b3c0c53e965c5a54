"""Checkpoints: complete or not there, equal in bits, and nobody else's."""

import contextlib
import errno
import hashlib
import io
import json
import math
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from anychip.comm import alone
from anychip.train import checkpoint, data, lock, optim, zero
from anychip.train.checkpoint import CheckpointError, State
from tests.unit.train.stored_tensors import flip
from tests.unit.train.zero_oracle import descend

FILES = ("tensors", "progress")


class Parts:
    """A small model in training, with dropout, tied weights and data."""

    def __init__(self, width: int = 8, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Linear(width, 4))
        rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
        self.optimizer = zero.Optimizer(self.model, rule, alone())
        self.data = data.Loader(data.encode(bytes(range(250))), context=4, batch_size=2, seed=0)

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            x, y = self.data.next_batch()
            loss = ((self.model(x / 250.0) - y / 250.0) ** 2).mean()
            descend(self.optimizer, loss)
            losses.append(loss.item())
        return losses

    def save(self, directory: Path, step: int = 3, **extra: Any) -> Path:
        return checkpoint.save(
            directory, step=step, model=self.model, optimizer=self.optimizer, data=self.data,
            extra=extra,
        )  # fmt: skip

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
    assert second.resume(tmp_path) == State(3, {"note": "text", "numbers": [1, 2]})
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


def test_checkpoint_holds_one_manifest_and_the_two_files_it_names(tmp_path: Path) -> None:
    parts = Parts()
    for step in range(3):
        parts.train(1)
        folder = parts.save(tmp_path, step=step)
    manifest = json.loads((folder / "manifest.json").read_text())
    named = {*manifest["files"], manifest["progress"]["name"]}
    assert len(named) == 2
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


@pytest.mark.parametrize(("damage", "answer"), [
    (_truncate, "were written"), (flip, "is not what was written"), (Path.unlink, "is missing"),
], ids=["truncated", "bit_flipped", "missing"])  # fmt: skip
@pytest.mark.parametrize("part", FILES)
def test_damaged_file_is_named_and_nothing_is_loaded_or_changed(
    tmp_path: Path, part: str, damage: Callable[[Path], None], answer: str
) -> None:
    folder = Parts().save(tmp_path)
    (path,) = folder.glob(f"{part}-*")
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


@pytest.mark.parametrize(("manifest", "answer"), [
    ("", "manifest.json is damaged"), ("[" * 200_000, "manifest.json is damaged"),
    ("\xff", "manifest.json is damaged"), ("{}", "manifest.json is damaged"),
    ("[1]", "manifest.json is damaged"),
    ('{"format": "other"}', "format 'anychip-checkpoint' expected, got 'other'"),
    ('{"format": "anychip-checkpoint", "version": 9, "anychip": "9.0"}',
     "version 9 of the format, written by anychip 9.0"),
    ('{"format": "anychip-checkpoint", "version": true, "anychip": "9.0"}', "has version True"),
    ('{"format": "anychip-checkpoint", "version": 2, "files": {"model": {}}}',
     "manifest.json is damaged"),
    ('{"format": "anychip-checkpoint", "version": 3, "files": {"model": {}}}',
     "manifest.json is damaged"),
])  # fmt: skip
def test_manifest_that_is_not_ours_is_refused(tmp_path: Path, manifest: str, answer: str) -> None:
    folder = Parts().save(tmp_path)
    (folder / "manifest.json").write_bytes(manifest.encode("latin-1"))
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


@pytest.mark.parametrize(("what", "message"), [
    ("data", r"does not fit the data: .* another text"),
    ("optimizer", "does not fit the optimizer"),
])  # fmt: skip
def test_checkpoint_of_another_part_is_refused_and_the_model_is_as_it_was(
    tmp_path: Path, what: str, message: str
) -> None:
    Parts().save(tmp_path)
    other = Parts(seed=1)
    if what == "data":
        other.data = data.Loader(data.encode(bytes(range(100))), context=4, batch_size=2)
    else:
        groups = [{"params": [p]} for p in other.model.parameters()]
        other.optimizer = zero.Optimizer(groups, optim.adamw(1e-2), alone())
    before = other.bits()
    with pytest.raises(CheckpointError, match=message):
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


@pytest.mark.parametrize("at", ["tensors", "written", "progress", "manifest"])
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

    def open_full(self: Path, mode: str = "r") -> Any:
        if self.name.startswith(at) and self.name.endswith(".partial"):
            real(self, mode).close()
            return real(Path("/dev/full"), "wb")
        return real(self, mode)

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
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > limit:
                    raise Killed
                return real(*args, **kwargs)

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


def crafted(folder: Path, content: bytes) -> None:
    """Puts values into a checkpoint, with their hash, as somebody would who means harm."""
    digest = hashlib.sha256(content).hexdigest()
    entry = {"name": f"progress-{digest[:16]}.pt", "nbytes": len(content), "sha256": digest}
    (folder / entry["name"]).write_bytes(content)
    change_manifest(folder, "progress", entry)


def change_manifest(folder: Path, place: str, value: Any) -> None:
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    put(manifest, place.split("/"), value)
    path.write_text(json.dumps(manifest))


def put(inner: Any, place: list[str], value: Any) -> None:
    """Changes what is somewhere inside a value."""
    *way, last = [int(key) if key.isdecimal() else key for key in place]
    for key in way:
        inner = inner[key]
    inner[last] = value


def changed(saved: Path, place: str, value: Any) -> bytes:
    """What torch has saved, with another value somewhere in it."""
    state, content = {"": torch.load(saved, weights_only=True)}, io.BytesIO()
    put(state, ["", *place.split("/")] if place else [""], value)
    with contextlib.suppress(RecursionError):  # what is too deep for pickle stays cut off
        torch.save(state[""], content)
    return content.getvalue()


def everything(parts: Parts) -> list[Any]:
    saved = io.BytesIO()
    torch.save(parts.optimizer.state_dict(), saved)
    place = parts.data.position, parts.data.epoch
    return [
        parts.bits(), saved.getvalue(), place, random.getstate(), torch.get_rng_state().tolist(),
    ]  # fmt: skip


def deep() -> Any:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    return value


NAN = math.nan
IN_PROGRESS = [
    *[(key, value) for key in ("step", "data/position") for value in (-7, 1 << 70)],
    *[("step", value) for value in ("3", 3.0, True, None, NAN, [], 4)],
    *[("data/position", value) for value in (NAN, "7", torch.ones(3), None)],
    *[("data", value) for value in ([], 7, {}, {"position": 3})],
    *[("data/text", value) for value in (7, torch.ones(2), {})],
    *[("random", value) for value in (None, {}, [7], [{}], [[]])],
    *[("random/0/host", value) for value in (None, torch.ones(9), torch.empty(0))],
    ("random/0/host", torch.zeros(5056, dtype=torch.uint8)),
    *[("random/0/python", value) for value in ((), (3, (1, 2), None), (4,), "state")],
    *[("extra", value) for value in (None, [], {3: 4})],
    *[("others", value) for value in (None, [], {3: 4}, {"more": torch.ones(2)})],
    *[("optimizer", value) for value in (None, [], {}, {"named": 3}, {"whole": 3}, {"whole": {}})],
    *[("optimizer/named/num_steps", value) for value in (-1, NAN, "1", None, 1.0)],
    *[("optimizer/named/param_groups", value) for value in (None, {}, [], [7], [{}])],
    *[("optimizer/named/param_groups/0/params", v) for v in (None, [["0"]], ["a"] * 4, [0])],
    *[("optimizer/named/param_groups/0/weight_decay", value) for value in (NAN, {}, [[[]]])],
    *[("", value) for value in ([], None, 7, {}, "text")],
]
WEIGHT, AVERAGE = "tensors/model.0.weight", "tensors/optimizer.0.weight.exp_avg"
IN_MANIFEST = [
    *[(key, value) for key in ("step", "progress", "files") for value in (None, "3", [], -1, {})],
    *[("step", value) for value in (4, True, NAN, 1 << 70)],
    *[("progress/name", value) for value in (None, "", "tensors", "/etc/passwd")],
    *[("progress/nbytes", value) for value in (0, -1, 1 << 70, 3.0)],
    *[("tensors", value) for value in (None, [], {}, {"model.0.weight": {}})],
    *[(WEIGHT, value) for value in (None, [], {}, 7)],
    *[(f"{WEIGHT}/dtype", value) for value in ("float64", "int32", "float33", None, 7, [])],
    *[(f"{WEIGHT}/shape", value) for value in ([4, 8], [32], [], None, [8.0, 4], [-8, -4], ["8"])],
    *[(f"{WEIGHT}/shape", [1 << 61, 1 << 61]), (f"{WEIGHT}/shape/0", 1 << 61)],
    *[(f"{WEIGHT}/boxes", value) for value in (None, [], {}, [{}], [7])],
    *[(f"{WEIGHT}/boxes/0/{key}", value) for key in ("offsets", "sizes")
      for value in (None, [], [0], [1, 0], [8, 4, 1], [1 << 61, 0], [-1, 0], ["0", "0"])],
    *[(f"{WEIGHT}/boxes/0/{key}", value) for key in ("offset", "nbytes")
      for value in (None, -1, 1 << 61, 1 << 70, 3, "0", True)],
    *[(f"{WEIGHT}/boxes/0/file", v) for v in (None, "model", f"tensors-{'0' * 16}.safetensors")],
    *[(f"{WEIGHT}/boxes/0/sha256", value) for value in (None, "", "0" * 64)],
    *[(AVERAGE, None), (f"{AVERAGE}/dtype", "int32"), (f"{AVERAGE}/shape", [4, 8])],
    *[("tensors/optimizer.0.weight.more", {"dtype": "float32", "shape": [0], "boxes": []})],
    *[("tensors/model.more", {"dtype": "float32", "shape": [0], "boxes": []})],
]  # fmt: skip


def assert_refused(parts: Parts, directory: Path, before: list[Any], what: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        parts.resume(directory)
    assert str(directory) in str(caught.value), what
    assert everything(parts) == before, what


def test_crafted_values_are_refused_in_a_sentence_and_nothing_is_changed(tmp_path: Path) -> None:
    folder, other = Parts().save(tmp_path), Parts(seed=1)
    before, manifest = everything(other), (folder / "manifest.json").read_text()
    saved = folder / json.loads(manifest)["progress"]["name"]
    for place, value in [*IN_PROGRESS, ("extra", deep())]:
        crafted(folder, changed(saved, place, value))
        assert_refused(other, tmp_path, before, (place, value))
        (folder / "manifest.json").write_text(manifest)
    for place, value in IN_MANIFEST:
        change_manifest(folder, place, value)
        assert_refused(other, tmp_path, before, (place, value))
        (folder / "manifest.json").write_text(manifest)
    other.resume(tmp_path)


@pytest.mark.parametrize("step", [-3.0, NAN, math.inf, 1e30])
def test_number_of_steps_that_cannot_be_is_refused_though_its_hash_fits(
    tmp_path: Path, step: float
) -> None:
    folder, other = Parts().save(tmp_path), Parts(seed=1)
    place = "tensors/optimizer.0.weight.step/boxes/0"
    box = json.loads((folder / "manifest.json").read_text())
    for key in ("tensors", "optimizer.0.weight.step", "boxes", 0):
        box = box[key]
    content = bytearray((folder / box["file"]).read_bytes())
    new = torch.tensor(step).numpy().tobytes()
    content[box["offset"] : box["offset"] + 4] = new
    (folder / box["file"]).write_bytes(content)
    change_manifest(folder, f"{place}/sha256", hashlib.sha256(new).hexdigest())
    before = everything(other)
    with pytest.raises(CheckpointError, match="a number of steps expected"):
        other.resume(tmp_path)
    assert everything(other) == before


def test_boxes_that_overlap_and_leave_a_hole_are_refused(tmp_path: Path) -> None:
    """Their elements are as many as the tensor's, and each lies in the file."""
    folder, other = Parts().save(tmp_path), Parts(seed=1)
    boxes = json.loads((folder / "manifest.json").read_text())["tensors"]["model.0.weight"]["boxes"]
    half = {**boxes[0], "sizes": [4, 4], "nbytes": 64}
    change_manifest(folder, f"{WEIGHT}/boxes", [half, {**half, "offsets": [3, 0]}])
    with pytest.raises(CheckpointError, match=r"boxes that tile a tensor of shape \(8, 4\)"):
        other.resume(tmp_path)


@pytest.mark.parametrize("part", [*FILES, "manifest"])
def test_flipped_bits_are_refused_in_a_sentence_or_harmless(tmp_path: Path, part: str) -> None:
    folder = Parts().save(tmp_path)
    (path,) = folder.glob(f"{part}*")
    flip_bits(tmp_path, path, partial(crafted, folder) if part == "progress" else path.write_bytes)


def flip_bits(directory: Path, path: Path, write: Callable[[bytes], Any]) -> None:
    """Of values the hash fits: what is left to find them is the form of what was written."""
    chance, refused, manifest = random.Random(0), 0, directory / "checkpoint" / "manifest.json"
    content, good = path.read_bytes(), manifest.read_bytes()
    for count in range(40):
        damaged = bytearray(content)
        # Half of them where the form stands: behind it come thousands of bytes that mean nothing.
        end = min(len(damaged), 512) if count % 2 else len(damaged)
        damaged[chance.randrange(end)] ^= 1 << chance.randrange(8)
        manifest.write_bytes(good)
        write(damaged)
        other = Parts(seed=1)
        before = everything(other)
        try:
            other.resume(directory)
        except CheckpointError:
            refused += 1
            assert everything(other) == before
    assert refused


@pytest.mark.parametrize(
    "name", ["../../outside.pt", "/", "tensors-0123456789abcdef.safetensors/../x", ""]
)
def test_file_outside_the_folder_is_not_read(tmp_path: Path, name: str) -> None:
    folder = Parts().save(tmp_path / "run")
    text = (folder / "manifest.json").read_text()
    (saved,) = folder.glob("tensors-*")
    outside = tmp_path / "outside.pt"
    saved.rename(outside)
    given = str(outside) if name == "/" else name
    (folder / "manifest.json").write_text(text.replace(json.dumps(saved.name), json.dumps(given)))
    with pytest.raises(
        CheckpointError, match=r"a name like progress-0123456789abcdef\.pt expected"
    ):
        Parts(seed=1).resume(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
@pytest.mark.parametrize("part", ["tensors", "progress", "manifest"])
def test_what_is_no_file_is_not_read(tmp_path: Path, kind: str, part: str) -> None:
    folder = Parts().save(tmp_path / "run")
    (path,) = folder.glob(f"{part}*")
    path.rename(tmp_path / "outside")
    if kind == "link":
        path.symlink_to(tmp_path / "outside")
    else:
        os.mkfifo(path) if kind == "pipe" else path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read"):
        Parts(seed=1).resume(tmp_path / "run")


@pytest.mark.parametrize("name", ["tensors.partial", "manifest.partial", "manifest.json", ".lock"])
def test_link_in_the_folder_is_not_written_through(tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / name).symlink_to(victim)
    with contextlib.suppress(OSError, CheckpointError):
        Parts().save(tmp_path)
    assert victim.read_text() == "mine"


def test_folder_that_is_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "checkpoint").symlink_to(tmp_path / "other")
    with pytest.raises(CheckpointError, match="is a link, which is not followed"):
        Parts().save(tmp_path)
    assert list((tmp_path / "other").iterdir()) == []


def test_two_savers_leave_a_whole_checkpoint_at_every_moment(tmp_path: Path) -> None:
    """Each look loads all that the manifest names, while two threads replace it."""
    savers = [Parts(seed=seed) for seed in range(2)]
    savers[0].save(tmp_path, step=1)

    def save_often(parts: Parts) -> None:
        for step in range(1, 40):
            parts.train(1)
            parts.save(tmp_path, step=step)

    looker, steps = Parts(seed=2), []
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(save_often, parts) for parts in savers]
        while not all(future.done() for future in futures):
            steps.append(looker.resume(tmp_path).step)
        for future in futures:
            future.result()
    assert looker.resume(tmp_path).step == 39
    assert steps
    kinds = [path.suffix for path in (tmp_path / "checkpoint").iterdir()]
    assert sorted(kinds) == [".json", ".pt", ".safetensors"]


def test_saver_that_waits_in_vain_names_the_process_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Parts().save(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(checkpoint.publishing, "WAIT_S", 0.0)
    with lock.hold(folder), pytest.raises(lock.DirectoryInUseError, match=f"process {os.getpid()}"):
        Parts(seed=1).save(tmp_path)
    assert contents(tmp_path) == before
