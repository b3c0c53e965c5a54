"""Weights of 16 bits: their masters in float32 are updated, saved and loaded, at every stage."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError
from anychip.train import checkpoint, optim, zero
from tests.unit.train.zero_oracle import descend, on_models, values_of

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="stage{}".format)
BF16 = torch.bfloat16


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.frozen.weight.dtype)
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.frozen(x)
        return x.float().square().mean()


def build(dtype: torch.dtype = BF16) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def rule() -> optim.Rule:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-3, weight_decay=0.1))


def loss_of(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    loss: Tensor = model(torch.randn(4, 64, generator=generator))
    return loss


def by_hand(world_size: int, steps: int, micro: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters and weights, of an optimizer for float32 and copies: nothing of masters is in it."""
    model, masters = build(), build().float()
    for master, param in zip(masters.parameters(), model.parameters(), strict=True):
        assert torch.equal(master, param.float())
    opt = zero.Optimizer(masters, rule(), alone())
    trained = [
        (m, p)
        for m, p in zip(masters.parameters(), model.parameters(), strict=True)
        if p.requires_grad
    ]
    for step in range(steps):
        sums = [torch.zeros_like(m) for m, _ in trained]
        for rank in range(world_size):
            own = [torch.zeros_like(m) for m, _ in trained]
            for number in range(micro):
                grads = torch.autograd.grad(
                    loss_of(model, step, rank, number), [p for _, p in trained]
                )
                own = [a + g.float() for a, g in zip(own, grads, strict=True)]
            sums = [a + b for a, b in zip(sums, own, strict=True)]
        for (master, _), total in zip(trained, sums, strict=True):
            master.grad = total / world_size
        opt.step()
        with torch.no_grad():
            for master, param in trained:
                param.copy_(master)
    return values_of(masters), values_of(model)


def run(
    comm: Communicator, model: nn.Module, stage: int, steps: range,
    state: dict[str, Any] | None = None, **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Any], zero.MemoryUse]:  # fmt: skip
    opt = zero.Optimizer(model, rule(), comm, stage=stage, bucket_nbytes=20_000, **options)
    if state is not None:
        opt.load_state_dict(state)
    for step in steps:
        with opt.no_sync():
            opt.backward(loss_of(model, step, comm.rank, 0))
        descend(opt, loss_of(model, step, comm.rank, 1))
    return values_of(model, opt), opt.state_dict(), opt.memory()


@STAGES
@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_of_16_bit_weights_are_those_of_their_masters(stage: int, world_size: int) -> None:
    masters, weights = by_hand(world_size, 6, 2)
    found = on_models(world_size, build, partial(run, stage=stage, steps=range(6)))
    names = [name for name, param in build().named_parameters() if param.requires_grad]
    for got, state, _ in found:
        assert all(torch.equal(got[name], weight) for name, weight in weights.items())
        for number, name in enumerate(names):
            master = state["state"][number]["master"]
            assert torch.equal(master, masters[name])
            assert not torch.equal(master, master.to(BF16).float())


@STAGES
def test_model_in_float32_that_computes_in_16_bits_keeps_its_float32_values(stage: int) -> None:
    build_wide = partial(build, torch.float32)
    first = [p.detach() for p in build_wide().parameters() if p.requires_grad]

    def work(comm: Communicator, model: Net) -> tuple[list[Tensor], list[torch.dtype]]:
        opt = zero.Optimizer(model, rule(), comm, stage=stage, param_dtype=BF16)
        state = opt.state_dict()["state"]
        return [e["master"] for e in state.values()], [p.dtype for p in model.parameters()]

    trained = 6 if stage < 3 else 8  # the others, which are frozen, are nobody's but in stage 3
    for masters, dtypes in on_models(2, build_wide, work):
        assert all(torch.equal(a, b) for a, b in zip(masters, first, strict=True))
        assert dtypes.count(BF16) == trained


@pytest.mark.parametrize(("before", "after"), [(0, 3), (3, 1), (2, 0)], ids=str)
def test_masters_go_on_at_another_stage_bit_for_bit(before: int, after: int) -> None:
    want = on_models(2, build, partial(run, stage=before, steps=range(4)))[0]
    half = on_models(2, build, partial(run, stage=before, steps=range(2)))[0]

    def again() -> Net:
        model = build()
        model.load_state_dict(half[0])
        return model

    rest = partial(run, stage=after, steps=range(2, 4), state=half[1])
    for weights, state, _ in on_models(2, again, rest):
        assert all(torch.equal(weights[name], value) for name, value in want[0].items())
        for number, entry in want[1]["state"].items():
            assert all(torch.equal(state["state"][number][n], v) for n, v in entry.items())


def test_bytes_are_2_of_a_weight_4_of_a_gradient_and_12_of_states_or_of_a_part() -> None:
    psi = sum(param.numel() for param in build().parameters() if param.requires_grad)
    whole = on_models(2, build, partial(run, stage=0, steps=range(1)))[0][2]
    assert whole == (2 * psi, 4 * psi, 12 * psi + 4)
    part = on_models(2, build, partial(run, stage=3, steps=range(1)))[0][2]
    assert part.parameters == 0
    assert abs(part.gradients - 4 * psi / 2) <= 4 * 2048
    assert abs(part.states - 12 * psi / 2) <= 12 * 2048 + 4


@STAGES
def test_weight_that_was_written_without_its_master_is_an_error(stage: int) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = zero.Optimizer(model, rule(), comm, stage=stage)
        weight = model.blocks[0].weight
        assert isinstance(weight, Tensor)
        with opt.whole(writes=True), torch.no_grad():
            weight.fill_(0.5)
        opt.backward(loss_of(model, 0, 0, 0))
        opt.step()
        with opt.whole():
            assert ((weight - 0.5).abs() < 0.01).all()
        if stage == 3:  # nobody can write it there
            return
        opt.zero_grad()
        opt.backward(loss_of(model, 1, 0, 0))
        with torch.no_grad():
            weight.zero_()
        with pytest.raises(RuntimeError, match=r"blocks\.0\.weight has been written since"):
            opt.step()

    on_models(2, build, work)


def test_state_without_masters_takes_the_weights_that_are_there() -> None:
    model = build()
    opt = zero.Optimizer(model, rule(), alone())
    state = copy.deepcopy(opt.state_dict())
    for entry in state["state"].values():
        del entry["master"]
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.25)
    opt.load_state_dict(state)
    masters = [entry["master"] for entry in opt.state_dict()["state"].values()]
    assert all(torch.equal(m, torch.full_like(m, 0.25)) for m in masters)


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_alone_are_loaded_without_their_masters_or_with_them(
    tmp_path: Path, stage: int
) -> None:
    """In stage 3 a rank keeps masters alone, and has their values; else those of weights."""

    def save(comm: Communicator) -> dict[str, Tensor]:
        model = build()
        opt = zero.Optimizer(model, rule(), comm, stage=stage)
        for step in range(3):
            descend(opt, loss_of(model, step, comm.rank, 0))
        checkpoint.save(tmp_path, step=3, model=model, optimizer=opt, comm=comm)
        return values_of(model, opt)

    def load(comm: Communicator) -> tuple[dict[str, Tensor], float]:
        model = build()
        opt = zero.Optimizer(model, optim.sgd(0.1), comm, stage=stage)
        assert checkpoint.resume(
            tmp_path, model=model, optimizer=opt, comm=comm, weights_only=True
        ).step == 3  # fmt: skip
        masters = [e["master"].float() for e in opt.state.values() if "master" in e]
        return values_of(model, opt), float(sum(m.abs().sum() for m in masters))

    want, fresh = run_ranks(2, save), {n: p for n, p in build().named_parameters()}
    assert any(not torch.equal(want[0][name], fresh[name]) for name in fresh)
    for got, size in run_ranks(2, load):
        assert got.keys() == want[0].keys()
        assert all(torch.equal(got[name], want[0][name]) for name in got)
        assert size > 0


def test_types_that_no_master_is_for_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.float64; parameters of 32 or 16 bits"):
        zero.Optimizer(nn.Linear(2, 2).double(), rule(), alone())
    opt = zero.Optimizer(nn.Linear(2, 2), rule(), alone())
    with pytest.raises(UnsupportedError, match=r"bfloat16.*give it when the optimizer is made"):
        opt.add_param_group({"params": list(nn.Linear(2, 2).to(BF16).parameters())})
