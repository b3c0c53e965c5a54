"""``anychip operators``: what it says is so, and its stubs run as they are pasted."""

import json
from typing import Any

import pytest
import torch

import anychip
from anychip.cli import group
from anychip.dispatch.description import describe, stub
from anychip.dispatch.operator import registered
from tests.unit.dispatch.calls import DIFFERENTIABLE, PRODUCTS, SPECS, bits, call, run
from tests.unit.dispatch.specs import polynomial
from tests.unit.dispatch.tables import installation


def _pasted(source: str) -> Any:
    names: dict[str, Any] = {"__name__": "pasted"}
    exec(compile(source, "pasted", "exec"), names)
    return names["table"]


@pytest.mark.parametrize("name", SPECS)
def test_stub_of_every_operator_runs_as_it_is_pasted(name: str) -> None:
    grad = name in DIFFERENTIABLE
    with anychip.policy(pin={name: "reference"}):
        want = run(call(name, grad=grad))
    with installation() as install:
        install(_pasted(stub(SPECS[name])), alone=True)
        anychip.provenance(reset=True)
        with anychip.policy(fallback="strict"):
            got = run(call(name, grad=grad))
    if name in PRODUCTS:
        torch.testing.assert_close(got, want)
    else:
        assert bits(got) == bits(want)
    served = [r for r in anychip.provenance().rows() if r.operator == name]
    rows = [f"pasted.{name}"] + ([f"pasted.{name}_backward"] if grad else [])
    assert [r.implementation for r in served] == rows


def test_stub_of_a_third_partys_operator_finds_its_spec() -> None:
    table = _pasted(stub(polynomial("described", kind="residual").spec))
    x = torch.tensor([2.0, 3.0])
    assert [(row.operator, row.direction) for row in table] == [
        ("described", "forward"),
        ("described", "backward"),
    ]
    y, square = next(iter(table)).function(x)
    assert (y.tolist(), square.tolist()) == ([12.0, 36.0], [4.0, 9.0])


def test_operators_with_a_name_says_all_that_a_row_must_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert group.run(["operators", "dropout_add_layer_norm"]) == 0
    said = capsys.readouterr().out
    spec = SPECS["dropout_add_layer_norm"]
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in said.splitlines() if line}
    assert lines["signature"] == spec.signature
    assert lines["outputs"] == "y0, y1"
    assert lines["residuals"] == "mean (float32, x.shape[:-1]), rstd (float32, x.shape[:-1])"
    assert lines["backward"] == (
        "arguments: grad0, grad1, y1, weight, rng, rows, mean, rstd; "
        "gradients: x, residual, weight, bias; deferrable: none"
    )
    assert lines["sizes"] == "hidden, rows"
    assert lines["dtypes"] == (
        "float32 or bfloat16 or float16: x, residual, weight, bias; int64: rng, rows"
    )
    assert lines["bound"] == f"forward: {spec.bound.forward}; backward: {spec.bound.backward}"
    assert said.rstrip().endswith(stub(spec))


def test_operators_as_json_and_as_a_list_has_every_operator(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert group.run(["operators", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = {fact["name"]: fact for fact in report["operators"]}
    assert report["schema"] == 1
    assert found == {name: describe(operator.spec) for name, operator in registered().items()}
    assert (found["clip"]["writes"], found["clip"]["backward"]) == (["tensors"], None)
    assert found["linear"]["backward"]["deferrable"] == ["weight", "bias"]
    assert group.run(["operators"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == set(found)


def test_operators_with_a_wrong_name_is_wrong_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert group.run(["operators", "rms_nrm"]) == 2
    assert "no operator is named 'rms_nrm'; did you mean 'rms_norm'?" in capsys.readouterr().err
