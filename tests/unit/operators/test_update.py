"""Operators over lists against numpy in float64: adamw, clip, unscale_and_check, l2_norm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anychip
from anychip import ops
from tests.unit.dispatch.calls import DTYPES, bits
from tests.unit.operators.exactness import assert_close

F32 = torch.float32
SHAPES = ((33,), (), (0,), (4, 5), (1000,))
NAMES = ("adamw", "clip", "unscale_and_check", "l2_norm")


@pytest.fixture(autouse=True, params=["cpu", "reference"])
def pin(request: pytest.FixtureRequest) -> Iterator[str]:
    pins = dict.fromkeys(NAMES, "reference") if request.param == "reference" else {}
    with anychip.policy(pin=pins):
        yield request.param


def _tensors(dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) * scale).to(dtype) for s in SHAPES]


def _scalar(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value)


def _float32(value: float) -> float:
    return float(np.float32(value))


def _adamw64(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    lr: float,
    step: float,
    factor: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loshchilov and Hutter 2019, algorithm 2, in float64."""
    p, g, m, v = (t.double() for t in (p, g, m, v))
    g = g * factor
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    p = p * (1 - lr * weight_decay)
    step_size = lr / (1 - beta1**step)
    return p - step_size * m / ((v / (1 - beta2**step)).sqrt() + eps), m, v


@pytest.mark.parametrize("step", [0.0, 3.0, 10_000.0])
@pytest.mark.parametrize(
    ("scale", "clip", "found"),
    [(None, None, None), (1024.0, 0.25, 0.0), (None, 0.5, None)],
    ids=["plain", "all options", "clip"],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adamw_equals_float64(
    dtype: torch.dtype, scale: float | None, clip: float | None, found: float | None, step: float
) -> None:
    params, grads = _tensors(), _tensors(dtype, seed=1, scale=scale or 1.0)
    firsts, seconds = _tensors(seed=2, scale=0.1), [t.square() for t in _tensors(seed=3)]
    low = [p.to(torch.bfloat16) for p in params] if scale else None
    attrs = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    factor = (clip or 1.0) / (scale or 1.0)
    wants = [
        _adamw64(*given, lr=_float32(1e-2), step=step + 1, factor=factor, **attrs)
        for given in zip(params, grads, firsts, seconds, strict=True)
    ]
    count = torch.tensor(step)
    options = (_scalar(scale), _scalar(clip), _scalar(found))
    ops.adamw(params, grads, firsts, seconds, torch.tensor(1e-2), count, *options, low, **attrs)
    assert count.item() == step + 1
    for got, want in zip(zip(params, firsts, seconds, strict=True), wants, strict=True):
        for one, other in zip(got, want, strict=True):
            # 1 - beta^t loses log2(1 / (1 - beta)) bits of float32 at the first step.
            assert_close(one, other, 14 + 2 / (1 - attrs["beta2"]))
    if low is not None:
        assert bits(low) == bits([p.to(torch.bfloat16) for p in params])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adamw_of_16_bit_params_rounds_once(dtype: torch.dtype) -> None:
    params, grads = _tensors(dtype), _tensors(seed=1)
    firsts, seconds = _tensors(seed=2, scale=0.1), [t.square() for t in _tensors(seed=3)]
    wide = [p.float() for p in params]
    others = [t.clone() for t in firsts], [t.clone() for t in seconds]
    ops.adamw(params, grads, firsts, seconds, torch.tensor(1e-2), torch.tensor(2.0))
    ops.adamw(wide, grads, *others, torch.tensor(1e-2), torch.tensor(2.0))
    assert bits(params) == bits([w.to(dtype) for w in wide])


@pytest.mark.parametrize("found", [1.0, -2.0, float("nan"), float("inf")])
def test_adamw_with_found_inf_writes_nothing(found: float) -> None:
    args: list[Any] = [_tensors(seed=i) for i in range(4)]
    low, step = _tensors(torch.bfloat16, seed=9), torch.tensor(5.0)
    before = bits([args, low, step])
    options = (torch.tensor(2.0), None, torch.tensor(found), low)
    ops.adamw(*args, torch.tensor(1e-2), step, *options)
    assert bits([args, low, step]) == before


def test_adamw_of_no_tensors_still_counts_the_step() -> None:
    step = torch.tensor(4.0)
    ops.adamw([], [], [], [], torch.tensor(1e-2), step)
    assert step.item() == 5.0


def test_adamw_empty_low_precision_is_none() -> None:
    found = []
    for low in (None, []):
        args: list[Any] = [_tensors(seed=i) for i in range(3)] + [[t.square() for t in _tensors()]]
        ops.adamw(*args, torch.tensor(1e-2), torch.tensor(0.0), None, None, None, low)
        found.append(bits(args))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_norm_equals_float64(dtype: torch.dtype) -> None:
    tensors = _tensors(dtype)
    got = ops.l2_norm(tensors)
    want = torch.cat([t.double().flatten() for t in tensors]).norm()
    assert got.dtype == F32
    assert_close(got, want, 3 + 1058**0.5)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_l2_norm_of_what_is_not_finite_is_not_finite(bad: float) -> None:
    for place in (0, 500, 999):
        x = torch.ones(1000)
        x[place] = bad
        norm = ops.l2_norm([torch.ones(3), x])
        assert norm.isnan() if bad != bad else norm.isposinf()


@pytest.mark.parametrize("norm", [0.0, 0.5, 1.0, 4.0, float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clip_equals_float64(dtype: torch.dtype, norm: float) -> None:
    tensors = _tensors(dtype)
    wants = [t.double() * min(1.0, 0.75 / (norm + 1e-6)) for t in tensors]
    ops.clip(tensors, torch.tensor(norm), max_norm=0.75)
    for got, want in zip(tensors, wants, strict=True):
        assert_close(got, want, 4)


def test_clip_of_a_norm_within_the_limit_changes_no_bit() -> None:
    tensors = _tensors()
    before = bits(tensors)
    ops.clip(tensors, torch.tensor(0.5), max_norm=1.0)
    assert bits(tensors) == before


def test_clip_by_a_norm_that_is_nan_leaves_nothing_that_looks_right() -> None:
    x = torch.ones(50)
    ops.clip([x], torch.tensor(float("nan")))
    assert x.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_equals_float64(dtype: torch.dtype) -> None:
    grads, found = _tensors(dtype), torch.tensor(0.0)
    wants = [g.double() / 3.0 for g in grads]
    ops.unscale_and_check(grads, torch.tensor(3.0), found)
    for got, want in zip(grads, wants, strict=True):
        assert_close(got, want, 1)
    assert found.item() == 0.0


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 7, 16, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unscale_finds_what_is_not_finite(dtype: torch.dtype, place: int, bad: float) -> None:
    grads, found = _tensors(dtype), torch.tensor(0.0)
    grads[-1][place] = bad
    ops.unscale_and_check(grads, torch.tensor(2.0), found)
    assert found.item() == 1.0


def test_unscale_counts_an_overflow_by_the_division() -> None:
    found = torch.tensor(0.0)
    ops.unscale_and_check([torch.full((3,), 1000.0).half()], torch.tensor(1e-3), found)
    assert found.item() == 1.0


@pytest.mark.parametrize("before", [1.0, 2.0, float("nan")])
def test_unscale_never_takes_found_inf_back(before: float) -> None:
    found = torch.tensor(before)
    ops.unscale_and_check([torch.ones(3)], torch.tensor(2.0), found)
    assert bits(found) == bits(torch.tensor(before))
