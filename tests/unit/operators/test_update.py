"""Operators over lists against their equations in float64: update rules, clip, unscale, l2_norm."""

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
NAMES = ("adamw", "sgd", "lion", "lamb", "clip", "unscale_and_check", "l2_norm")


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


@pytest.mark.grid
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


# sgd, lion, lamb


OPTIONS = pytest.mark.parametrize(
    ("scale", "clip", "found"),
    [(None, None, None), (1024.0, 0.25, 0.0), (None, 0.3, None)],
    ids=["plain", "all options", "clip"],
)
SGD: dict[str, dict[str, Any]] = {
    "plain": {}, "decay": {"weight_decay": 0.1}, "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "decoupled": {"momentum": 0.5, "weight_decay": 2.0, "decoupled": True},
}  # fmt: skip


def _sgd64(p: Tensor, g: Tensor, b: Tensor, lr: float, attrs: dict[str, Any]) -> list[Tensor]:
    decay, momentum = attrs.get("weight_decay", 0.0), attrs.get("momentum", 0.0)
    coupled = 0.0 if attrs.get("decoupled") else decay
    g = g + coupled * p
    b = momentum * b + g
    step = g + momentum * b if attrs.get("nesterov") else b
    return [p - lr * (step + (decay - coupled) * p), b]


@pytest.mark.grid
@OPTIONS
@pytest.mark.parametrize("label", SGD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sgd_equals_float64(
    dtype: torch.dtype, label: str, scale: float | None, clip: float | None, found: float | None
) -> None:
    attrs = SGD[label]
    params, grads, buffers = _tensors(), _tensors(dtype, 1, scale or 1.0), _tensors(seed=2)
    low = [p.to(torch.bfloat16) for p in params] if scale else None
    factor = _float32(clip or 1.0) / (scale or 1.0)
    wants = [
        _sgd64(p.double(), g.double() * factor, b.double(), _float32(1e-2), attrs)
        for p, g, b in zip(params, grads, buffers, strict=True)
    ]
    count, kept = torch.tensor(4.0), buffers if attrs.get("momentum") else []
    options = (_scalar(scale), _scalar(clip), _scalar(found))
    ops.sgd(params, grads, kept, torch.tensor(1e-2), count, *options, low, **attrs)
    assert count.item() == 5.0
    for index, (want_p, want_b) in enumerate(wants):
        assert_close(params[index], want_p, 12)
        if kept:
            assert_close(kept[index], want_b, 8)
    if low is not None:
        assert bits(low) == bits([p.to(torch.bfloat16) for p in params])


@OPTIONS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lion_equals_float64(
    dtype: torch.dtype, scale: float | None, clip: float | None, found: float | None
) -> None:
    params, grads, moments = _tensors(), _tensors(dtype, 1, scale or 1.0), _tensors(seed=2)
    factor, lr = _float32(clip or 1.0) / (scale or 1.0), _float32(1e-2)
    low = [p.to(torch.float16) for p in params] if scale else None
    wants = []
    for p, g, m in zip(params, grads, moments, strict=True):
        p, g, m = p.double(), g.double() * factor, m.double()
        average = 0.9 * m + 0.1 * g
        # None of these is so close to 0 that float32 could get another sign.
        assert not average.numel() or average.abs().min() > 1e-6
        wants.append((p - lr * (average.sign() + 0.1 * p), 0.99 * m + 0.01 * g))
    count, options = torch.tensor(4.0), (_scalar(scale), _scalar(clip), _scalar(found))
    ops.lion(params, grads, moments, torch.tensor(1e-2), count, *options, low, weight_decay=0.1)
    assert count.item() == 5.0
    for p, m, (want_p, want_m) in zip(params, moments, wants, strict=True):
        assert_close(p, want_p, 6)
        assert_close(m, want_m, 6)
    if low is not None:
        assert bits(low) == bits([p.to(torch.float16) for p in params])


def test_lion_moves_by_lr_or_not_at_all() -> None:
    param, moment = torch.zeros(3), torch.zeros(3)
    grad = torch.tensor([1e-30, 0.0, -1e30])
    ops.lion([param], [grad], [moment], torch.tensor(0.5), torch.tensor(0.0))
    assert param.tolist() == [-0.5, 0.0, 0.5]


def _lamb64(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, count: float
) -> tuple[Tensor, Tensor, Tensor]:
    """You et al. 2019, algorithm 2, in float64."""
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    u = (m / (1 - 0.9**count)) / ((v / (1 - 0.99**count)).sqrt() + 1e-6) + 0.1 * p
    trust = p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0
    return p - lr * trust * u, m, v


@pytest.mark.grid
@OPTIONS
@pytest.mark.parametrize("zero", ["neither", "params", "steps"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lamb_equals_float64(
    dtype: torch.dtype, zero: str, scale: float | None, clip: float | None, found: float | None
) -> None:
    params, grads = _tensors(), _tensors(dtype, 1, scale or 1.0)
    firsts, seconds = _tensors(seed=2, scale=0.1), [t.square() for t in _tensors(seed=3)]
    for index, tensors in enumerate(zip(params, grads, firsts, seconds, strict=True)):
        if zero != "neither" and index % 2 == 0:
            for tensor in tensors[:1] if zero == "params" else tensors:
                tensor.zero_()
    factor, lr = _float32(clip or 1.0) / (scale or 1.0), _float32(1e-2)
    wants = [
        _lamb64(p.double(), g.double() * factor, m.double(), v.double(), lr, 4.0)
        for p, g, m, v in zip(params, grads, firsts, seconds, strict=True)
    ]
    attrs = {"beta2": 0.99, "weight_decay": 0.1}
    count, options = torch.tensor(3.0), (_scalar(scale), _scalar(clip), _scalar(found))
    ops.lamb(params, grads, firsts, seconds, torch.tensor(1e-2), count, *options, **attrs)
    assert count.item() == 4.0
    for got, want in zip(zip(params, firsts, seconds, strict=True), wants, strict=True):
        for one, other in zip(got, want, strict=True):
            # 1 - beta^t loses bits, and the norms of up to 1000 elements add theirs.
            assert_close(one, other, 60 + 2 / 0.01)


def test_lamb_takes_the_trust_that_it_is_given() -> None:
    found = []
    for trust in (None, torch.ones(1), torch.tensor([3.0])):
        param, zeros = torch.ones(4), [torch.zeros(4), torch.zeros(4)]
        args = ([param], [torch.ones(4)], zeros[:1], zeros[1:], torch.tensor(0.5))
        ops.lamb(
            *args, torch.tensor(0.0), trust=trust, beta1=0.5, beta2=0.5, eps=0.0, weight_decay=0.0
        )
        found.append(param)
    # The first step of Adam is 1, so that ||w|| / ||u|| is 1 too.
    assert_close(found[0], found[1].double(), 8)
    assert_close(found[2], torch.full((4,), -0.5).double(), 40)


@pytest.mark.parametrize("found", [1.0, -2.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["sgd", "lion", "lamb"])
def test_rule_with_found_inf_writes_nothing(name: str, found: float) -> None:
    lists: list[Any] = [_tensors(seed=i) for i in range({"sgd": 3, "lion": 3, "lamb": 4}[name])]
    lists[1][0].fill_(float("nan"))
    low, step = _tensors(torch.bfloat16, seed=9), torch.tensor(5.0)
    before = bits([lists, low, step])
    options = (torch.tensor(2.0), None, torch.tensor(found), low)
    attrs = {"momentum": 0.9} if name == "sgd" else {}
    getattr(ops, name)(*lists, torch.tensor(1e-2), step, *options, **attrs)
    assert bits([lists, low, step]) == before


@pytest.mark.parametrize("name", ["sgd", "lion", "lamb"])
def test_rule_of_16_bit_params_rounds_once(name: str) -> None:
    count = {"sgd": 2, "lion": 3, "lamb": 4}[name]
    lists: list[Any] = [_tensors(seed=i) for i in range(count)]
    lists[3:] = [[t.square() for t in tensors] for tensors in lists[3:]]
    lists[0] = [p.bfloat16() for p in lists[0]]
    wide = [[t.clone() for t in tensors] for tensors in lists]
    wide[0] = [p.float() for p in wide[0]]
    for given in (lists, wide):
        rest = [[]] if name == "sgd" else []
        getattr(ops, name)(*given, *rest, torch.tensor(1e-2), torch.tensor(2.0))
    assert bits(lists[0]) == bits([p.bfloat16() for p in wide[0]])


RULES: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (3, {"momentum": 0.9}),
    "sgd-nesterov": (3, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd-decoupled": (3, {"momentum": 0.9, "weight_decay": 0.1, "decoupled": True}),
    "lion": (3, {"weight_decay": 0.1}),
    "lamb": (4, {}),
}
"""Lists of tensors, and attributes."""


def _moved_by(label: str, pinned: str) -> list[list[Tensor]]:
    """The lists after a step of tensors of one chunk of a row, of several, and of none."""
    count, attrs = RULES[label]
    generator = torch.Generator().manual_seed(3)
    sizes = (0, 5, 1 << 14, (1 << 17) + 1, 300_001)
    lists = [[torch.randn(n, generator=generator) for n in sizes] for _ in range(count)]
    lists[3:] = [[v.square() for v in tensors] for tensors in lists[3:]]
    name = label.split("-")[0]
    scalars = (1e-2, 2.0, 3.0, 0.3)
    with anychip.policy(pin={name: pinned, "lamb_partials": pinned}):
        getattr(ops, name)(*lists, *map(torch.tensor, scalars), **attrs)
    return lists


@pytest.mark.parametrize("label", [name for name in RULES if name != "lamb"])
def test_rule_has_the_same_bits_whatever_serves_it(label: str) -> None:
    assert bits(_moved_by(label, "cpu")) == bits(_moved_by(label, "reference"))


def test_lamb_differs_from_its_reference_by_the_square_root_alone() -> None:
    """torch's own root is that of a library, which need not be the nearest number."""
    got, want = _moved_by("lamb", "cpu"), _moved_by("lamb", "reference")
    assert bits(got[1:]) == bits(want[1:])
    for one, other in zip(got[0], want[0], strict=True):
        assert_close(one, other.double(), 16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda one: ops.sgd([one], [one + 1], [one + 2], *_fixed()),
            "must be empty when momentum",
        ),
        (
            lambda one: ops.sgd([one], [one + 1], [], *_fixed(), momentum=0.9),
            r"momentum_buffers must be as long as params \(1\), got 0",
        ),
        (lambda one: ops.sgd([one], [one + 1], [], *_fixed(), nesterov=True), "nesterov needs"),
        (
            lambda one: ops.lion([one], [one + 1], [one + 2], *_fixed(), beta1=1.0),
            "beta1 must be at least 0 and below 1, got 1.0",
        ),
        (
            lambda one: ops.lamb(
                [one], [one + 1], [one + 2], [one + 3], *_fixed(), trust=torch.ones(2)
            ),
            r"trust must have one entry per tensor, shape \(1,\), got \(2,\)",
        ),
    ],
    ids=["buffers", "no-buffers", "nesterov", "beta1", "trust"],
)
def test_rule_with_wrong_arguments_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3))


def _fixed() -> tuple[Tensor, Tensor]:
    return torch.tensor(0.1), torch.tensor(0.0)


# norm, clip, unscale


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


@pytest.mark.grid
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
