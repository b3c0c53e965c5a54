"""Operators that write: seen by autograd, refused before a write, exact about what they touch."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import anychip
from anychip import FallbackError, OperatorTable, OverlapError, ops
from tests.unit.dispatch.calls import SPECS, WRITING, Call, bits, call, tensors
from tests.unit.dispatch.tables import Function, Install

ONE = torch.tensor(1.0)


def _written(made: Call) -> list[Tensor]:
    schema = torch._C.parse_schema(f"x::y{made.spec.signature}")
    marked = [a.alias_info is not None for a in schema.arguments]
    args = [a for a, mark in zip(made.args, marked, strict=False) if mark]
    return tensors(args)


def _through(made: Call, door: str) -> Callable[[], Any]:
    return made if door == "short cut" else lambda: made.door()(*made.args, **made.attrs)


@pytest.fixture(params=["short cut", "library"])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clip(door: str) -> Function:
    return ops.clip if door == "short cut" else torch.ops.anychip.clip


def test_versions_rise_also_after_an_error_within_the_row(clip: Function, install: Install) -> None:
    table = OperatorTable()

    @table.forward("clip")
    def row(written: list[Tensor], norm: Tensor, *, max_norm: float) -> None:
        written[0].detach().fill_(5.0)
        raise RuntimeError("the driver says no")

    install(table)
    x, y = torch.ones(3), torch.ones(3)
    versions = x._version, y._version
    with pytest.raises(RuntimeError, match="the driver says no"):
        clip([x, y], ONE)
    assert x._version > versions[0]
    assert y._version > versions[1]


@pytest.mark.parametrize("name", WRITING)
def test_backward_after_a_write_to_a_saved_tensor_raises(name: str, door: str) -> None:
    made = call(name, grad=False)
    leaf = torch.ones((), requires_grad=True)
    losses = [(leaf * t).sum() for t in _written(made)]
    _through(made, door)()
    for loss in losses:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_write_to_a_parameter_is_allowed_and_leaves_it_a_leaf(clip: Function) -> None:
    p = Parameter(torch.full((3,), 2.0))
    clip([p], torch.tensor(4.0), max_norm=1.0)
    assert p.is_leaf
    assert p.requires_grad
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.5), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("context", ["plain", "autocast"])
def test_write_to_a_result_of_a_recorded_operation_is_refused(clip: Function, context: str) -> None:
    leaf = torch.ones(3, requires_grad=True)
    result = leaf * 2
    with torch.autocast("cpu", enabled=context == "autocast"):
        with pytest.raises(RuntimeError, match=r"clip writes tensors\[1\] in place"):
            clip([torch.ones(3), result], torch.tensor(4.0))
        assert torch.equal(result, torch.full((3,), 2.0))
        with torch.no_grad():
            clip([result], torch.tensor(4.0))


def test_write_under_inference_mode_is_done(clip: Function) -> None:
    outside = torch.ones(3)
    with torch.inference_mode():
        inside = torch.ones(3)
        clip([outside, inside], torch.tensor(2.0))
    assert torch.equal(inside, outside)
    assert torch.equal(inside, torch.full((3,), 1.0 / (2.0 + 1e-6)))


# overlap


def _overlaps() -> dict[str, tuple[Callable[..., Any], list[Any], str]]:
    base = torch.arange(12.0)
    even, odd = base[0::2], base[1::2]
    x = torch.ones(4)
    moments = [torch.zeros(4)], [torch.zeros(4)]
    return {
        "same tensor twice": (ops.clip, [[x, x], ONE], "tensors[0] and tensors[1]"),
        "same storage twice": (ops.clip, [[x, x.view(2, 2)], ONE], "tensors[0] and tensors[1]"),
        "partial": (ops.clip, [[base[:6], base[5:]], ONE], "tensors[0] and tensors[1]"),
        "one inside of the other": (ops.clip, [[base[3:4], base], ONE],
                                    "tensors[1] and tensors[0]"),
        "interleaved": (ops.clip, [[even, odd], ONE], "tensors[0] and tensors[1]"),
        "written scalar is read": (ops.clip, [[base], base[3]], "tensors[0] and norm"),
        "other dtype": (ops.clip, [[x, x.view(torch.bfloat16)], ONE], "tensors[0] and tensors[1]"),
        "gradient is the parameter": (ops.adamw, [[x], [x], *moments, ONE, torch.tensor(0.0)],
                                      "params[0] and grads[0]"),
        "step is lr": (ops.adamw, [[x], [torch.ones(4)], *moments, ONE, ONE], "lr and step"),
        "moments share": (ops.adamw,
                          [[x], [torch.ones(4)], moments[0], moments[0], ONE, torch.tensor(0.0)],
                          "exp_avgs[0] and exp_avg_sqs[0]"),
        "copy is the parameter": (
            ops.adamw,
            [[x], [torch.ones(4)], *moments, ONE, torch.tensor(0.0), None, None, None, [x]],
            "params[0] and low_precision[0]",
        ),
        "found_inf is scale": (ops.unscale_and_check, [[x], ONE, ONE], "scale and found_inf"),
        "expanded": (ops.clip, [[torch.ones(1).expand(5)], ONE], "tensors[0]"),
    }  # fmt: skip


@pytest.mark.parametrize("label", _overlaps())
def test_overlap_is_refused_before_any_write(label: str, door: str) -> None:
    operator, args, named = _overlaps()[label]
    function = operator
    if door == "library":
        function = getattr(torch.ops.anychip, operator.spec.name)
    before = bits(args)
    with pytest.raises(OverlapError) as caught:
        function(*args)
    words = re.findall(r"[a-z_]+\[\d\]|lr|step|scale|found_inf|norm", str(caught.value))
    assert set(named.split(" and ")) <= set(words)
    assert "Nothing was written" in str(caught.value)
    assert bits(args) == before
    assert all(t._version == 0 for t in tensors(args) if t is not ONE)


def test_overlap_with_a_long_read_is_found_behind_a_short_one_inside_of_it() -> None:
    base = torch.ones(100)
    params, moments = [torch.ones(100), base[50:52]], [torch.zeros(100), torch.zeros(2)]
    squares = [torch.zeros(100), torch.zeros(2)]
    before = bits([base, params, moments, squares])
    with pytest.raises(OverlapError, match=r"grads\[0\] and params\[1\] share memory"):
        ops.adamw(params, [base, base[1:3]], moments, squares, ONE, torch.tensor(0.0))
    assert bits([base, params, moments, squares]) == before


def test_neighbours_in_one_storage_and_empty_tensors_are_no_overlap() -> None:
    base = torch.ones(10)
    ops.clip([base[:5], base[5:], base[3:3], base[3:3]], torch.tensor(2.0))
    assert torch.equal(base, torch.full((10,), 1.0 / (2.0 + 1e-6)))


# refused before a write


@pytest.mark.parametrize("name", WRITING)
def test_strict_policy_without_a_row_writes_nothing(name: str, door: str, install: Install) -> None:
    install(alone=True)
    made = call(name, grad=False)
    before = bits(list(made.args))
    with (
        anychip.policy(fallback="strict"),
        pytest.raises(FallbackError, match=f"{name}: the policy is strict.*nothing was written"),
    ):
        _through(made, door)()
    assert bits(list(made.args)) == before
    assert all(t._version == 0 for t in _written(made))


def test_strict_policy_with_a_row_that_refuses_the_call_writes_nothing(
    clip: Function, install: Install
) -> None:
    table = OperatorTable()
    table.forward("clip", limits={"numel": range(0, 4)})(SPECS["clip"].forward)
    install(table, alone=True)
    small, large = torch.ones(3), torch.ones(4)
    with anychip.policy(fallback="strict"):
        clip([small], torch.tensor(2.0))
        with pytest.raises(FallbackError, match="numel must be in 0 to 3, got 4"):
            clip([large], torch.tensor(2.0))
    assert torch.equal(large, torch.ones(4))
    assert large._version == 0
