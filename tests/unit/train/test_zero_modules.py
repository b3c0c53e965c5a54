"""ZeRO stage 3 on modules of all kinds: what they give, which of their parameters are used."""

import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import models, zero
from tests.unit.train.zero_decoder import decoder, decoder_loss, on_two, optimizer, parts, rule
from tests.unit.train.zero_oracle import assert_equal, descend, serial, sharded, values_of


@dataclass
class Found:
    first: Tensor
    others: dict[str, tuple[Tensor, ...]]


class Holder:
    """Neither a container nor a dataclass; it knows itself, and a module."""

    def __init__(self, inner: Tensor, module: nn.Module) -> None:
        self.first, self.module, self.itself = Slotted(inner), module, self


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


class Odd(nn.Module):
    """A unit that gives what ``kind`` says, is used twice, and begins with a frozen matrix."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Part(kind) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for part in [self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[2]]:
            x = _first(part(x)) * self.scale
        return x.square().mean()


class Part(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.base = nn.Linear(40, 40).requires_grad_(False)
        self.down, self.up = nn.Linear(40, 4, bias=False), nn.Linear(4, 40, bias=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.randn(1300))

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(self.base(x) + self.up(self.down(x))) + self.empty.sum()
        made = {"tensor": y, "tuple": (None, y), "dict": {"a": [1, y]}, "dataclass": Found(y, {})}
        return made.get(self.kind, Holder(y, self))


def _first(values: Any) -> Tensor:
    if isinstance(values, (Found, Holder)):
        first = values.first
        return first.inner if isinstance(first, Slotted) else first
    if isinstance(values, dict):
        values = values["a"]
    return values if isinstance(values, Tensor) else values[1]


def odd(kind: str) -> Odd:
    torch.manual_seed(5)
    return Odd(kind)


def odd_loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    loss: Tensor = model(torch.randn(3, 40, generator=generator))
    return loss


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict", "dataclass", "object"])
def test_outputs_of_all_kinds_frozen_matrices_and_modules_used_twice_have_the_same_bits(
    kind: str,
) -> None:
    want = serial(partial(odd, kind), odd_loss, rule(), world_size=2, steps=4, micro=2)
    given = {"world_size": 2, "stage": 3, "steps": 4, "micro": 2, "units": "blocks"}
    assert_equal(sharded(partial(odd, kind), odd_loss, rule, **given), want)  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [2, 3], ids="stage{}".format)
def test_freezing_and_unfreezing_between_steps_have_the_bits_of_stage_0(stage: int) -> None:
    """The last block from step 2 on, a frozen matrix among others from step 4 on; then not it."""

    def work(comm: Communicator, model: nn.Module, stage: int) -> dict[str, Tensor]:
        opt = zero.Optimizer(model, rule(), comm, stage=stage, bucket_nbytes=12_000)
        late = model.get_parameter("transformer.h.1.mlp.c_fc.weight")
        for step in range(6):
            for param in model.get_submodule("transformer.h.3").parameters():
                param.requires_grad_(step >= 2)
            if step == 3:
                late.requires_grad_()
                opt.add_param_group({"params": [late], "lr_scale": 0.5})
            if step == 5:
                late.requires_grad_(False)
            descend(opt, decoder_loss(model, step, comm.rank, 0))
        return values_of(model, opt)

    want, got = (on_two(partial(work, stage=number)) for number in (0, stage))
    assert all(torch.equal(got[rank][n], v) for rank in (0, 1) for n, v in want[0].items())


def sines(module: nn.Module) -> None:
    """Numbers of each own parameter that depend on its shape alone."""
    for param in module.parameters(recurse=False):
        with torch.no_grad():
            param.copy_(torch.sin(torch.arange(float(param.numel()))).mul(0.1).view(param.shape))


def test_model_without_memory_is_made_unit_by_unit_and_trains_as_one_with_memory() -> None:
    found, real = [], []

    def note(module: nn.Module) -> None:
        sines(module)
        params = made[0].parameters()
        real.append(sum(p.numel() for p in params if not p.is_meta and type(p) is nn.Parameter))

    def work(comm: Communicator) -> dict[str, Tensor]:
        model = made[comm.rank]
        opt = optimizer(model, comm, init=note)
        assert opt.param_groups[0]["params"][0] is model.get_parameter("transformer.wte.weight")
        for step in range(2):
            descend(opt, decoder_loss(model, step, comm.rank, 0))
        assert max(real, default=0) <= max(u.nbytes for u in parts(opt).units) / 4
        return values_of(model, opt)

    for device in ("meta", "cpu"):
        with torch.device(device):
            made = [decoder(), decoder()]
        if device == "cpu":
            for model in made:
                model.apply(sines)
        found.append(run_ranks(2, work))
    assert all(torch.equal(found[0][rank][n], v) for rank in (0, 1) for n, v in found[1][0].items())


def test_model_without_memory_or_first_values_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    def work(comm: Communicator, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"Bare is on the meta device.*init=lambda module"):
            optimizer(model, comm)
        with pytest.raises(ValueError, match=r"\(3,\) is on the meta device, without values"):
            zero.Optimizer(model, rule(), comm, stage=2)

    on_two(work, Bare)


class Routed(nn.Module):
    """Three blocks, of which ``route`` says which run; in each a matrix that its rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Branches() for _ in range(3))

    def forward(self, x: Tensor, route: list[int], branch: int) -> Tensor:
        for number in route:
            x = torch.tanh(self.blocks[number](x, branch)) + x
        return x.square().mean()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(40, 40)
        self.branches = nn.ModuleList(nn.Linear(40, 40) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        y: Tensor = self.branches[branch](self.stem(x))
        return y


def routed() -> Routed:
    torch.manual_seed(6)
    return Routed()


def routed_loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """All ranks leave out the same blocks, in turn; each uses a matrix of its own in them."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    route = [[0, 1, 2], [0, 2], [2, 1, 0], [1]][step % 4]
    loss: Tensor = model(torch.randn(3, 40, generator=generator), route, (step + rank) % 3)
    return loss


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_what_was_gathered_ahead_and_is_not_used_has_no_effect(prefetch: int) -> None:
    """Blocks come in another order in each step, and ranks use other parameters of them."""
    given = {"world_size": 3, "steps": 8, "micro": 2}
    want = serial(routed, routed_loss, rule(), **given)  # type: ignore[arg-type]
    options = {"stage": 3, "units": "blocks", "prefetch": prefetch}
    assert_equal(sharded(routed, routed_loss, rule, **given, **options), want)  # type: ignore[arg-type]


def test_groups_of_parameters_in_one_unit_count_their_steps_once() -> None:
    def work(comm: Communicator, model: nn.Module, stage: int) -> dict[str, Tensor]:
        groups = models.parameter_groups(model, 0.1)
        opt = zero.Optimizer(groups, rule(), comm, stage=stage, module=model)
        for step in range(4):
            descend(opt, decoder_loss(model, step, comm.rank, 0))
        assert {float(entry["step"]) for entry in opt.state.values()} == {4.0}
        return values_of(model, opt)

    want, got = (on_two(partial(work, stage=stage))[0] for stage in (0, 3))
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        opt.backward(decoder_loss(model, 0, 0, 0))
        reduced = comm.traffic.nbytes["reduce_scatter"]
        kinds = [w for unit in parts(opt).units for w in unit.weights]
        trained = [w.layout.numel for w in kinds if w.params[0].requires_grad]
        assert reduced == 4 * sum(trained)
        assert len(trained) < len(kinds)

    on_two(work)


def test_output_that_is_a_view_and_is_written_later_is_right_or_names_the_weight() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Half(), Half(), Half()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                x.mul_(0.5)
            return x.sum()

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(40, 80)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.tanh(self.linear(x)).clone()
            return y[:, :40]

    def build() -> nn.Module:
        torch.manual_seed(6)
        return Halves()

    def work(comm: Communicator, model: nn.Module) -> str:
        opt = optimizer(model, comm)
        try:
            opt.backward(model(torch.ones(2, 40)))
        except RuntimeError as error:
            return str(error)
        return ""

    for text in on_two(work, build):
        # Where storages refuse, by the first name of those that share it.
        assert not text or re.match(r"blocks\.\d\.linear\.\w+, of shape .* is not whole", text)


def test_rank_that_misses_gradients_and_comes_late_changes_nothing() -> None:
    """It reduces later than others, who gather meanwhile: two communicators, and no mismatch."""

    def work(comm: Communicator, model: nn.Module, is_late: bool) -> dict[str, Tensor]:
        opt = optimizer(model, comm)
        for step in range(3):
            opt.backward(routed_loss(model, step, comm.rank, 0))
            if comm.rank and is_late:
                time.sleep(0.02)
            with torch.no_grad():
                routed_loss(model, step, comm.rank, 0)
            opt.step()
            opt.zero_grad()
        return values_of(model, opt)

    want, got = (on_two(partial(work, is_late=late), routed)[0] for late in (False, True))
    assert all(torch.equal(got[name], value) for name, value in want.items())
