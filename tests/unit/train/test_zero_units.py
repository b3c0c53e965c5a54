"""ZeRO stage 3: weights are whole while their modules run, and say so to everybody else."""

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anychip import ops
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.zero import guard
from tests.unit.train.zero_decoder import decoder, decoder_loss, on_two, optimizer, parts, rule
from tests.unit.train.zero_oracle import assert_equal, serial, sharded, values_of

GRID = pytest.mark.grid
QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
"""Torch's compiler looks at inputs' gradients."""


@pytest.mark.parametrize(("kind", "how", "world_size", "options"), [
    ("gpt", "plain", 2, {}),
    pytest.param("gpt", "plain", 2, {"prefetch": 0}, marks=GRID),
    ("gpt", "plain", 3, {"prefetch": 2}), ("llama", "plain", 2, {}), ("gpt", "checkpoint", 2, {}),
    ("gpt", "checkpoint reentrant", 2, {}),
    pytest.param("gpt", "compiled", 2, {"steps": 20}, marks=[GRID, QUIET]),
    ("gpt", "plain", 2, {"units": 60_000}),
    ("gpt", "plain", 2, {"units": [["transformer.wte", "lm_head"], "transformer.h.0.mlp"]}),
    ("gpt", "plain", 4, {"shard_group": 2}),
    pytest.param("gpt", "plain", 4, {"shard_group": 1}, marks=GRID),
    pytest.param("gpt", "plain", 8, {"shard_group": 4, "steps": 20}, marks=GRID),
    pytest.param("llama", "checkpoint", 8, {"steps": 20}, marks=GRID),
], ids=lambda value: str(value).strip("{}").replace("'", ""))  # fmt: skip
def test_steps_of_a_decoder_equal_one_process_bit_for_bit(
    kind: str, how: str, world_size: int, options: dict[str, Any]
) -> None:
    given = {"world_size": world_size, "steps": options.get("steps", 4), "micro": 2}
    want = serial(partial(decoder, kind), decoder_loss, rule(), **given)
    options = {"units": "blocks", **options, **given}
    got = sharded(partial(decoder, kind, how), decoder_loss, rule, stage=3, **options)
    assert_equal(got, want)


class AboveFrozen(nn.Module):
    """Its output is that of its block, whose input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.below = nn.Linear(5, 4).requires_grad_(False)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.below(x))  # type: ignore[no-any-return]


def test_block_that_ends_its_root_above_frozen_weights_sends_its_own_gradients() -> None:
    """As a stage of a pipeline with adapters is, whose backward has its last part by itself."""
    torch.manual_seed(1)
    first = AboveFrozen()
    before, models = values_of(first), [copy.deepcopy(first) for _ in range(2)]
    inputs, gradients = torch.randn(2, 6, 5), torch.randn(2, 6, 3)

    def work(comm: Communicator) -> dict[str, Tensor]:
        model = models[comm.rank]
        opt = zero.Optimizer(model, optim.sgd(1.0), comm, stage=3)
        output = model(inputs[comm.rank])
        with opt.explicit() as told, told.reducing(model):
            opt.backward(output, gradients[comm.rank])
        opt.step()
        with opt.whole():
            return values_of(model)

    trained = [p for p in first.parameters() if p.requires_grad]
    found = [
        torch.autograd.grad(first(x), trained, g) for x, g in zip(inputs, gradients, strict=True)
    ]
    names = [name for name, p in first.named_parameters() if p.requires_grad]
    means = {n: (a + b) / 2 for n, a, b in zip(names, *found, strict=True)}
    for got in run_ranks(2, work):
        for name, value in got.items():
            assert torch.equal(value, before[name] - means.get(name, 0.0)), name


# Memory and order


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_whole_bytes_are_those_of_the_root_and_of_the_units_ahead_and_in_use(prefetch: int) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm, prefetch=prefetch)
        for step in range(3):
            opt.backward(decoder_loss(model, step, comm.rank, 0))
            assert parts(opt).whole_nbytes == 0
            opt.step()
            opt.zero_grad()
        *units, root = parts(opt).units
        largest = max(unit.nbytes for unit in units)
        assert parts(opt).peak_whole_nbytes == root.nbytes + (prefetch + 1) * largest

    on_two(work)


def test_units_come_ahead_of_use_in_both_directions_and_go_after_it() -> None:
    def work(comm: Communicator, model: nn.Module) -> list[tuple[str, str]]:
        opt = optimizer(model, comm)
        opt.backward(decoder_loss(model, 0, comm.rank, 0))
        with parts(opt).recorded() as actions:
            opt.backward(decoder_loss(model, 0, comm.rank, 0))
        return actions

    blocks = [f"transformer.h.{number}" for number in range(4)]
    forward = [("UNSHARD", ""), ("UNSHARD", blocks[0])]
    for one, ahead in zip(blocks, [*blocks[1:], None], strict=True):
        forward += [("UNSHARD", ahead)] if ahead else []
        forward += [("RESHARD", one)] if ahead else []
    backward = []
    for one, ahead in zip(blocks[::-1], [*blocks[-2::-1], None], strict=True):
        backward += [("UNSHARD", ahead)] if ahead else []
        backward += [("RESHARD", one)]
    assert on_two(work) == [[*forward, *backward, ("RESHARD", "")]] * 2


@pytest.mark.parametrize("how", ["checkpoint", "checkpoint reentrant"])
def test_recomputation_gathers_nothing_ahead_and_releases_nothing(how: str) -> None:
    """Each block comes twice, forward and backward, and goes twice: what runs again has it."""

    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        opt.backward(decoder_loss(model, 0, comm.rank, 0))
        with parts(opt).recorded() as actions:
            opt.backward(decoder_loss(model, 0, comm.rank, 0))
        for number in range(4):
            mine = [kind for kind, name in actions if name == f"transformer.h.{number}"]
            assert mine == ["UNSHARD", "RESHARD"] * (len(mine) // 2)
            assert len(mine) == (2 if number == 3 and how == "checkpoint" else 4), number
        largest = max(unit.nbytes for unit in parts(opt).units[:-1])
        assert parts(opt).peak_whole_nbytes == parts(opt).units[-1].nbytes + 2 * largest

    on_two(partial(work), partial(decoder, "gpt", how))


def test_evaluation_leaves_nothing_whole_and_training_goes_on_with_the_same_bits() -> None:
    def work(comm: Communicator, model: nn.Module, evaluates: bool) -> dict[str, Tensor]:
        opt = optimizer(model, comm)
        for step in range(3):
            if evaluates:
                with torch.no_grad():
                    decoder_loss(model, 9, 0, 0)
                assert parts(opt).whole_nbytes == 0
                decoder_loss(model, 9, 0, 0)  # with a graph, and no backward
            opt.backward(decoder_loss(model, step, comm.rank, 0))
            assert parts(opt).whole_nbytes == 0
            if evaluates:
                decoder_loss(model, 9, 0, 0)
            opt.step()
            assert parts(opt).whole_nbytes == 0
            opt.zero_grad()
        return values_of(model, opt)

    plain, evaluated = (on_two(partial(work, evaluates=e))[0] for e in (False, True))
    assert all(torch.equal(plain[name], value) for name, value in evaluated.items())


# Whoever reads what is not there


def _readers() -> Iterator[tuple[str, Callable[[nn.Parameter, nn.Module], Any]]]:
    yield "add", lambda weight, _: weight + 1
    yield "own operator", lambda weight, _: ops.linear(torch.ones(2, weight.shape[1]), weight)
    yield "torch's operator", lambda weight, _: torch.ops.aten.mm(weight, weight)
    yield "detach", lambda weight, _: weight.detach()
    yield "data", lambda weight, _: weight.data
    yield "pointer", lambda weight, _: weight.data_ptr()
    yield "list", lambda weight, _: weight.tolist()
    yield "numpy", lambda weight, _: weight.numpy(force=True)
    yield "view", lambda weight, _: weight.view(-1)
    yield "text", lambda weight, _: repr(weight)
    yield "deepcopy", lambda _, model: copy.deepcopy(model)
    yield "state_dict", lambda _, model: model.state_dict()
    yield "save", lambda weight, _: torch.save(weight, io.BytesIO())
    yield "average", lambda weight, _: torch._foreach_lerp([torch.zeros(48, 48)], [weight], 0.1)
    yield "write", lambda weight, _: weight.copy_(torch.zeros(48, 48))
    yield "fill", lambda weight, _: nn.init.zeros_(weight)
    yield "load", lambda weight, m: m.load_state_dict({"0.weight": weight}, strict=False)
    yield "move", lambda _, model: model.double()
    yield "submodule", lambda _, model: model[0](torch.ones(2, 48))
    yield "other module", lambda weight, _: nn.functional.linear(torch.ones(2, 48), weight)


@pytest.mark.parametrize(("reader"), [f for _, f in _readers()], ids=[n for n, _ in _readers()])
def test_reading_a_weight_that_is_not_whole_is_a_sentence_with_its_name(
    reader: Callable[[nn.Parameter, nn.Module], Any],
) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        weight = model.get_parameter("0.weight")
        sentence = (
            r"0\.weight, of shape \(48, 48\), is not whole here: .*opt\.whole\(\['0\.weight'\]"
        )
        with torch.no_grad(), pytest.raises(RuntimeError, match=sentence):
            reader(weight, model)
        with opt.whole():
            assert torch.isfinite(weight).all()

    on_two(work, lambda: nn.Sequential(nn.Linear(48, 48, bias=False)))


def test_what_a_weight_is_can_be_asked_at_any_time() -> None:
    def what(weight: Tensor) -> tuple[Any, ...]:
        return weight.shape, weight.dtype, weight.device, weight.numel(), weight.stride()

    def work(comm: Communicator, model: nn.Module) -> None:
        weight = model.get_parameter("0.weight")
        before = what(weight)
        optimizer(model, comm)
        assert what(weight) == before
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight.grad is None
        assert isinstance(weight, nn.Parameter)
        assert dict(model.named_parameters())["0.weight"] is weight

    on_two(work, lambda: nn.Sequential(nn.Linear(48, 48, bias=False)))


@pytest.fixture(params=sorted({guard.SWAPS, False}))
def swaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a torch whose storages cannot refuse: as it can, and as where it gives no other memory."""
    monkeypatch.setattr(guard, "_refuse", None)
    monkeypatch.setattr(guard, "SWAPS", request.param)


@pytest.mark.usefixtures("swaps")
def test_alias_of_a_weight_reads_nan_while_it_is_not_whole_and_its_values_when_it_is() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        with opt.whole():
            alias = model.get_parameter("0.weight").detach().t()[3:5]
            want = alias.clone()
        assert alias.isnan().all()
        alias.zero_()  # is lost
        with opt.whole():
            assert torch.equal(alias, want)
        assert alias.isnan().all()

    on_two(work, lambda: nn.Sequential(nn.Linear(48, 48, bias=False)))


@pytest.mark.skipif(guard._refuse is None, reason="storages of this torch cannot refuse")
def test_alias_of_a_weight_is_refused_by_its_name_while_it_is_not_whole() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        with opt.whole():
            alias = model.get_parameter("0.weight").detach().t()[3:5]
            want = alias.clone()
        view = alias.as_strided((48, 48), (48, 1), 0)  # as autograd makes it anew
        for read in (alias.sum, alias.zero_, alias.tolist, view.clone):
            with pytest.raises(RuntimeError, match=r"0\.weight, of shape \(48, 48\), is not whole"):
                read()
        with opt.whole():
            assert torch.equal(alias, want)

    on_two(work, lambda: nn.Sequential(nn.Linear(48, 48, bias=False)))


@pytest.mark.usefixtures("swaps")
def test_large_storage_is_nan_from_end_to_end_in_few_mappings_and_comes_back() -> None:
    """700 MiB on paper, of which nothing is touched but what is looked at."""
    storage = torch.empty(700 << 20, dtype=torch.uint8).untyped_storage()
    view = torch.empty(0).set_(storage)
    room = guard.Room(storage, [], [])
    maps = Path("/proc/self/maps")
    before = len(maps.read_text().splitlines())
    room.release()
    assert len(maps.read_text().splitlines()) - before <= 256
    assert view[:: (1 << 18) - 1].isnan().all()
    assert view[-1].isnan()
    room.restore()
    view[-1] = 2.0
    assert len(maps.read_text().splitlines()) - before <= 2
    assert float(view[-1]) == 2.0


@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("place", [0, 1, 1024, 1025])
@pytest.mark.parametrize("count", [1, 3, 1023, 1024, 4097])
def test_storage_of_any_size_and_place_is_nan_and_its_neighbours_are_as_they_were(
    place: int, count: int
) -> None:
    whole = torch.full((count + place + 2048,), 3.0)
    address = whole.data_ptr() + 4 * place
    storage = torch._C._construct_storage_from_data_pointer(address, whole.device, 4 * count)  # type: ignore[attr-defined]
    view = torch.empty(0).set_(storage)
    room = guard.Room(storage, [], [])
    room.release()
    assert view.isnan().all()
    room.restore()
    view.fill_(5.0)
    assert (view == 5.0).all()
    assert (whole[:place] == 3.0).all()
    assert (whole[place + count :] == 3.0).all()


def test_weights_written_under_whole_are_kept_if_that_was_said() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        name = "transformer.h.2.mlp.c_fc.weight"
        weight = model.get_parameter(name)
        with opt.whole(["transformer.h.2"], writes=True), torch.no_grad():
            weight.fill_(0.25)
            with opt.whole(["transformer.wte", "lm_head.weight"]):
                assert torch.isfinite(model.get_parameter("lm_head.weight")).all()
            assert torch.equal(weight, torch.full_like(weight, 0.25))
        with pytest.raises(RuntimeError, match=r"what was written is lost"):
            with opt.whole([name]), torch.no_grad():
                weight.zero_()
        with opt.whole([name]):
            assert (weight == 0.25).all()
            decoder_loss(model, 0, 0, 0)
            assert (weight == 0.25).all()
        opt.backward(decoder_loss(model, 0, 0, 0))
        with pytest.raises(RuntimeError, match=r"change under whole\(\)"), opt.whole():
            opt.step()
        with pytest.raises(ValueError, match=r"GPT has no parameter.*'transformer.x'"):
            opt.whole(["transformer.x"]).__enter__()

    on_two(work)


# Mistakes


def test_error_within_backward_or_forward_leaves_a_model_that_trains_on() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ArithmeticError("here")

    def work(comm: Communicator, model: nn.Module, fails: bool) -> dict[str, Tensor]:
        opt = optimizer(model, comm)
        block = model.get_submodule("transformer.h.1.mlp")
        run = block.forward
        for step in range(3):
            if fails:
                block.forward = lambda x: Fails.apply(run(x))
                with pytest.raises(ArithmeticError):
                    opt.backward(decoder_loss(model, step, comm.rank, 0))
                block.forward = lambda x: 1 / 0  # type: ignore[assignment,return-value]
                with pytest.raises(ZeroDivisionError):
                    decoder_loss(model, step, comm.rank, 0)
                block.forward = run
                opt.zero_grad()
            opt.backward(decoder_loss(model, step, comm.rank, 0))
            assert parts(opt).whole_nbytes == 0
            opt.step()
            opt.zero_grad()
        return values_of(model, opt)

    plain, failed = (on_two(partial(work, fails=fails))[0] for fails in (False, True))
    assert all(torch.equal(plain[name], value) for name, value in failed.items())


@pytest.mark.parametrize(("units", "message"), [
    ("layers", "'blocks', a size in bytes or paths expected, got 'layers'"),
    (0, "at least 1 byte expected, got 0"),
    (["transformer.x"], "GPT has no module 'transformer.x'"),
    (["transformer.h"], "transformer.h is a list of modules, which nobody calls"),
    (["lm_head", "lm_head"], "lm_head is named twice"),
    (["transformer.h.0", "transformer.h.0.mlp"], "transformer.h.0.mlp is inside transformer.h.0"),
], ids=str)  # fmt: skip
def test_units_that_the_model_does_not_have_are_refused(units: Any, message: str) -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=message):
            optimizer(model, comm, units=units)

    on_two(work)


def test_arguments_that_do_not_fit_are_refused() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        with pytest.raises(ValueError, match=r"stage=3, module=model"):
            zero.Optimizer(model.parameters(), rule(), comm, stage=3)
        with pytest.raises(ValueError, match=r"parameter 0 is no parameter of the Linear"):
            zero.Optimizer(model.parameters(), rule(), comm, stage=3, module=nn.Linear(2, 2))
        for group in ("shard_group", "secondary_group"):
            with pytest.raises(ValueError, match=rf"{group} must divide the 2 ranks, got 3"):
                optimizer(model, comm, **{group: 3})
        with pytest.raises(ValueError, match=r"gather_format is for stage 3.*got stage 2"):
            zero.Optimizer(model, rule(), comm, stage=2, gather_format="int8")
        with pytest.raises(ValueError, match=r"gather_format must be one of int8, .*got 'int9'"):
            optimizer(model, comm, gather_format="int9")
        with pytest.raises(TypeError, match=r"no argument 'prefech'; did you mean 'prefetch'"):
            optimizer(model, comm, prefech=3)

    on_two(work, lambda: nn.Linear(4, 4))


def test_parameters_replaced_after_the_optimizer_was_made_are_an_error() -> None:
    def work(comm: Communicator, model: nn.Module) -> None:
        opt = optimizer(model, comm)
        state = {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}
        opt.backward(model(torch.ones(1, 4)).sum())
        model.load_state_dict(state, assign=True)
        with pytest.raises(RuntimeError, match=r"weight is another parameter than when"):
            opt.step()

    on_two(work, lambda: nn.Linear(4, 4))


def test_whole_state_dict_goes_to_one_rank_and_its_parts_come_from_it() -> None:
    want = decoder().state_dict()

    def work(comm: Communicator, model: nn.Module) -> dict[str, Tensor]:
        opt = optimizer(model, comm)
        saved = parts(opt).state_dict(to_rank=1)
        assert bool(saved) == (comm.rank == 1)
        with opt.whole(writes=True), torch.no_grad():
            for param in model.parameters():
                param.zero_()
        parts(opt).load_state_dict(want)
        assert opt.stands_for(model) is parts(opt)
        return parts(opt).state_dict()

    for got in on_two(work):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], value) for name, value in want.items())
        assert got["lm_head.weight"] is got["transformer.wte.weight"]


def test_one_rank_has_nothing_to_gather() -> None:
    model = nn.Linear(3, 3)
    opt = optimizer(model, alone())
    with opt.whole(writes=True) if opt else nullcontext():
        assert opt.sharded is None
    opt.backward(model(torch.ones(1, 3)).sum())
    opt.step()
