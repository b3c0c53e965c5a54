"""Checkpoints of torch.distributed.checkpoint: theirs loads here, ours loads there, bit for bit."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from anychip.contract import Communicator
from anychip.train import checkpoint, optim, zero
from anychip.train.checkpoint import CheckpointError
from anychip.train.checkpoint.dcp import Reader, load
from tests.integration.train import fsdp2_ranks
from tests.integration.train.processes import variables
from tests.unit.train.checkpoint.test_arrangements import assert_same, held, joined
from tests.unit.train.stored_tensors import stored
from tests.unit.train.zero_oracle import descend, on_models

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def optimizer_of(model: Any, comm: Communicator, **options: Any) -> zero.Optimizer:
    return zero.Optimizer(model, optim.adamw(1e-2), comm, bucket_nbytes=12_000, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With ``ours``, of three ranks at stage 3, and what FSDP2 has made."""

    def work(comm: Communicator, model: Any) -> None:
        opt = optimizer_of(model, comm, stage=3)
        for step in range(3):
            descend(opt, fsdp2_ranks.loss(model, step))
        checkpoint.save(directory / "ours", step=3, model=model, optimizer=opt, comm=comm)

    directory = tmp_path_factory.mktemp("dcp")
    on_models(3, fsdp2_ranks.make, work)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    words = [sys.executable, fsdp2_ranks.__file__, str(directory), str(port)]
    done = subprocess.run(words, env=variables(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return directory


def whole(folder: Path, kind: str, mesh: str) -> dict[str, Tensor]:
    """What FSDP2 had, under the names of a checkpoint of ours."""
    found = torch.load(folder / f"{kind}-{mesh}.pt", weights_only=True)
    named = {f"model.{name}": value for name, value in found["model"].items()}
    for name, states in found["state"].items():
        named |= {f"optimizer.{name}.{state}": value for state, value in states.items()}
    return named


@pytest.mark.parametrize("mesh", fsdp2_ranks.MESHES)
def test_ours_is_loaded_into_fsdp2_by_torch_bit_for_bit(folder: Path, mesh: str) -> None:
    want = stored(folder / "ours" / "checkpoint")
    assert want["optimizer.0.weight.step"] == 3
    assert_same(whole(folder, "loaded", mesh), want)


@pytest.mark.parametrize("mesh", fsdp2_ranks.MESHES)
@pytest.mark.parametrize("kind", ["theirs", "titan"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (3, 1), (2, 3)])
def test_theirs_is_loaded_here_bit_for_bit(
    folder: Path, mesh: str, kind: str, world_size: int, stage: int
) -> None:
    def work(comm: Communicator, model: Any) -> dict[str, Tensor]:
        torch.nn.init.zeros_(model[0].weight)
        opt = optimizer_of(model, comm, stage=stage)
        assert load(folder / f"{kind}-{mesh}", model=model, optimizer=opt, comm=comm) == 2
        assert opt.num_steps == 2
        return held(model, opt)

    got = joined(on_models(world_size, fsdp2_ranks.make, work))
    assert_same(got, whole(folder, "saved", mesh))


def test_weights_alone_are_loaded_and_masters_are_what_was_saved(folder: Path) -> None:
    """Weights of 16 bits are those of the masters, which have all of what was saved."""

    def work(comm: Communicator, model: Any) -> dict[str, Tensor]:
        opt = optimizer_of(model, comm, stage=2)
        load(folder / "theirs-4", model=model, optimizer=opt, comm=comm, weights_only=True)
        return held(model, opt)

    got = joined(on_models(2, lambda: fsdp2_ranks.make().bfloat16(), work))
    want = whole(folder, "saved", "4")
    for name in ("0.weight", "1.bias", "3.weight"):
        assert torch.equal(got[f"optimizer.{name}.master"], want[f"model.{name}"])
        assert torch.equal(got[f"model.{name}"], want[f"model.{name}"].bfloat16())
        assert not got[f"optimizer.{name}.exp_avg"].any()


def test_plain_tensors_are_loaded_by_torch_without_ranks(folder: Path) -> None:
    state = {"model": fsdp2_ranks.make().state_dict()}
    want = stored(folder / "ours" / "checkpoint")
    dcp.load(state, storage_reader=Reader(folder / "ours"), no_dist=True)
    got = {f"model.{name}": value for name, value in state["model"].items()}
    assert_same(got, {name: want[name] for name in got})


def test_damage_of_ours_is_found_while_torch_loads(folder: Path, tmp_path: Path) -> None:
    source = folder / "ours" / "checkpoint"
    (tmp_path / "checkpoint").mkdir()
    for file in source.iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= file.suffix == ".safetensors"
        (tmp_path / "checkpoint" / file.name).write_bytes(content)
    state: dict[str, Any] = {"optimizer": {"state": {}}}
    for name, value in stored(source).items():
        param, _, kind = name.removeprefix("optimizer.").rpartition(".")
        if name.startswith("optimizer."):
            state["optimizer"]["state"].setdefault(param, {})[kind] = torch.zeros_like(value)
    with pytest.raises(CheckpointException, match="is not what was written"):
        dcp.load(state, storage_reader=Reader(tmp_path), no_dist=True)


def one_more(model: Any) -> None:
    model.register_parameter("more", torch.nn.Parameter(torch.ones(2)))


def one_less(model: Any) -> None:
    model.pop(4)


def another(model: Any) -> None:
    model[2] = torch.nn.Linear(67, 30, bias=False)


@pytest.mark.parametrize(("change", "answer"), [
    (one_more, "it has no model.more"),
    (one_less, "the model has no model.4.weight"),
    (another, r"model.2.weight: float32\[30, 67\] expected, got float32\[31, 67\]"),
], ids=["more", "less", "other_shape"])  # fmt: skip
def test_what_does_not_fit_is_refused_on_all_ranks_and_nothing_is_changed(
    folder: Path, change: Any, answer: str
) -> None:
    def work(comm: Communicator, model: Any) -> None:
        change(model)
        opt = optimizer_of(model, comm, stage=comm.world_size)
        before = held(model, opt)
        with pytest.raises(CheckpointError, match=answer):
            load(folder / "theirs-4", model=model, optimizer=opt, comm=comm)
        assert_same(held(model, opt), before)

    on_models(2, fsdp2_ranks.make, work)


def test_other_reasons_are_refused_in_a_sentence(folder: Path, tmp_path: Path) -> None:
    def refused(answer: str, directory: Path = tmp_path, **options: Any) -> None:
        model = fsdp2_ranks.make()
        given = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())} | options
        with pytest.raises(CheckpointError, match=answer):
            load(directory, **given)

    refused("into zero.Optimizer, and this is AdamW")
    refused("has no .metadata", weights_only=True)
    (tmp_path / ".metadata").write_bytes(b"mine")
    refused(".metadata cannot be read", weights_only=True)
    refused("it has no model.mean", folder / "theirs-4", prefix="other.", weights_only=True)
    with pytest.raises(
        CheckpointException, match=r"manifest\.json cannot be read|metadata is None"
    ):
        dcp.load({"a": torch.ones(1)}, storage_reader=Reader(tmp_path), no_dist=True)
    both = {"model": fsdp2_ranks.make().state_dict(), "ema": fsdp2_ranks.make().state_dict()}
    dcp.save(both, checkpoint_id=tmp_path / "both", no_dist=True)
    refused("names behind 'ema.' and 'model.'; say which", tmp_path / "both", weights_only=True)
    model = fsdp2_ranks.make()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.init.zeros_(model[0].weight)
    load(tmp_path / "both", model=model, optimizer=optimizer, prefix="ema.", weights_only=True)
    assert torch.equal(model[0].weight, both["ema"]["0.weight"])
