"""What sharded training is compared with: one process, in the tree that zero.Optimizer documents.

Each rank's backward passes are added up by plain autograd, then the ranks' sums pairwise,
divided by their number; the rule then makes its update on one rank, which knows nothing of shards.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, zero
from anychip.train.zero.exchange import GradientReduction
from tests.order_of_sums import pairwise

T = TypeVar("T")
Loss = Callable[[nn.Module, int, int, int], Tensor]
"""(model, step, rank, micro-batch) to the loss."""


class Trained(NamedTuple):
    """Parameters by name, norms of all steps, and the optimizer's whole state."""

    params: dict[str, Tensor]
    norms: list[Tensor | None]
    state: dict[str, object]


class Ragged(nn.Module):
    """Parameters of sizes that no partition likes: some blocks and a rest, tiny, 0-dim, empty.

    ``shared`` is used twice, ``frozen`` is not trained, ``unused`` has no gradient on any rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 90)
        self.shared = nn.Linear(90, 90)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Linear(90, 90).requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(1300))
        self.last = nn.Linear(90, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) * self.scale
        x = torch.tanh(self.shared(torch.tanh(self.frozen(torch.tanh(self.shared(x))))))
        return self.last(x) + self.nothing.sum()


def ragged() -> Ragged:
    torch.manual_seed(3)
    return Ragged()


def ragged_loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    x = torch.randn(6, 24, generator=generator)
    y = torch.randn(6, 3, generator=generator)
    return (model(x) - y).square().mean()


class Integers(nn.Module):
    """A linear function of integers: every gradient is a small integer, and every sum exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3000.0).remainder(7.0))
        self.bias = nn.Parameter(torch.zeros(33))
        self.offset = nn.Parameter(torch.tensor(2.0))

    def forward(self, factors: Sequence[Tensor]) -> Tensor:
        terms = zip((self.weight, self.bias, self.offset), factors, strict=True)
        return torch.stack([(p * factor).sum() for p, factor in terms]).sum()


def integer_loss(model: nn.Module, step: int, rank: int, micro: int) -> Tensor:
    """Multiples of 8 * 840 as gradients: means over 1 to 8 ranks, halved thrice, are exact."""
    assert isinstance(model, Integers)
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    factors = [
        6720.0 * torch.randint(-3, 4, p.shape, generator=generator)
        for p in (model.weight, model.bias, model.offset)
    ]
    loss: Tensor = model(factors)
    return loss


def serial(
    build: Callable[[], nn.Module], loss: Loss, rule: optim.Rule, *, world_size: int, steps: int,
    micro: int = 1, first_step: int = 0, state: dict[str, object] | None = None,
    reduction: GradientReduction = "avg",
) -> Trained:  # fmt: skip
    """The oracle."""
    model = build()
    params = [p for p in model.parameters() if p.requires_grad]
    opt = zero.Optimizer(model, rule, alone())
    if state is not None:
        opt.load_state_dict(state)
    norms = []
    for step in range(first_step, first_step + steps):
        sums: list[list[Tensor | None]] = [[] for _ in params]
        for rank in range(world_size):
            model.zero_grad()
            for number in range(micro):
                loss(model, step, rank, number).backward()
            for own, param in zip(sums, params, strict=True):
                own.append(param.grad)
        for param, own in zip(params, sums, strict=True):
            joined = pairwise(own, _plus)
            divisor = world_size if reduction == "avg" else 1
            param.grad = None if joined is None else joined / divisor
        norms.append(opt.step().grad_norm)
    return Trained(values_of(model), norms, opt.state_dict())


def _plus(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """A rank without a gradient adds nothing."""
    return other if one is None else one if other is None else one + other


def sharded(
    build: Callable[[], nn.Module], loss: Loss, rule: Callable[[], optim.Rule], *, world_size: int,
    stage: int, steps: int, micro: int = 1, bucket_nbytes: int = 12_000, first_step: int = 0,
    state: dict[str, object] | None = None, reduction: GradientReduction = "avg", **more: Any,
) -> list[Trained]:  # fmt: skip
    """The same on ranks as threads; one result per rank. ``more`` is for stage 3."""

    def work(comm: Communicator, model: nn.Module) -> Trained:
        options: dict[str, Any] = {"units": units_of(model)} | more
        opt = zero.Optimizer(
            model, rule(), comm, stage=stage, bucket_nbytes=bucket_nbytes, reduction=reduction,
            **options,
        )  # fmt: skip
        if state is not None:
            opt.load_state_dict(state)
        norms = []
        for step in range(first_step, first_step + steps):
            with opt.no_sync():
                for number in range(micro - 1):
                    opt.backward(loss(model, step, comm.rank, number))
            norms.append(descend(opt, loss(model, step, comm.rank, micro - 1)).grad_norm)
        return Trained(values_of(model, opt), norms, opt.state_dict())

    return on_models(world_size, build, work)


def on_models(
    world_size: int, build: Callable[[], Any], work: Callable[..., T], **settings: Any
) -> list[T]:
    """What ``work(comm, model)`` gives on each of some ranks, which have a model of their own."""
    # Before the threads start: they share torch's generator.
    models = [build() for _ in range(world_size)]
    return run_ranks(world_size, lambda comm: work(comm, models[comm.rank]), **settings)


def descend(opt: zero.Optimizer, loss: Tensor) -> zero.StepResult:
    """One step, after which there are no gradients."""
    opt.backward(loss)
    result = opt.step()
    opt.zero_grad()
    return result


def values_of(model: nn.Module, opt: zero.Optimizer | None = None) -> dict[str, Tensor]:
    """The parameters; an optimizer of stage 3 has to make them whole."""
    with opt.whole() if opt else nullcontext():
        return {name: param.detach().clone() for name, param in model.named_parameters()}


def units_of(model: nn.Module) -> list[str]:
    """Each child of a model that has parameters: what stage 3 gathers in tests."""
    children = list(model.named_children())
    return [n for n, m in children if list(m.parameters()) and not isinstance(m, nn.ModuleList)]


def assert_equal(got: Sequence[Trained], want: Trained) -> None:
    """Bit for bit, on every rank: parameters, norms, states and step counts."""
    for rank, trained in enumerate(got):
        for name, value in want.params.items():
            assert torch.equal(trained.params[name], value), (rank, name)
        for step, (norm, expected) in enumerate(zip(trained.norms, want.norms, strict=True)):
            assert (norm is None) == (expected is None)
            assert norm is None or expected is None or torch.equal(norm, expected), (rank, step)
        states, expected_states = trained.state["state"], want.state["state"]
        assert isinstance(states, dict)
        assert isinstance(expected_states, dict)
        assert states.keys() == expected_states.keys()
        for index, entry in expected_states.items():
            for name, value in entry.items():
                assert torch.equal(states[index][name], value), (rank, index, name)
