"""What is not on the device: the bits of training with all on it, bytes, and files that go."""

import errno
import gc
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anychip
from anychip.comm import alone
from anychip.contract import Communicator, UnsupportedError
from anychip.train import checkpoint, optim, precision, zero
from anychip.train.files import NotWrittenError
from anychip.train.zero import tiers
from tests.unit.train import test_zero_masters as masters
from tests.unit.train.zero_oracle import (
    Trained,
    assert_equal,
    descend,
    on_models,
    ragged,
    ragged_loss,
    sharded,
    values_of,
)

CHUNK_NBYTES = 10_000
"""About two granules: parameters lie in several chunks."""

RULES = {
    "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2)),
    "adamw-8bit": lambda: optim.adamw(1e-2, states="8bit"),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9), "lion": lambda: optim.lion(1e-3),
    "averaged": lambda: optim.averaged(optim.adamw(1e-2), 0.75),
}  # fmt: skip


def everything(tier: Any, stage: int, *, has_masters: bool = False) -> dict[str, Any]:
    kinds = ["states", *["gradients"] * (stage >= 2), *["weights"] * (stage == 3)]
    return dict.fromkeys([*kinds, *["masters"] * has_masters], tier)


def trained(world_size: int, stage: int, rule: str, offload: Mapping[str, Any]) -> list[Trained]:
    how: Any = {"offload": offload, "chunk_nbytes": CHUNK_NBYTES} if offload else {}
    how |= {"world_size": world_size, "stage": stage, "steps": 3, "micro": 2}
    if rule != "masters":
        return sharded(ragged, ragged_loss, RULES[rule], **how)
    units = ["blocks.0", "blocks.1", "blocks.2"]
    return sharded(masters.build, masters.loss_of, masters.rule, units=units, **how)


@pytest.mark.grid
@pytest.mark.parametrize("rule", [*RULES, "masters"])
@pytest.mark.parametrize("tier", ["host", "file"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (1, 3), (2, 1), (2, 2), (2, 3), (3, 3)])
def test_offload_changes_no_bit(
    world_size: int, stage: int, tier: str, rule: str, tmp_path: Path
) -> None:
    where = str(tmp_path) if tier == "file" else tier
    offload = everything(where, stage, has_masters=rule == "masters")
    want = trained(world_size, stage, rule, {})
    for got, expected in zip(trained(world_size, stage, rule, offload), want, strict=True):
        assert_equal([got], expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kinds", ["states", "gradients", "weights", "masters", "masters weights"])
def test_each_kind_alone_changes_no_bit(kinds: str) -> None:
    rule = "masters" if "masters" in kinds else "adamw"
    got = trained(2, 3, rule, dict.fromkeys(kinds.split(), "host"))
    assert_equal(got, trained(2, 3, rule, {})[0])


@pytest.mark.parametrize("tier", ["host", "file"])
def test_passes_that_are_reduced_apart_add_up_in_their_order(tier: str, tmp_path: Path) -> None:
    def work(comm: Communicator, model: nn.Module, **how: Any) -> list[torch.Tensor]:
        opt = zero.Optimizer(model, RULES["adamw"](), comm, stage=3, units=["shared"], **how)
        for step in range(2):
            for micro in range(3):
                opt.backward(ragged_loss(model, step, comm.rank, micro))
            opt.step()
            opt.zero_grad(set_to_none=step == 1)
        with opt.whole():
            return [p.detach().clone() for p in model.parameters()]

    want = on_models(2, ragged, work)
    offload = everything(str(tmp_path) if tier == "file" else tier, 3)
    how = {"offload": offload, "chunk_nbytes": CHUNK_NBYTES}
    for got in on_models(2, ragged, partial(work, **how)):
        assert all(map(torch.equal, got, want[0]))


def test_gradient_that_is_not_finite_skips_the_step() -> None:
    policy = precision.policy("fp16", anychip.backend())

    def work(comm: Communicator, model: nn.Module) -> list[bool]:
        opt = zero.Optimizer(
            model, RULES["adamw"](), comm, stage=2, precision=policy, offload=everything("host", 2)
        )
        found = []
        for step in range(3):
            loss = ragged_loss(model, step, comm.rank, 0)
            opt.backward(loss * float("inf") if (step, comm.rank) == (1, 1) else loss)
            before = model.last.weight.detach().clone()
            found.append(opt.step().skipped)
            assert torch.equal(before, model.last.weight) is found[-1]
            opt.zero_grad()
        return found

    assert on_models(2, ragged, work) == [[False, True, False]] * 2


@pytest.mark.grid
@pytest.mark.parametrize("tier", [None, "host", "file"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_averages_are_in_the_place_of_the_weights_and_give_it_back_bit_for_bit(
    world_size: int, stage: int, dtype: torch.dtype, tier: str | None, tmp_path: Path
) -> None:
    where = str(tmp_path) if tier == "file" else tier
    offload = everything(where, stage, has_masters=dtype != torch.float32) if tier else {}
    how: Any = {"offload": offload, "chunk_nbytes": CHUNK_NBYTES} if tier else {}

    def work(comm: Communicator, model: nn.Module, *, is_asked: bool) -> Any:
        opt = zero.Optimizer(model, RULES["averaged"](), comm, stage=stage, **how)
        seen = []
        for step in range(3):
            descend(opt, masters.loss_of(model, step, comm.rank, 0))
            states = opt.state_dict()["state"].values()
            wanted = [entry["ema"].to(dtype, copy=True) for entry in states]
            for _ in range(is_asked):
                with opt.averaged(), opt.whole():
                    seen.append(all(map(torch.equal, model.parameters(), wanted)))
        with opt.whole():
            params = [param.detach().clone() for param in model.parameters()]
        return seen, params, [entry["ema"] for entry in opt.state_dict()["state"].values()]

    build = partial(masters.build, dtype)
    found = [on_models(world_size, build, partial(work, is_asked=asked)) for asked in (False, True)]
    for (_, *want), (seen, *got) in zip(*found, strict=True):
        assert seen == [True] * 3
        assert all(map(torch.equal, (*got[0], *got[1]), (*want[0], *want[1])))
        assert not any(map(torch.equal, *got))


def test_averages_that_nobody_keeps_cannot_be_asked() -> None:
    opt = zero.Optimizer(nn.Linear(2, 2), optim.adamw(1e-2), alone())
    with pytest.raises(ValueError, match="the rule keeps no average"), opt.averaged():
        pass


# Checkpoints and states


@pytest.mark.parametrize(("before", "after"), [("file", None), (None, "file"), ("host", "file")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoint_goes_on_in_other_tiers(
    before: str | None, after: str | None, dtype: torch.dtype, tmp_path: Path
) -> None:
    def train(comm: Communicator, model: nn.Module, tier: Any, first: int, last: int) -> Any:
        where = str(tmp_path / "spill") if tier == "file" else tier
        offload = everything(where, 3, has_masters=dtype != torch.float32) if tier else {}
        opt = zero.Optimizer(
            model, masters.rule(), comm, stage=3, offload=offload, chunk_nbytes=CHUNK_NBYTES
        )
        if first:
            assert checkpoint.resume(tmp_path, model=model, optimizer=opt, comm=comm).step == first
        for step in range(first, last):
            descend(opt, masters.loss_of(model, step, 0, 0))
        if not first:
            checkpoint.save(tmp_path, step=last, model=model, optimizer=opt, comm=comm)
        return Trained(values_of(model, opt), [], opt.state_dict())

    (tmp_path / "spill").mkdir()
    build = partial(masters.build, dtype)
    on_models(2, build, partial(train, tier=before, first=0, last=2))
    got = on_models(1, build, partial(train, tier=after, first=2, last=4))
    (want,) = on_models(1, build, partial(train, tier=None, first=0, last=4))
    assert_equal(got, want)


def test_checkpoint_reads_of_a_file_a_box_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a state of 1 MiB no more than boxes of 64 KiB, where boxes are that small."""
    monkeypatch.setattr("anychip.train.checkpoint.parts.BOX_NBYTES", 1 << 16)
    found: list[int] = []
    load = tiers.Elsewhere.load

    def counted(self: tiers.Elsewhere) -> torch.Tensor:
        found.append(self.nbytes)
        return load(self)

    monkeypatch.setattr(tiers.Elsewhere, "load", counted)
    model = nn.Linear(512, 512)
    (tmp_path / "spill").mkdir()
    offload = {"states": tiers.File(tmp_path / "spill")}
    opt = zero.Optimizer(model, optim.adamw(1e-2), alone(), offload=offload)
    checkpoint.save(tmp_path, step=0, model=model, optimizer=opt)
    assert max(found) == 1 << 16


def test_what_is_elsewhere_is_a_tensor_to_whoever_asks() -> None:
    model = nn.Linear(40, 30)
    opt = zero.Optimizer(model, optim.adamw(1e-2), alone(), offload={"states": "host"})
    (state, _) = (opt.state[param] for param in model.parameters())
    average = state["exp_avg"]
    average.copy_(torch.arange(1200.0).view(30, 40))
    average[3:5].mul_(2.0)
    want = torch.arange(1200.0).view(30, 40)
    want[3:5] *= 2.0
    assert torch.equal(average.cpu(), want)
    assert torch.equal(average[7] + 1.0, want[7] + 1.0)
    assert float(average.sum()) == float(want.sum())
    with pytest.raises(RuntimeError, match="neighbouring elements only"):
        average.t()


# Bytes, and the disk


def test_bytes_of_each_tier_add_up_to_the_formula(tmp_path: Path) -> None:
    def work(comm: Communicator, model: nn.Module) -> list[zero.MemoryUse]:
        offload = {"states": tiers.File(tmp_path), "masters": "host", "gradients": "host"}
        opt = zero.Optimizer(model, masters.rule(), comm, stage=3, offload=offload)
        return [opt.memory(tier) for tier in (None, "device", "host", "file")]

    trained = sum(p.numel() for p in masters.build().parameters() if p.requires_grad)
    low = 2 * 3 * 2 * 3 * 1024  # of 3 units in 2 parts of 3 granules, gaps included
    whole, *parts = (zero.MemoryUse(*map(sum, zip(*each, strict=True)))
                     for each in zip(*on_models(2, masters.build, work), strict=True))  # fmt: skip
    steps = 2 * 4
    assert whole == (low, 4 * trained, 12 * trained + steps)
    assert parts == [
        (low, 0, steps), (0, 4 * trained, 4 * trained), (0, 0, 8 * trained)
    ]  # fmt: skip


LARGE = """
import resource, sys, torch
from hashlib import sha256
from torch import nn
from anychip.comm import alone
from anychip.train import optim, zero

directory, limit = sys.argv[1], int(sys.argv[2])
WIDTH, BLOCKS = 512, 64
with torch.device("meta"):
    model = nn.Sequential(nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
model.forward = lambda x: [x := torch.tanh(layer(x)) for layer in model[0]][-1]
model.bfloat16()
x = torch.ones(2, WIDTH, requires_grad=True, dtype=torch.bfloat16)
rule = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
small = nn.Sequential(nn.Linear(WIDTH, 8, dtype=torch.bfloat16))  # threads and libraries
opt = zero.Optimizer(small, rule, alone(), stage=3, offload={"masters": "host"})
opt.backward(small(x).square().sum())
opt.step()
if limit:
    used = [line for line in open("/proc/self/status") if line.startswith("VmData")][0].split()[1]
    resource.setrlimit(resource.RLIMIT_DATA, (int(used) * 1024 + limit,) * 2)
kinds = ("states", "masters", "gradients", "weights")
offload = dict.fromkeys(kinds, directory if directory != "none" else "host")
numbers = iter(range(BLOCKS))
def init(module):
    module.weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(next(numbers)))
how = {"offload": offload, "chunk_nbytes": 1 << 19, "init": init}
opt = zero.Optimizer(model, rule, alone(), stage=3, **how)
for step in range(2):
    opt.backward(model(x).square().sum())
    opt.step()
    opt.zero_grad()
digest = sha256()
for name, param in model.named_parameters():
    with opt.whole([name]):
        digest.update(param.detach().float().numpy().tobytes())
    for state in ("exp_avg", "exp_avg_sq", "master"):
        digest.update(opt.state[param][state].cpu().numpy().tobytes())
print(digest.hexdigest())
"""
LIMIT = 64 << 20
"""Bytes; states are 8 of each of 64 layers' 512 x 512 weights, twice as many, and masters beside.
Half of it is address space only: of weights that are not there, see ``guard``."""


def large(directory: object, limit: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LARGE, str(directory), str(limit)], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144"}, check=False,
    )  # fmt: skip


@pytest.mark.grid
def test_states_of_twice_the_memory_are_trained_from_a_file(tmp_path: Path) -> None:
    got, want = large(tmp_path, LIMIT), large("none", 0)
    assert got.returncode == 0, got.stderr
    assert got.stdout == want.stdout
    refused = large("none", LIMIT)
    assert refused.returncode != 0
    assert "memory" in refused.stderr.lower()


def test_page_cache_has_nothing_of_a_file(tmp_path: Path) -> None:
    """Where the file system has direct I/O; else it is said."""
    spill = tiers.Spill(tmp_path)
    room = spill.room(1 << 22)
    values = torch.arange(1 << 20, dtype=torch.int32).view(torch.uint8)
    room.write(0, values)
    found = torch.empty_like(values)
    room.read(0, found)
    assert torch.equal(found, values)
    room.write(100, values[5:2005])  # in the midst of a block of the disk
    room.read(0, found)
    assert torch.equal(found[100:2100], values[5:2005])
    assert torch.equal(found[:100], values[:100])
    assert torch.equal(found[2100:], values[2100:])
    assert spill.is_direct


def test_file_system_without_direct_io_is_named_and_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(path, flags, *more)

    real = os.open
    monkeypatch.setattr(os, "open", without)
    with pytest.warns(UserWarning, match="no direct I/O"):
        got = trained(1, 3, "adamw", everything(str(tmp_path), 3))
    assert_equal(got, trained(1, 3, "adamw", {})[0])


def test_disk_without_room_is_one_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(NotWrittenError, match=r"no room for .* in .*; free some, or name"):
            zero.Optimizer(
                nn.Linear(600, 600), optim.adamw(1e-2), alone(), offload={"states": str(tmp_path)}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def test_files_and_threads_go_with_the_optimizer(tmp_path: Path) -> None:
    def open_files() -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # another thread closes its own meanwhile
                found += str(tmp_path) in os.readlink(f"/proc/self/fd/{fd}")
        return found

    model = ragged()
    opt = zero.Optimizer(
        model, optim.adamw(1e-2), alone(), stage=3, offload=everything(str(tmp_path), 3)
    )
    opt.backward(ragged_loss(model, 0, 0, 0))
    opt.step()
    assert open_files() == 1
    assert not list(tmp_path.iterdir())  # a process that is killed leaves nothing either
    del opt, model
    end = time.monotonic() + 10.0
    while open_files() and time.monotonic() < end:  # a thread may still hold its last task
        gc.collect()
        time.sleep(0.01)
    assert open_files() == 0


# What is refused

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "kind": ({"offload": {"state": "host"}}, ValueError, "one of states, masters"),
    "tier": ({"offload": {"states": "hots"}}, ValueError, "neither 'device' nor 'host' nor"),
    "object": ({"offload": {"states": 3}}, ValueError, "a tier for states expected, got 3"),
    "gradients": ({"offload": {"gradients": "host"}, "stage": 1}, ValueError,
                  "whole on each rank before"),
    "weights": ({"offload": {"weights": "host"}, "stage": 2}, ValueError,
                "whole on each rank before"),
    "masters": ({"offload": {"masters": "host"}}, ValueError, "weights of 32 bits have no masters"),
    "low": ({"offload": {"weights": "host"}, "stage": 3, "param_dtype": torch.bfloat16},
            ValueError, "made of masters"),
    "chunk": ({"offload": {"states": "host"}, "chunk_nbytes": 0}, ValueError, "at least 1, got 0"),
    "lamb": ({"offload": {"states": "host"}, "rule": optim.lamb(1e-2)}, UnsupportedError,
             "norms of whole parameters"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_elsewhere_is_refused_with_a_reason(name: str) -> None:
    given, kind, sentence = WRONG[name]
    rule = given.get("rule", optim.adamw(1e-2))
    given = {key: value for key, value in given.items() if key != "rule"}
    with pytest.raises(kind, match=sentence):
        zero.Optimizer(ragged(), rule, alone(), **given)


def test_rank_that_has_nothing_of_a_group_counts_its_steps() -> None:
    """A group of one small parameter lies on rank 0 alone; bias correction is counted on both."""

    def work(comm: Communicator, model: nn.Module) -> list[float]:
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 1e-3}]
        opt = zero.Optimizer(
            groups, optim.adamw(1e-2), comm, stage=2, offload=everything("host", 2)
        )
        for _ in range(2):
            descend(opt, model(torch.ones(1, 40)).square().sum())
        return [float(opt.state[param]["step"]) for param in model.parameters()]

    assert on_models(2, lambda: nn.Linear(40, 60), work) == [[2.0, 2.0]] * 2
