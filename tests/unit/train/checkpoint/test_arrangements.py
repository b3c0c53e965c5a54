"""Saved at one arrangement of ranks, loaded at another: every bit of weights and states is there.

What a checkpoint holds is put together here from its files alone, by the library that the format is
from; what the ranks hold is asked of the optimizer in whole tensors.
"""

import errno
import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import checkpoint, config, files, loop, optim, run, zero
from anychip.train.checkpoint import CheckpointError, writing
from tests.unit.train.stored_tensors import stored
from tests.unit.train.zero_oracle import descend, on_models, ragged, ragged_loss, units_of

ARRANGEMENTS: dict[str, tuple[int, list[str], dict[str, Any]]] = {
    "1": (1, [], {}), "1-16bit": (1, [], {"param_dtype": torch.bfloat16}), "2-stage0": (2, [], {}),
    "3-stage1": (3, ["optimizer.stage=1"], {}), "2-stage2": (2, ["optimizer.stage=2"], {}),
    "2-stage2-16bit": (2, ["optimizer.stage=2"], {"param_dtype": torch.bfloat16}),
    "2-stage3": (2, ["optimizer.stage=3"], {}),
    "3-stage3-16bit": (3, ["optimizer.stage=3"], {"param_dtype": torch.bfloat16}),
    "4-stage3-groups": (4, ["optimizer.stage=3"], {"shard_group": 2}),
    "2x1": (2, ["parallel.pipeline=2"], {}),
    "2x1-virtual2": (2, ["parallel.pipeline=2", "parallel.schedule=interleaved"], {}),
    "2x2-stage2": (4, ["parallel.pipeline=2", "optimizer.stage=2"], {}),
}  # fmt: skip
"""Ranks, or stages x replicas; settings; and options of the optimizer that are no settings."""
SETTINGS = [
    *("model.heads=2", "model.context=16", "data.prefetch=0"),
    *("data.batch_size=2", "data.accumulation=2", "optimizer.max_norm=1.0"),
]
ALWAYS = {
    ("3-stage1", "2-stage3"), ("2x1-virtual2", "1-16bit"), ("3-stage3-16bit", "4-stage3-groups"),
    ("2x2-stage2", "2-stage0"),
}  # fmt: skip


def pairs() -> list[Any]:
    return [
        pytest.param(a, b, id=f"{a}-to-{b}", marks=() if (a, b) in ALWAYS else pytest.mark.grid)
        for a in ARRANGEMENTS for b in ARRANGEMENTS
    ]  # fmt: skip


def held(model: nn.Module, opt: zero.Optimizer, of: Any = None) -> dict[str, Tensor]:
    """What a rank's model and optimizer hold, in whole tensors under a checkpoint's names."""
    of = of or {}
    first: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
    state = opt.state_dict()["state"]
    params = [param for group in opt.param_groups for param in group["params"]]
    found = {
        f"optimizer.{of.get(first[param], first[param])}.{name}": tensor.clone()
        for param, entry in zip(params, state.values(), strict=True)
        for name, tensor in entry.items()
    }
    with opt.whole():
        for name, tensor in opt.stands_for(model).state_dict().items():
            found[f"model.{name}"] = tensor.detach().clone()
    return found


def held_by(ours: run.Run) -> dict[str, Tensor]:
    return held(ours.model, ours.optimizer, ours.names.of if ours.names else None)


def joined(ranks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """What all ranks hold, when those that hold the same agree."""
    whole: dict[str, Tensor] = {}
    for each in ranks:
        for name, tensor in each.items():
            assert equal(whole.setdefault(name, tensor), tensor), name
    return whole


def equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name, tensor in want.items() if not equal(got[name], tensor)] == []


def at(
    arrangement: str, *more: str, work: Callable[[run.Run], Any], layers: int = 2, width: int = 48
) -> list[Any]:
    """Calls ``work`` on each rank of an arrangement, with a fresh run."""
    world_size, settings, options = ARRANGEMENTS[arrangement]

    def on_rank(comm: Communicator) -> Any:
        size = [f"model.layers={layers}", f"model.width={width}"]
        chosen = config.load(None, [*SETTINGS, *size, *settings, *more])
        return work(loop.build(chosen, anychip.use("cpu"), comm))

    with pytest.MonkeyPatch.context() as patch:
        made = SimpleNamespace(Optimizer=partial(zero.Optimizer, **options))
        patch.setattr(run, "zero", made)
        return run_ranks(world_size, on_rank)


def trained(out: Path, arrangement: str) -> dict[str, Tensor]:
    """Trains, which saves at the end; what the ranks hold then.

    They begin with what one has saved: threads share the generator that weights come from.
    """

    def work(ours: run.Run) -> dict[str, Tensor]:
        run.restore(ours, out)
        loop.train(ours, out, lambda row: None)
        return held_by(ours)

    at("1", "run.steps=2", work=lambda ours: run.save(ours, out))
    return joined(at(arrangement, "run.steps=2", work=work))


@pytest.mark.parametrize(("before", "after"), pairs())
def test_what_was_saved_at_one_arrangement_is_loaded_at_another_bit_for_bit(
    tmp_path: Path, before: str, after: str
) -> None:
    want = trained(tmp_path, before)
    assert_same(stored(tmp_path / "checkpoint"), want)

    def work(ours: run.Run) -> dict[str, Tensor]:
        with ours.optimizer.whole(writes=True), torch.no_grad():
            for param in ours.model.parameters():
                param.zero_()
        run.restore(ours, tmp_path)
        assert (ours.step, ours.optimizer.num_steps) == (2, 2)
        return held_by(ours)

    found = joined(at(after, "run.steps=3", work=work))
    assert_same(in_32_bits(found), in_32_bits(want))
    if before.endswith("16bit") == after.endswith("16bit"):
        assert_same(found, want)


def in_32_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights in the place of their masters, when these have been rounded to them."""
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(".master")}
    for name, master in tensors.items():
        if name.endswith(".master"):
            weight = f"model.{name.removeprefix('optimizer.').removesuffix('.master')}"
            tied = [
                n
                for n, t in tensors.items()
                if n.startswith("model.") and equal(t, tensors[weight])
            ]
            assert torch.equal(tensors[weight], master.to(tensors[weight].dtype))
            found |= dict.fromkeys(tied, master)
    return found


def ragged_optimizer(
    model: nn.Module, comm: Communicator, *, states: str = "float32", **options: Any
) -> zero.Optimizer:
    rule = optim.adamw(3e-2, weight_decay=0.1, states=states)
    return zero.Optimizer(
        model, optim.chain(optim.clip_by_global_norm(0.5), rule), comm, bucket_nbytes=12_000,
        **options,
    )  # fmt: skip


def kept(
    out: Path, world_size: int, *, steps: int, dtype: torch.dtype = torch.float32, **options: Any
) -> list[dict[str, Tensor]]:
    """Goes on from a checkpoint, if there is one, trains some steps, and saves."""

    def work(comm: Communicator, model: nn.Module) -> dict[str, Tensor]:
        given = {"units": units_of(model)} | options
        opt = ragged_optimizer(model, comm, **given)
        begun = checkpoint.resume(out, model=model, optimizer=opt, comm=comm).step
        for step in range(begun, begun + steps):
            descend(opt, ragged_loss(model, step, 0, 0))  # on all ranks alike
        checkpoint.save(out, step=begun + steps, model=model, optimizer=opt, comm=comm)
        return held(model, opt)

    return on_models(world_size, lambda: ragged().to(dtype), work)


@pytest.mark.parametrize(("before", "after"), [
    ((3, {"stage": 2}), (2, {"stage": 3})),
    ((2, {"stage": 3}), (1, {})),
    ((4, {"stage": 3, "shard_group": 2}), (3, {"stage": 1})),
    ((1, {}), (4, {"stage": 2, "shard_group": 2})),
], ids=["3-to-2", "2-to-1", "groups-to-3", "1-to-groups"])  # fmt: skip
@pytest.mark.parametrize("states", ["float32", "8bit"])
def test_sizes_that_no_cut_likes_and_states_in_blocks_are_kept(
    tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any], states: str
) -> None:
    """Parameters without elements, of 0 dims, frozen, never used: with their step counts."""
    want = joined(kept(tmp_path, before[0], steps=2, states=states, **before[1]))
    assert_same(stored(tmp_path / "checkpoint"), want)
    assert want["optimizer.first.weight.step"] == 2
    assert want["optimizer.unused.step"] == 0
    assert want["model.nothing"].shape == (0, 3)
    assert_same(joined(kept(tmp_path, after[0], steps=0, states=states, **after[1])), want)
    assert_same(stored(tmp_path / "checkpoint"), want)


def test_training_goes_on_elsewhere_with_the_bits_of_one_rank(tmp_path: Path) -> None:
    """All ranks see the same data, so that means over a power of two of them are exact."""
    want = joined(kept(tmp_path / "alone", 1, steps=4))
    kept(tmp_path / "ranks", 2, steps=2, stage=3)
    assert_same(joined(kept(tmp_path / "ranks", 4, steps=2, stage=1)), want)


@pytest.mark.parametrize(("before", "after"), [
    ((2, {"stage": 3}), (3, {"stage": 1})), ((3, {"stage": 0}), (2, {"stage": 3})),
], ids=["stage3-to-1", "stage0-to-3"])  # fmt: skip
def test_masters_of_weights_in_16_bits_are_kept_and_weights_are_theirs(
    tmp_path: Path, before: tuple[int, Any], after: tuple[int, Any]
) -> None:
    dtype = torch.bfloat16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.unit.train.checkpoint.test_arrangements.ragged_loss", loss_in_16_bits)
        want = joined(kept(tmp_path, before[0], steps=3, dtype=dtype, **before[1]))
    weight, master = want["model.shared.weight"], want["optimizer.shared.weight.master"]
    assert torch.equal(weight, master.to(dtype))
    assert not torch.equal(weight.float(), master)
    assert_same(joined(kept(tmp_path, after[0], steps=0, dtype=dtype, **after[1])), want)


def loss_in_16_bits(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(6, 24, generator=generator).bfloat16()).float().square().mean()


@pytest.mark.parametrize("arrangement", ["2-stage0", "3-stage1", "2-stage3"])
def test_ranks_write_equally_many_bytes_and_nothing_twice(tmp_path: Path, arrangement: str) -> None:
    want = trained(tmp_path, arrangement)
    folder = tmp_path / "checkpoint"
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    sizes = {name: entry["nbytes"] for name, entry in entries.items()}
    assert len(sizes) == ARRANGEMENTS[arrangement][0]
    distinct = {name: t for name, t in want.items() if name != "model.lm_head.weight"}  # tied
    total = sum(tensor.nbytes for tensor in distinct.values())
    headers = sum(8 + int.from_bytes((folder / n).read_bytes()[:8], "little") for n in sizes)
    assert sum(sizes.values()) == total + headers
    # Parts are equal but for gaps: a granule of 1024 elements per cut, of three tensors each.
    assert max(sizes.values()) - min(sizes.values()) < total * 0.05 + 3 * 4096 + headers


@pytest.mark.parametrize("arrangement", ["3-stage1", "2-stage3", "2x2-stage2"])
def test_no_tensor_is_sent_to_be_saved_or_loaded(tmp_path: Path, arrangement: str) -> None:
    """A model of eight times the size has the same messages, but for the digits of numbers."""

    def sent(width: int) -> tuple[int, int]:
        def work(ours: run.Run) -> tuple[int, int]:
            comms = [ours.comm, ours.optimizer.comm]
            before = sum(sum(comm.traffic.nbytes.values()) for comm in comms)
            run.save(ours, tmp_path / f"{width}")
            run.restore(ours, tmp_path / f"{width}")
            after = sum(sum(comm.traffic.nbytes.values()) for comm in comms)
            return after - before, sum(param.numel() for param in ours.model.parameters())

        found = at(arrangement, "run.steps=1", work=work, width=width)
        return max(nbytes for nbytes, _ in found), max(numel for _, numel in found)

    (few, small), (many, large) = sent(24), sent(96)
    assert large > 8 * small
    assert many < few + 4 * small / 10


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_cannot_write_fails_the_save_of_all_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    def work(comm: Communicator, model: nn.Module) -> str:
        opt = ragged_optimizer(model, comm, stage=2)
        checkpoint.save(tmp_path, step=1, model=model, optimizer=opt, comm=comm)
        comm.barrier()
        broken.add(f"rank {rank}")
        comm.barrier()
        with pytest.raises(files.NotWrittenError) as caught:
            checkpoint.save(tmp_path, step=2, model=model, optimizer=opt, comm=comm)
        assert caught.value.errno == errno.ENOSPC
        return str(caught.value)

    def write(*given: Any) -> Any:
        if threading.current_thread().name.partition(":")[0] in broken:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    real, broken = writing.write_tensors, set[str]()
    monkeypatch.setattr(writing, "write_tensors", write)
    told = on_models(2, ragged, work)
    assert all("of step 2 was not written; the one before is intact" in text for text in told)
    monkeypatch.undo()
    model = ragged()
    opt = ragged_optimizer(model, alone())
    assert checkpoint.resume(tmp_path, model=model, optimizer=opt).step == 1
    assert len(stored(tmp_path / "checkpoint")) > 30
    there = list((tmp_path / "checkpoint").iterdir())
    assert {p.suffix for p in there} == {".json", ".pt", ".safetensors"}
    assert len(there) == 2 + 2


def test_damage_that_one_rank_finds_keeps_all_from_loading(tmp_path: Path) -> None:
    kept(tmp_path, 2, steps=1, stage=2)
    folder = tmp_path / "checkpoint"
    boxes = json.loads((folder / "manifest.json").read_text())["tensors"]
    # The last of the states' boxes is read by the rank with the last part only.
    box = max(boxes["optimizer.first.weight.exp_avg"]["boxes"], key=lambda box: box["offsets"])
    content = bytearray((folder / box["file"]).read_bytes())
    content[box["offset"] + box["nbytes"] - 1] ^= 1
    (folder / box["file"]).write_bytes(content)

    def work(comm: Communicator, model: nn.Module) -> tuple[str, dict[str, Tensor]]:
        opt = ragged_optimizer(model, comm, stage=2)
        before = held(model, opt)
        with pytest.raises(CheckpointError) as caught:
            checkpoint.resume(tmp_path, model=model, optimizer=opt, comm=comm)
        assert_same(held(model, opt), before)
        return str(caught.value)

    told = on_models(2, ragged, work)
    assert all(f"the content of {box['file']} is not what was written" in text for text in told)
    assert sorted(text.startswith("rank ") for text in told) == [False, True]


def test_ranks_that_see_different_checkpoints_load_none(tmp_path: Path) -> None:
    for rank in range(2):
        kept(tmp_path / f"{rank}", 1, steps=1 + rank)

    def work(comm: Communicator, model: nn.Module) -> None:
        opt = ragged_optimizer(model, comm)
        with pytest.raises(CheckpointError, match="the ranks see different ones"):
            checkpoint.resume(tmp_path / f"{comm.rank}", model=model, optimizer=opt, comm=comm)
        assert opt.num_steps == 0

    on_models(2, ragged, work)


def test_stages_refuse_a_tensor_that_none_of_them_has(tmp_path: Path) -> None:
    at("2x1", "run.steps=1", work=lambda ours: run.save(ours, tmp_path))
    path = tmp_path / "checkpoint" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["tensors"]["model.more"] = {"dtype": "float32", "shape": [0], "boxes": []}
    path.write_text(json.dumps(manifest))

    def load(ours: run.Run) -> None:
        with pytest.raises(CheckpointError, match="more is absent in this model and there in the"):
            run.restore(ours, tmp_path)

    at("2x1", "run.steps=1", work=load)


def test_stages_refuse_a_checkpoint_with_a_layer_more(tmp_path: Path) -> None:
    def load(ours: run.Run) -> None:
        with pytest.raises(CheckpointError, match=r"groups of \[10, 18\] parameters expected, got"):
            run.restore(ours, tmp_path)

    at("1", "run.steps=1", work=lambda ours: run.save(ours, tmp_path), layers=3)
    at("2x1", "run.steps=1", work=load)


def test_rank_holds_and_reads_no_more_than_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At stage 3 what a rank of three reads is about a third; boxes are read whole."""
    want = joined(kept(tmp_path, 3, steps=1, stage=3))
    total = sum(tensor.nbytes for tensor in want.values())
    taken: Counter[int] = Counter()
    real = checkpoint.reading.Reader.read

    def read(self: Any, part: Any) -> Tensor:
        found = real(self, part)
        taken[id(self)] += found.nbytes
        assert found.numel() <= math.ceil(math.prod(part.shape) / 3) + 2048
        return found

    monkeypatch.setattr(checkpoint.reading.Reader, "read", read)
    kept(tmp_path, 3, steps=0, stage=3)
    assert len(taken) == 3
    assert all(nbytes < total / 2 for nbytes in taken.values())
    assert sum(taken.values()) >= total
