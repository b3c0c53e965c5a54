"""The state of a partitioned optimizer: saved in whole tensors, loaded at any size and stage."""

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError
from anychip.train import optim, zero
from tests.unit.train.zero_oracle import (
    Trained,
    assert_equal,
    descend,
    on_models,
    ragged,
    ragged_loss,
    serial,
    sharded,
    values_of,
)


def adamw() -> optim.Rule:
    rule = optim.adamw(optim.warmup_cosine(3e-2, 4, 30), beta2=0.99, weight_decay=0.1)
    return optim.chain(optim.clip_by_global_norm(0.5), rule)


def momentum() -> optim.Rule:
    return optim.sgd(1.0, momentum=0.5)


def from_disk(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def went_on(build: Any, trained: Trained) -> Any:
    """A builder of models that have the trained parameters."""

    def resumed() -> nn.Module:
        model = build()
        assert isinstance(model, nn.Module)
        model.load_state_dict({**model.state_dict(), **trained.params})
        return model

    return resumed


def coded() -> optim.Rule:
    rule = optim.adamw(3e-2, beta2=0.99, weight_decay=0.1, states="8bit")
    return optim.chain(optim.clip_by_global_norm(0.5), rule)


RULES = {"adamw": adamw, "momentum": momentum, "8bit": coded}
MOVES = [
    ((3, 2), (2, 1)), ((2, 1), (1, 0)), ((1, 0), (3, 2)), ((4, 1), (8, 2)), ((2, 3), (2, 3)),
    ((2, 3), (3, 0)), ((2, 2), (2, 2)),
]  # fmt: skip
"""Ranks and stage before, and after."""


@pytest.mark.parametrize(("before", "after"), MOVES, ids=str)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_resume_at_any_size_and_stage_equals_one_process(
    rule: Callable[[], optim.Rule], before: tuple[int, int], after: tuple[int, int]
) -> None:
    """Each half sees as many ranks' data as it has ranks; the oracle has it in one process."""
    first = sharded(ragged, ragged_loss, rule, world_size=before[0], stage=before[1], steps=2)
    assert_equal(first, serial(ragged, ragged_loss, rule(), world_size=before[0], steps=2))
    state = from_disk(first[0].state)
    rest: dict[str, Any] = {"world_size": after[0], "steps": 2, "first_step": 2, "state": state}
    build = went_on(ragged, first[0])
    second = sharded(build, ragged_loss, rule, stage=after[1], **rest)
    want = serial(build, ragged_loss, rule(), **rest)
    assert_equal(second, want)
    assert want.state["num_steps"] == 4


def test_states_of_8_bits_are_codes_with_a_scale_per_block() -> None:
    state = zero.Optimizer(ragged(), coded(), alone()).state_dict()["state"]
    assert state[3]["exp_avg_sq_scale"].shape == (9,)  # of 90 times 24
    assert state[3]["exp_avg_sq"].dtype == torch.uint8


def test_states_of_8_bits_take_a_quarter_of_the_bytes() -> None:
    def nbytes(comm: Communicator) -> tuple[int, int]:
        rules = (optim.adamw(0.1), optim.adamw(0.1, states="8bit"))
        wide, narrow = (zero.Optimizer(nn.Linear(96, 128), r, comm, stage=1) for r in rules)
        return wide.memory().states, narrow.memory().states

    found = run_ranks(3, nbytes)
    # 12,288 weights and 128 biases of two states, and the step's count.
    assert sum(wide for wide, _ in found) == 8 * 12_416 + 3 * 4
    assert sum(narrow for _, narrow in found) == 2 * 12_416 + 8 * (48 + 1) + 3 * 4


def test_state_of_float32_is_refused_by_a_rule_of_8_bits() -> None:
    wide = zero.Optimizer(nn.Linear(6, 4), adamw(), alone()).state_dict()
    narrow = zero.Optimizer(nn.Linear(6, 4), coded(), alone())
    with pytest.raises(ValueError, match=r"parameter 0: shapes .*exp_avg_scale.* expected, got"):
        narrow.load_state_dict(wide)


def test_state_dict_is_on_every_rank_or_on_the_one_that_is_named() -> None:
    def work(comm: Communicator, model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
        opt = zero.Optimizer(model, adamw(), comm, stage=2)
        opt.backward(ragged_loss(model, 0, comm.rank, 0))
        opt.step()
        return opt.state_dict(), opt.state_dict(to_rank=1)

    results = on_models(3, ragged, work)
    want = results[0][0]
    for rank, (everywhere, on_one) in enumerate(results):
        for state in (everywhere, on_one) if rank == 1 else (everywhere,):
            assert state["state"].keys() == want["state"].keys() == set(range(9))
            for index, entry in want["state"].items():
                assert all(torch.equal(state["state"][index][n], t) for n, t in entry.items())
        assert on_one["state"] == {} or rank == 1
        assert on_one["param_groups"] == want["param_groups"]
    assert want["state"][3]["exp_avg"].shape == (90, 24)
    assert want["state"][3]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 0), (2, 1)])
def test_state_of_another_model_is_refused_and_nothing_changes(world_size: int, stage: int) -> None:
    other = zero.Optimizer(nn.Linear(6, 4), adamw(), alone()).state_dict()

    def work(comm: Communicator, model: nn.Module) -> None:
        opt = zero.Optimizer(model, adamw(), comm, stage=stage)
        opt.backward(model(torch.ones(1, 6)).sum())
        opt.step()
        before = opt.state_dict()["state"]
        kept = {index: {n: t.clone() for n, t in entry.items()} for index, entry in before.items()}
        with pytest.raises(ValueError, match=r"parameter 0: shapes .*\(5, 6\).*got .*\(4, 6\)"):
            opt.load_state_dict(other)
        after = opt.state_dict()["state"]
        for index, entry in kept.items():
            assert all(torch.equal(after[index][name], value) for name, value in entry.items())
        assert opt.num_steps == 1

    on_models(world_size, lambda: nn.Linear(6, 5), work)


@pytest.mark.parametrize(("size", "blocks", "message"), [
    (lambda numel: 3, {}, r"state 'own' has the shape \(3,\).*Use stage 0"),
    (lambda numel: -(-numel // 3), {"own": 3}, r"'own' has one entry per 3 elements.*stage 0"),
], ids=["shape", "blocks"])  # fmt: skip
def test_rule_whose_states_no_cut_keeps_whole_is_refused_on_shards_only(
    size: Callable[[int], int], blocks: dict[str, int], message: str
) -> None:
    own = optim.Rule(
        lambda param: {"own": torch.zeros(size(param.numel()))}, lambda update: None, blocks=blocks
    )
    rule = optim.chain(own, optim.sgd(0.1))

    def work(comm: Communicator, stage: int) -> None:
        zero.Optimizer(nn.Linear(6, 4), rule, comm, stage=stage)

    run_ranks(2, partial(work, stage=0))
    with pytest.raises(UnsupportedError, match=message):
        run_ranks(2, partial(work, stage=1))


def test_group_added_later_is_trained_with_the_others() -> None:
    def work(comm: Communicator, stage: int) -> dict[str, Tensor]:
        model = models[comm.rank]
        opt = zero.Optimizer(model[0], optim.sgd(0.1, momentum=0.9), comm, stage=stage)
        for step in range(4):
            if step == 2:
                opt.add_param_group({"params": list(model[1].parameters()), "lr_scale": 2.0})
            descend(opt, model(torch.full((1, 40), 1.0 + step)).square().mean())
            # What is not in a group has gradients that add up, as with any optimizer.
            model.zero_grad()
        return values_of(model)

    def build() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 3))

    models = [build()]
    want = work(alone(), 0)
    for stage in (0, 1, 2):
        models = [build() for _ in range(2)]
        for values in run_ranks(2, partial(work, stage=stage)):
            assert all(torch.equal(values[name], value) for name, value in want.items())
