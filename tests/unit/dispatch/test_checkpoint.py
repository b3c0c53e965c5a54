"""Activation checkpointing, plain and selective."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import anychip
from anychip import ops
from tests.unit.dispatch.calls import bits


def _weights() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((8, 16), (16,), (24, 16), (16, 12))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def _block(x: Tensor, norm: Tensor, up: Tensor, down: Tensor, rng: Tensor) -> Tensor:
    y = ops.linear(ops.rms_norm(x, norm), up)
    return x + ops.dropout(ops.linear(ops.swiglu(*y.chunk(2, -1)), down), rng, p=0.3)


def _gradients(**options: Any) -> list[Any]:
    weights, rng = _weights(), torch.tensor([7, 1 << 33])
    if options:
        y = checkpoint(_block, *weights, rng, **options)
    else:
        y = _block(*weights, rng)
    y.square().sum().backward()  # torch.autograd.grad is not allowed when re-entrant
    return bits([w.grad for w in weights])


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpoint_gives_the_gradients_bit_for_bit(reentrant: bool) -> None:
    assert _gradients(use_reentrant=reentrant) == _gradients()


@pytest.mark.parametrize("choice", ["save all", "save linear", "recompute all"])
def test_selective_checkpoint_sees_the_operators_and_keeps_the_bits(choice: str) -> None:
    seen: list[tuple[bool, str]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append((ctx.is_recompute, str(op)))
        save = choice == "save all" or (choice == "save linear" and "linear" in str(op))
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, policy)
    got = _gradients(use_reentrant=False, context_fn=context)
    assert got == _gradients()
    first = [name for again, name in seen if not again and name.startswith("anychip")]
    assert first == [
        f"anychip.{name}_forward.default"
        for name in ("rms_norm", "linear", "swiglu", "linear", "dropout")
    ]


def test_checkpoint_recomputes_the_operator_once() -> None:
    _gradients(use_reentrant=False)
    calls = {(r.operator, r.direction): r.calls for r in anychip.provenance().rows()}
    assert calls["rms_norm", "forward"] == 2
    assert calls["rms_norm", "backward"] == 1
