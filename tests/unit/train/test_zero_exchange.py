"""What goes between ranks in place of plain parts: groups that hold everything, and codes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError, Work
from anychip.train import checkpoint, optim, zero
from anychip.train.precision import policy
from anychip.train.zero.exchange import (
    NOTHING,
    Around,
    Carried,
    Coded,
    Exchange,
    Flat,
    GradientReduction,
    Secondary,
)
from tests.unit.train import zero_oracle as oracle
from tests.unit.train.zero_decoder import decoder, decoder_loss, on_two, optimizer, parts, rule

GRID = pytest.mark.grid


@pytest.mark.parametrize("stage", [1, 2], ids="stage{}".format)
def test_groups_of_ranks_that_hold_everything_equal_all_ranks_together(stage: int) -> None:
    given = {"world_size": 4, "steps": 3, "micro": 2}
    want = oracle.serial(decoder, decoder_loss, rule(), **given)  # type: ignore[arg-type]
    got = oracle.sharded(decoder, decoder_loss, rule, stage=stage, shard_group=2, units=[], **given)
    oracle.assert_equal(got, want)


@pytest.mark.parametrize(("format", "bits", "most"), [
    ("int8", 8 + 32 / 256, 1 / 254),
    pytest.param("e4m3", 8 + 32 / 256, 2**-4, marks=GRID),
    ("nf4", 4 + 32 / 256, (1.0 - 0.6961) / 2),
    pytest.param("mx_e4m3", 8 + 8 / 32, 1 - 448 / 512, marks=GRID),
])  # fmt: skip
def test_codes_in_place_of_weights_save_bytes_and_all_ranks_compute_with_the_same(
    format: str, bits: float, most: float
) -> None:
    """``most``: half of the widest step between codes, or what saturates, of the largest."""

    def work(comm: Communicator, model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor], float]:
        opt = optimizer(model, comm, gather_format=format)
        exchange, losses, seen = parts(opt).exchange, [], {}

        def note(module: nn.Module, args: Any) -> None:
            seen["used"] = module.weight.detach().clone()

        model.get_submodule("transformer.h.2.mlp.c_fc").register_forward_pre_hook(note)
        assert isinstance(exchange, Coded)
        assert isinstance(exchange.inner, Flat)
        traffic = exchange.inner.gather_comm.traffic.nbytes
        for step in range(4):
            before = traffic["all_gather"]
            with torch.no_grad():
                losses.append(decoder_loss(model, step, 0, 0))
            used = traffic["all_gather"] - before
            with opt.whole():
                seen["exact"] = model.get_parameter("transformer.h.2.mlp.c_fc.weight").clone()
            oracle.descend(opt, decoder_loss(model, step, 0, 0))
        numel = sum(w.layout.numel for u in parts(opt).units for w in u.weights)
        return losses, seen, 8 * used / numel

    (losses, seen, used), (others, other, _) = on_two(work)
    assert used == bits
    assert all(torch.equal(a, b) for a, b in zip(losses, others, strict=True))
    assert all(torch.equal(value, other[name]) for name, value in seen.items())
    assert not torch.equal(seen["used"], seen["exact"])
    assert (seen["used"] - seen["exact"]).abs().max() <= most * seen["exact"].abs().max()
    plain = on_two(lambda comm, model: losses_of(comm, model))[0]
    assert max(abs(float(a - b)) for a, b in zip(losses, plain, strict=True)) < 0.05


def losses_of(comm: Communicator, model: nn.Module) -> list[Tensor]:
    opt, losses = optimizer(model, comm), []
    for step in range(4):
        loss = decoder_loss(model, step, 0, 0)
        losses.append(loss.detach())
        oracle.descend(opt, loss)
    return losses


@pytest.mark.parametrize("options", [{}, {"gather_format": "int8"}], ids=["weights", "codes"])
def test_what_neighbours_keep_has_the_same_bits_and_crosses_no_group_before_backward(
    options: dict[str, Any],
) -> None:
    """Two groups of two: a step of two batches gathers once over all ranks, then within groups."""

    def work(comm: Communicator, model: nn.Module, size: int | None) -> tuple[Any, list[int]]:
        opt = optimizer(model, comm, secondary_group=size, **options)
        losses, crossed = [], []
        for step in range(3):
            for micro in range(2):
                losses.append(decoder_loss(model, step, comm.rank, micro))
                crossed.append(over_all(opt))
                opt.backward(losses[-1])
                crossed.append(over_all(opt))
            opt.step()
            opt.zero_grad()
            if step == 1:
                with opt.whole(), torch.no_grad():  # exact, and not from what was kept
                    losses += [param.detach().clone() for param in model.parameters()]
        return losses, crossed

    def over_all(opt: zero.Optimizer) -> int:
        exchange = parts(opt).exchange
        exchange = exchange.inner if isinstance(exchange, Secondary) else exchange
        exchange = exchange.inner if isinstance(exchange, Coded) else exchange
        assert isinstance(exchange, Flat)
        return exchange.gather_comm.traffic.calls["all_gather"]

    found = [oracle.on_models(4, decoder, partial(work, size=size)) for size in (None, 2)]
    for (want, _), (got, crossed) in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        forward, *later = crossed[:4]
        assert forward > 0
        assert later == [forward] * 3
        assert crossed[4] > forward


def test_state_that_is_loaded_leaves_nothing_of_what_an_exchange_kept(tmp_path: Path) -> None:
    """Goes on from an earlier step, while neighbours hold codes' weights of a later one."""

    def work(comm: Communicator, model: nn.Module) -> list[dict[str, Tensor]]:
        found = []
        opt = optimizer(model, comm, gather_format="int8", secondary_group=2)
        given: Any = {"model": model, "optimizer": opt, "comm": comm}
        for step in (0, 1, 2, 3, None, 2, 3):
            if step is None:
                decoder_loss(model, 0, 0, 0)
                checkpoint.resume(tmp_path, **given)
                continue
            oracle.descend(opt, decoder_loss(model, step, comm.rank, 0))
            if step == 1 and not found:
                checkpoint.save(tmp_path, step=2, **given)
            if step == 3:
                found.append(oracle.values_of(model, opt))
        return found

    for once, again in oracle.on_models(2, decoder, work):
        assert all(torch.equal(again[name], value) for name, value in once.items())


class Rounded(Around):
    """Sends multiples of 2^-6, and carries what that leaves to the next time."""

    def __init__(self, inner: Exchange) -> None:
        super().__init__(inner)
        self.carries = ("error",)

    def reduce(
        self, part: Tensor, full: Tensor, reduction: GradientReduction, carried: Carried = NOTHING
    ) -> Work:
        error = carried["error"]
        wanted = full + error
        full.copy_((wanted * 64).round() / 64)
        error.copy_(wanted - full)
        return super().reduce(part, full, reduction, carried)


class Weighted(nn.Module):
    """Its gradients are what it is given, multiples of 2^-10, so that their sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(7, 3), (), (0, 2), (300,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    @staticmethod
    def of(param: Tensor, step: int, rank: int) -> Tensor:
        count = torch.arange(param.numel(), dtype=torch.float32).view(param.shape)
        return ((count * 7 + step * 5 + rank * 3) % 64 - 20) / 1024

    def forward(self, step: int, rank: int) -> Tensor:
        return torch.stack([(p * self.of(p, step, rank)).sum() for p in self.weights]).sum()


def carried_on(
    folder: Path, world_size: int, steps: range, *, is_used: bool = False, **options: Any
) -> list[dict[str, Tensor]]:
    """Resumes, trains, saves; of each rank the weights and what it carries.

    Args:
        is_used: it has trained before, and carries something already.
    """

    def work(comm: Communicator, model: nn.Module) -> dict[str, Tensor]:
        opt = zero.Optimizer(model, optim.sgd(1.0), comm, reduction="sum", **options)
        given: Any = {"model": model, "optimizer": opt, "comm": comm}
        for step in [*([0] if is_used else []), None, *steps]:
            if step is None:
                checkpoint.resume(folder, **given)
                continue
            oracle.descend(opt, model(step, comm.rank))
        checkpoint.save(folder, step=steps.stop, **given)
        found = oracle.values_of(model, opt)
        for number, param in enumerate(model.weights):
            place = parts(opt).places[param]
            assert place.gradients is not None
            for name, value in place.gradients.carried_of(place.index).items():
                found[f"{name} {number}"] = value.clone()
        return found

    return oracle.on_models(world_size, Weighted, work)


ROUNDED: Any = {"exchange": Rounded}


@pytest.mark.parametrize("options", [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, "units": []},
    {"stage": 3, "units": [], "shard_group": 2},
], ids=["stage0", "stage1", "stage2", "stage3", "groups"])  # fmt: skip
def test_what_an_exchange_carries_is_saved_and_its_sum_is_kept_at_another_number_of_ranks(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Whatever was rounded away is applied later or carried: nothing is lost, exactly."""
    given = {**options, **ROUNDED}
    once = carried_on(tmp_path / "once", 4, range(4), **given)
    carried_on(tmp_path / "twice", 4, range(2), **given)
    again = carried_on(tmp_path / "twice", 4, range(2, 4), **given)
    for one, other in zip(once, again, strict=True):
        assert all(torch.equal(one[name], value) for name, value in other.items())
    assert any(one["error 3"].ne(once[0]["error 3"]).any() for one in once)  # each its own

    phases = {4: range(4), 2: range(4, 7), 6: range(7, 9)}
    for world_size in (2, 6):
        last = carried_on(tmp_path / "twice", world_size, phases[world_size], **given)
    for number, param in enumerate(Weighted().weights):
        pairs = [(s, r) for size, steps in phases.items() for s in steps for r in range(size)]
        wanted = torch.stack([Weighted.of(param, step, rank) for step, rank in pairs]).sum(0)
        kept = sum(each[f"error {number}"] for each in last)
        assert torch.equal(kept - last[0][f"weights.{number}"], wanted)


def test_what_was_carried_is_dropped_with_a_word_and_begins_at_zero(tmp_path: Path) -> None:
    carried_on(tmp_path, 2, range(2), **ROUNDED)
    with pytest.warns(UserWarning, match=r"carried \(error\).* owed to gradients is dropped"):
        carried_on(tmp_path, 2, range(2, 3))
    fresh = carried_on(tmp_path, 2, range(3, 3), is_used=True, **ROUNDED)
    assert not any(each["error 3"].any() for each in fresh)


def test_one_rank_sends_nothing_and_has_no_exchange_of_a_person() -> None:
    opt = zero.Optimizer(Weighted(), optim.sgd(1.0), alone(), param_dtype=torch.bfloat16, **ROUNDED)
    assert parts(opt).exchange.carries == ()


@pytest.mark.parametrize(("options", "reason"), [
    ({"precision": policy("fp16", anychip.backend())}, "loss scale"),
    ({"duplicates": "weights"}, "tied over stages"),
], ids=["loss-scale", "tied"])  # fmt: skip
def test_exchange_that_carries_is_refused_where_its_units_change(
    options: dict[str, Any], reason: str
) -> None:
    def work(comm: Communicator) -> None:
        model = Weighted()
        if "duplicates" in options:
            options["duplicates"] = list(model.weights)
        with pytest.raises(UnsupportedError, match=f"carries error from step to step: .*{reason}"):
            zero.Optimizer(model, optim.sgd(1.0), comm, **ROUNDED, **options)

    run_ranks(2, work)
