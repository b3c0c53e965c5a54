"""The toy's rows against torch in float64, through the same calls that a user makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import anychip
from anychip import ops

Reduction = Literal["mean", "sum", "none"]
SHAPES = [(3, 8), (2, 5, 17), (1, 3), (4, 1000)]


@pytest.fixture(autouse=True)
def only_the_toy() -> Iterator[None]:
    """Every operator of a test must be served by the toy; the reference would be an error."""
    anychip.use("toy")
    anychip.provenance(reset=True)
    with anychip.policy(fallback="strict"):
        yield
    served = {row.provider for row in anychip.provenance().rows()}
    assert served == {"toy"}


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _assert_close(got: Tensor, want: Tensor, roundings: int = 8) -> None:
    """Equal up to some roundings of float32, relative to the largest value of ``want``."""
    assert got.dtype == torch.float32
    limit = roundings * 2.0**-24 * want.abs().max()
    error = (got.double() - want).abs().max()
    assert error <= limit, f"error {error:.3g}, limit {limit:.3g}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm_and_its_gradients_equal_torch_in_float64(shape: tuple[int, ...]) -> None:
    x, weight = _normal(*shape).requires_grad_(), _normal(shape[-1], seed=1).requires_grad_()
    y = ops.rms_norm(x, weight, eps=1e-5)
    grad = _normal(*shape, seed=2)
    y.backward(grad)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    want = functional.rms_norm(x64, (shape[-1],), weight64, eps=1e-5)
    want.backward(grad.double())
    _assert_close(y.detach(), want.detach())
    for got, reference in ((x.grad, x64.grad), (weight.grad, weight64.grad)):
        assert got is not None
        assert reference is not None
        _assert_close(got, reference)


# Words of Philox4x32-10 for key 0, counter 0, from the known answers of the Random123 library.
KNOWN = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


@pytest.mark.parametrize("word", range(4))
def test_dropout_mask_keeps_what_the_known_answers_say(word: int) -> None:
    rng, x = torch.tensor([0, 0]), torch.ones(4)
    just_kept, just_dropped = KNOWN[word] / 2**32, (KNOWN[word] + 1) / 2**32
    assert ops.dropout(x, rng, p=just_kept)[word] != 0
    assert ops.dropout(x, rng, p=just_dropped)[word] == 0


def test_dropout_backward_uses_the_mask_of_the_forward() -> None:
    rng, x = torch.tensor([-3, 2**40]), torch.ones(999, requires_grad=True)
    y = ops.dropout(x, rng, p=0.25)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert set(y.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_and_its_gradient_equal_torch_in_float64(
    reduction: Reduction, smoothing: float
) -> None:
    logits = (_normal(6, 33) * 4).requires_grad_()
    target = torch.tensor([0, 32, -100, 5, 5, 7])
    loss = ops.cross_entropy(logits, target, reduction=reduction, label_smoothing=smoothing)
    grad = _normal(*loss.shape, seed=3)
    loss.backward(grad)
    wide = logits.detach().double().requires_grad_()
    want = functional.cross_entropy(wide, target, reduction=reduction, label_smoothing=smoothing)
    want.backward(grad.double())
    _assert_close(loss.detach(), want.detach())
    assert logits.grad is not None
    assert wide.grad is not None
    _assert_close(logits.grad, wide.grad)


def test_cross_entropy_with_a_target_out_of_range_names_row_and_value() -> None:
    with pytest.raises(IndexError, match="from 0 to 3 or ignore_index -100, got 4 in row 1"):
        ops.cross_entropy(_normal(2, 4), torch.tensor([0, 4]))


def test_adamw_over_steps_equals_torchs_optimizer_in_float64() -> None:
    params = [_normal(3, 4), _normal(17, seed=1)]
    moments = [torch.zeros_like(p) for p in params]
    squares = [torch.zeros_like(p) for p in params]
    low = [p.to(torch.bfloat16) for p in params]
    wide = [p.double().requires_grad_() for p in params]
    optimizer = torch.optim.AdamW(wide, lr=0.01, weight_decay=0.1)
    lr, step = torch.tensor(0.01), torch.tensor(0.0)
    scale, clip, found_inf = torch.tensor(64.0), torch.tensor(0.5), torch.tensor(0.0)
    for seed in range(10):
        grads = [_normal(*p.shape, seed=seed) for p in params]
        scalars = (lr, step, scale, clip, found_inf, low)
        ops.adamw(params, grads, moments, squares, *scalars, weight_decay=0.1)
        for reference, grad in zip(wide, grads, strict=True):
            reference.grad = grad.double() / 64.0 * 0.5
        optimizer.step()
    assert step.item() == 10.0
    for param, reference, copy in zip(params, wide, low, strict=True):
        _assert_close(param, reference.detach(), roundings=100)  # ten steps of about ten
        assert torch.equal(copy, param.to(torch.bfloat16))


def test_adamw_with_found_inf_writes_nothing() -> None:
    param, grad, moment, square = (_normal(5, seed=seed) for seed in range(4))
    before = [t.clone() for t in (param, moment, square)]
    step = torch.tensor(3.0)
    lr, found_inf = torch.tensor(0.1), torch.tensor(1.0)
    ops.adamw([param], [grad], [moment], [square], lr, step, found_inf=found_inf)
    for now, then in zip((param, moment, square), before, strict=True):
        assert torch.equal(now, then)
    assert step.item() == 3.0
