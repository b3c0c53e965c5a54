"""Clipping as torch's loops do it, between backward and step: is it the rule's, at every stage?"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anychip
import anychip.comm
from anychip.comm.threads import run_ranks
from anychip.contract import Communicator, UnsupportedError
from anychip.train import optim, zero

SEEDS, MAX_NORM = range(3), 0.05
OPTIONS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"stage": stage} for stage in range(4)},
    "masters": {"stage": 2, "param_dtype": torch.bfloat16},
    "states on the host": {"stage": 2, "offload": {"states": "host"}},
}


@pytest.fixture(autouse=True)
def cpu() -> None:
    anychip.use("cpu")


def make() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(7, 31), nn.Linear(31, 5)])
    return nn.Sequential(*layers, nn.Linear(5, 3))


def train(
    comm: Communicator, models: list[nn.Module], by: str, options: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Norms and, in the end, parameters of steps of two batches each."""
    model = models[comm.rank]
    clip = [optim.clip_by_global_norm(MAX_NORM)] if by == "rule" else []
    opt = zero.Optimizer(model, optim.chain(*clip, optim.sgd(0.5)), comm, **options)
    norms: list[Any] = []
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(10 * seed + comm.rank)
        for last in (False, True):
            x = torch.randn(4, 7, generator=generator).to(next(model.parameters()).dtype)
            loss = model(x).float().square().mean()
            if by == "rule":
                with opt.reducing() if last else opt.no_sync():
                    loss.backward()
            else:
                loss.backward()  # as in a loop that knows torch alone: sums of this rank
        norm = None if by == "rule" else opt.clip_grad_norm_(MAX_NORM)
        result = opt.step()
        norms.append(result.grad_norm if norm is None else norm)
        opt.zero_grad()
    with opt.whole():
        return norms, [param.detach().clone().float() for param in model.parameters()]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_clip_is_the_rule_s_by_the_norm_of_all_ranks(ranks: int, options: dict[str, Any]) -> None:
    """Norms bit for bit. Gradients are rounded once more, each step by 2^-24 of them; weights of
    bfloat16 may then round to the next one, 2^-8.
    """
    found = {}
    for by in ("rule", "method"):
        models = [make() for _ in range(ranks)]
        work = partial(train, models=models, by=by, options=options)
        found[by] = run_ranks(ranks, work)
    tolerance = 2**-8 if "param_dtype" in options else 1e-6
    for (norms, params), (want_norms, want) in zip(found["method"], found["rule"], strict=True):
        assert len(norms) == len(want_norms) == len(SEEDS)
        assert norms[0].equal(want_norms[0])
        assert norms[0] > 2 * MAX_NORM
        for got, expected in zip(params, want, strict=True):
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_infinite_bound_measures_and_changes_nothing() -> None:
    model = make()
    model(torch.ones(2, 7)).sum().backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    opt = zero.Optimizer(model, optim.sgd(0.1), anychip.comm.alone())
    norm = opt.clip_grad_norm_(float("inf"))
    want = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]).double())
    assert norm.item() == pytest.approx(want.item(), rel=2**-23)
    after = [param.grad for param in model.parameters()]
    assert all(grad is not None and grad.equal(b) for grad, b in zip(after, before, strict=True))


def test_without_gradients_there_is_nothing_to_clip() -> None:
    opt = zero.Optimizer(make(), optim.sgd(0.1), anychip.comm.alone())
    with pytest.raises(RuntimeError, match="no parameter has a gradient"):
        opt.clip_grad_norm_(1.0)


def test_gradients_that_are_elsewhere_are_clipped_by_the_rule() -> None:
    model = make()
    rule, where = optim.sgd(0.1), {"gradients": "host"}
    opt = zero.Optimizer(model, rule, anychip.comm.alone(), stage=2, offload=where)
    opt.backward(model(torch.ones(2, 7)).sum())
    with pytest.raises(UnsupportedError, match="clip_by_global_norm"):
        opt.clip_grad_norm_(1.0)
