"""An operator says which dtypes each argument takes: bfloat16 rows, an 8-bit weight, a scale."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip
from anychip import FallbackError, OperatorTable, conformance
from anychip.contract import Bound, Sample, SampleMaker
from anychip.dispatch.description import describe
from anychip.runtime import table_faults
from tests.unit.dispatch.specs import polynomial
from tests.unit.dispatch.tables import Install

BF16, F32, E4M3, E5M2 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


def _forward(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return (x.float() @ weight.float().t()) * scale.float()


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, *, needs: tuple[bool]
) -> tuple[Tensor]:
    return (((grad.float() * scale.float()) @ weight.float()).to(x.dtype),)


def _samples(maker: SampleMaker) -> Iterator[Sample]:
    for rows, inputs, outputs in ((3, 5, 2), (7, 33, 4)):
        weight = maker.normal(outputs, inputs, dtype=E4M3)
        yield Sample((maker.normal(rows, inputs), weight, maker.scalar(0.25)), {}, f"{rows}")


@pytest.fixture
def scaled() -> Any:
    return polynomial(
        "scaled_linear", namespace="narrow",
        signature="(Tensor x, Tensor weight, Tensor scale) -> Tensor",
        forward=_forward, backward=_backward,
        fake=lambda x, weight, scale: x.new_empty((x.shape[0], weight.shape[0]), dtype=F32),
        saved=("x", "weight", "scale"), sizes=None,
        fixed_dtypes={"weight": ("float8_e4m3fn", "float8_e5m2"), "scale": "float32"},
        free_dtypes=("bfloat16",), autocast="lower", samples=_samples,
        bound=Bound(2, 2, lambda x, *_: x.shape[1]),
    )  # fmt: skip


def _args(x: torch.dtype = BF16, weight: torch.dtype = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(*shape, generator=generator) for shape in ((4, 6), (3, 6)))
    return next(made).to(x), next(made).to(weight), torch.tensor(0.5)


@pytest.mark.parametrize("door", ["short cut", "library"])
def test_argument_takes_its_own_dtypes_and_no_others(scaled: Any, door: str) -> None:
    call = scaled if door == "short cut" else torch.ops.narrow.scaled_linear
    for weight in (E4M3, E5M2):
        x, codes, scale = _args(weight=weight)
        leaf = x.requires_grad_()
        y = call(leaf, codes, scale)
        assert y.dtype == F32
        assert torch.equal(y, (x.float() @ codes.float().t()) * 0.5)
        (dx,) = torch.autograd.grad(y.sum(), leaf)
        want = (codes.float().sum(0) * 0.5).to(BF16)
        assert torch.equal(dx, want.expand_as(dx))
    for wrong, words in (
        (_args(x=F32), "x must be bfloat16, got float32"),
        (_args(weight=BF16), "weight must be float8_e4m3fn or float8_e5m2, got bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            call(*wrong)


def test_autocast_leaves_what_the_spec_fixes(scaled: Any) -> None:
    want = _forward(*_args())
    with torch.autocast("cpu", BF16):
        assert torch.equal(scaled(*_args(x=F32)), want)
        with pytest.raises(ValueError, match="x must be bfloat16, got float8_e4m3fn"):
            scaled(*_args(x=E4M3))


def _installed(install: Install, dtypes: Any) -> list[torch.dtype]:
    """The weights' dtypes of the calls that a row for these dtypes gets."""
    table, log = OperatorTable(), []

    @table.forward("scaled_linear", dtypes=dtypes)
    def row(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        log.append(weight.dtype)
        return _forward(x, weight, scale)

    install(table)
    return log


def test_row_by_argument_is_taken_for_those_dtypes_alone(scaled: Any, install: Install) -> None:
    log = _installed(install, {"weight": {E5M2}})
    for weight in (E5M2, E4M3, E5M2):
        scaled(*_args(weight=weight))
    assert log == [E5M2, E5M2]
    assert "weight is torch.float8_e4m3fn" in str(scaled.explain(*_args()))
    with anychip.policy(fallback="strict"), pytest.raises(FallbackError, match="weight is"):
        scaled(*_args())


def test_set_of_a_row_says_nothing_of_what_the_spec_fixes(scaled: Any, install: Install) -> None:
    log = _installed(install, {BF16})
    scaled(*_args())
    assert log == [E4M3]


@pytest.mark.parametrize(("dtypes", "words"), [
    ({F32}, "it takes no float type of scaled_linear"),
    ({"weight1": {E4M3}}, "dtypes speak of 'weight1'; did you mean 'weight'?"),
    ({"weight": {BF16}}, "it takes no type of weight: float8_e4m3fn or float8_e5m2"),
    ({"weight": {E4M3}, "x": {BF16}}, None),
])  # fmt: skip
def test_table_is_looked_at_by_argument(scaled: Any, dtypes: Any, words: str | None) -> None:
    table = OperatorTable()
    table.forward("scaled_linear", dtypes=dtypes)(_forward)
    found = table_faults([table])
    assert (words in found[0]) if words else found == []


def test_description_and_stub_name_the_dtypes(scaled: Any) -> None:
    told = describe(scaled.spec)
    assert told["dtypes"] == {
        "bfloat16": ["x"], "float8_e4m3fn or float8_e5m2": ["weight"], "float32": ["scale"],
    }  # fmt: skip
    assert "FLOATS = {torch.bfloat16}" in told["stub"]


def test_conformance_asks_in_the_dtypes_of_the_operator(scaled: Any) -> None:
    chapters = ("operators", "gradients", "errors")
    report = conformance.run("cpu", chapters=chapters, select="scaled_linear")
    assert report.passed, [report.explain(r) for r in report.results if not r.ok]
    parts = (r.case.split("/") for r in report.results)
    assert {part[2] for part in parts if part[0] != "errors"} == {"bf16", "design"}
