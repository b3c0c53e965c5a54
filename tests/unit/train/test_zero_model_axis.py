"""A model whose parameters lie on several ranks: one norm, one answer to an overflow."""

import pytest
import torch
from torch import Tensor, nn

import anychip
from anychip.comm import alone
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator
from anychip.train import optim, precision, zero
from anychip.train.precision import LossScaling

SHAPES = ((140, 60), (60,), (9000,), (), (70, 95), (12048,))
"""The first half on one rank, the second on another; the order of groups mixes them."""


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def groups(params: list[nn.Parameter]) -> list[dict[str, object]]:
    found = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in found if group["params"]]


def rule() -> optim.Rule:
    return optim.chain(optim.clip_by_global_norm(0.7), optim.adamw(1e-2))


def whole(num_replicas: int, steps: int) -> tuple[list[Tensor], list[Tensor | None]]:
    params, norms = parameters(), []
    opt = zero.Optimizer(groups(params), rule(), alone())
    for step in range(steps):
        given = [gradients(step, replica) for replica in range(num_replicas)]
        for index, param in enumerate(params):
            total = given[0][index]
            for other in given[1:]:
                total = total + other[index]
            param.grad = total / num_replicas
        norms.append(opt.step().grad_norm)
    return [p.detach() for p in params], norms


@pytest.mark.parametrize(("num_replicas", "stage"), [
    (1, 0), (2, 0), (2, 1), (2, 2), (3, 2),
], ids=["pipeline", "data-x-pipeline", "stage1", "stage2", "three-replicas"])  # fmt: skip
def test_norm_of_a_model_on_two_ranks_has_the_bits_of_one(num_replicas: int, stage: int) -> None:
    def work(world: Communicator) -> tuple[list[Tensor], list[Tensor | None]]:
        # Ranks 0, 1 are the stages of replica 0, and so on.
        replica, part = divmod(world.rank, 2)
        pairs = [[2 * r, 2 * r + 1] for r in range(num_replicas)]
        replicas = [[2 * r + p for r in range(num_replicas)] for p in (0, 1)]
        model_comm = world.split(pairs, name="pipeline")
        comm = world.split(replicas, name="data")
        mine = slice(0, 3) if part == 0 else slice(3, 6)
        params, norms = parameters()[mine], []
        opt = zero.Optimizer(groups(params), rule(), comm, stage=stage, model_comm=model_comm)
        for step in range(3):
            for param, grad in zip(params, gradients(step, replica)[mine], strict=True):
                param.grad = grad
            norms.append(opt.step().grad_norm)
            opt.zero_grad()
        return [p.detach() for p in params], norms

    params, norms = whole(num_replicas, steps=3)
    for rank, (got, got_norms) in enumerate(run_ranks(2 * num_replicas, work)):
        want = params[:3] if rank % 2 == 0 else params[3:]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        for a, b in zip(got_norms, norms, strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


def test_norm_does_not_depend_on_the_order_of_parameters() -> None:
    """A pipeline has its parameters in another order than one rank: stage by stage, then groups."""
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 9000, (40, 9), generator=generator).tolist()
    in_order, reordered = [], []
    for numels in sizes:
        params = [nn.Parameter(torch.zeros(numel)) for numel in numels]
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        for order, norms in ((params, in_order), (params[5:] + params[:5], reordered)):
            norms.append(zero.Optimizer(order, rule(), alone()).step().grad_norm)
    assert all(torch.equal(a, b) for a, b in zip(in_order, reordered, strict=True))


@pytest.mark.parametrize("offload", [{}, {"states": "host"}], ids=["device", "host"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tied_parameter_on_several_ranks_counts_once_in_the_norm(
    ranks: int, offload: dict[str, str]
) -> None:
    """As of a dense part beside experts, of which each rank has others."""

    def work(comm: Communicator) -> Tensor | None:
        tied, own = parameters()[0], parameters()[1 + comm.rank]
        opt = zero.Optimizer(
            [tied, own], rule(), alone(), model_comm=comm,
            duplicates=[tied] if comm.rank else [], offload=offload, chunk_nbytes=4096,
        )  # fmt: skip
        tied.grad, own.grad = gradients(0, 0)[0], gradients(0, 0)[1 + comm.rank]
        return opt.step().grad_norm

    params = parameters()[: 1 + ranks]
    opt = zero.Optimizer(params, rule(), alone())
    for param, grad in zip(params, gradients(0, 0), strict=False):
        param.grad = grad
    want = opt.step().grad_norm
    assert want is not None
    for norm in run_ranks(ranks, work):
        assert norm is not None
        assert torch.equal(norm, want)


def test_duplicate_that_is_not_trained_here_is_refused() -> None:
    with pytest.raises(ValueError, match="1 parameters that are not trained here"):
        zero.Optimizer(parameters(), rule(), alone(), duplicates=[nn.Parameter(torch.ones(2))])


def test_overflow_in_one_stage_skips_the_step_in_all() -> None:
    policy = precision.policy("fp16", anychip.backend(), loss_scaling=LossScaling(init_scale=8.0))

    def work(comm: Communicator) -> zero.StepResult:
        param = nn.Parameter(torch.ones(5))
        opt = zero.Optimizer([param], optim.sgd(1.0), alone(), precision=policy, model_comm=comm)
        param.grad = torch.full((5,), torch.inf if comm.rank == 2 else 1.0)
        result = opt.step()
        assert torch.equal(param, torch.ones(5))
        return result

    assert run_ranks(3, work) == [zero.StepResult(None, 0.0, 8.0, True)] * 3
