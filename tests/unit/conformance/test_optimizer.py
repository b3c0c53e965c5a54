"""Is the chapter's oracle of ten steps right? Compared with torch's optimizers in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anychip.conformance.chapters import optimizer
from anychip.conformance.chapters.optimizer import SECOND_GROUP, SHAPES, STEPS, SUBJECTS, Oracle


def torch_rule(name: str) -> Callable[[list[dict[str, Any]]], torch.optim.Optimizer]:
    attrs = dict(SUBJECTS[name].attrs)
    if name == "adamw":
        betas = (attrs["beta1"], attrs["beta2"])
        return lambda groups: torch.optim.AdamW(groups, betas=betas, eps=attrs["eps"])
    return lambda groups: torch.optim.SGD(groups, momentum=attrs["momentum"])


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clip"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "momentum"])
def test_oracle_of_ten_steps_gives_what_torch_gives_in_float64(name: str, clip: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=generator) for shape in SHAPES]
    params = [torch.nn.Parameter(value.double()) for value in start]
    subject, decay = SUBJECTS[name], SUBJECTS[name].attrs["weight_decay"]
    opt = torch_rule(name)(
        [{"params": params[:SECOND_GROUP], "weight_decay": decay, "lr": subject.lr},
         {"params": params[SECOND_GROUP:], "weight_decay": 0.0, "lr": subject.lr / 2}]
    )  # fmt: skip
    oracle = Oracle(subject, start)
    for step in range(STEPS):
        grads: list[Tensor | None] = [torch.randn(s, generator=generator) for s in SHAPES]
        if step == 3:
            grads[1] = None
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.double()
        norm = oracle.step(grads, subject.lr, None, clip=clip)
        if clip:
            found = torch.nn.utils.clip_grad_norm_(params, optimizer.MAX_NORM)
            assert np.isclose(float(norm.value), float(found), rtol=1e-14)
        opt.step()
    for param, known in zip(params, oracle.params, strict=True):
        # A learning rate is a float32 number for a device, and a betas' power of one in float64.
        assert np.allclose(param.detach().numpy(), known.value, rtol=1e-7, atol=1e-9)
    assert oracle.counts == [10.0, 9.0, *[10.0] * (len(SHAPES) - 2)]


def test_way_that_skips_has_an_infinity_in_one_step_only() -> None:
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer.place(params, [torch.ones(2), torch.ones(2)], 8.0, overflows=True)
    assert params[0].grad is not None
    assert params[1].grad is not None
    assert params[0].grad.tolist() == [8.0, 8.0]
    assert params[1].grad.isinf().all()
