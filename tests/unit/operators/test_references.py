"""The references by the rules for every chip, at edges of shapes, and what they refuse in words."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anychip
from anychip import conformance, ops
from tests.mutants.references import References
from tests.unit.dispatch.calls import SPECS, tensors


@pytest.fixture
def cpu() -> Iterator[None]:
    """The backend in service again, after another one was."""
    yield
    anychip.use("cpu")


@pytest.mark.grid
@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("name", SPECS)
def test_reference_passes_the_suite_as_if_it_were_a_row(name: str) -> None:
    """Values, gradients and second derivatives against the oracle; layouts, threads, memory."""
    report = conformance.run(
        References(), select=f"operators/{name}/ or gradients/{name}/ or random/{name}/"
    )
    assert report.results
    assert [f"{r.case}: {r.reason}" for r in report.results if not r.ok] == []


R = torch.randn
EMPTY: dict[str, tuple[Any, ...]] = {
    "conv2d seen by nothing": ((1, 1, 4, 4), (1, 1, 1, 1), (1,), {"stride": 3}),
    "bias_gelu no rows": ((0, 3), (3,)), "bias_gelu no columns": ((3, 0), (0,)),
    "bias_dropout_add no columns": ((3, 0), (3, 0), [1, 2], (0,)),
    "bias_dropout_add 0-dim": ((), (), [1, 2]), "softmax no queries": ((2, 0, 4), {"causal": True}),
    "softmax one causal key": ((3, 1), {"causal": True}),
    "rope no positions": ((1, 0, 2, 8), (1, 0, 1, 8), (0, 4), (0, 4)),
    "attention no positions": ((1, 0, 2, 8), (1, 0, 2, 8), (1, 0, 2, 8), {"causal": True}),
    "attention no query heads": ((1, 3, 0, 8), (1, 3, 1, 8), (1, 3, 1, 8)),
    "attention_dropout no keys": ((1, 3, 2, 8), (1, 0, 1, 8), (1, 0, 1, 8), [1, 2]),
    "grouped_linear no inputs": ((4, 0), (1, 3, 0), [2]),
    "linear_cross_entropy no rows": ((0, 4), (5, 4), [], (5,), {"reduction": "sum"}),
    "linear_cross_entropy no inputs": ((3, 0), (5, 0), [0, 4, 2], (5,)),
    "embedding no width": ([1, 2], (4, 0)),
    "cross_entropy one class": ((3, 1), [0, 0, 0], {"label_smoothing": 0.2}),
}  # fmt: skip
"""Operator and what is at the edge, to arguments: shapes, integers, and last attributes. No oracle
has a call with these."""


@pytest.mark.parametrize("label", EMPTY)
def test_edge_of_the_shapes_reference_and_cpu_rows_agree(label: str) -> None:
    operator = getattr(ops, label.split()[0])
    given = [a for a in EMPTY[label] if not isinstance(a, dict)]
    args = [R(a) if isinstance(a, tuple) else torch.tensor(a, dtype=torch.int64) for a in given]
    attrs = EMPTY[label][-1] if len(given) < len(EMPTY[label]) else {}
    names = inspect.signature(operator).parameters
    differentiable = operator.spec.differentiable
    leaves = [a.requires_grad_() for n, a in zip(names, args, strict=False) if n in differentiable]
    found = []
    for pins in ({operator.spec.name: "reference"}, {}):
        with anychip.policy(pin=pins):
            outputs = tensors(operator(*args, **attrs))
            total = sum((y.sum() for y in outputs), torch.zeros(()))
            found.append([*outputs, *torch.autograd.grad(total, leaves, allow_unused=True)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
            assert bool(torch.isfinite(one).all())


@pytest.mark.parametrize(("call", "words"), [
    (lambda: ops.cross_entropy(R(3, 5), torch.tensor([0, 5, 1])),
     "from 0 to 4 or ignore_index -100, got 5 in row 1"),
    (lambda: ops.cross_entropy(R(3, 5), torch.tensor([0, 4, -1])), "got -1 in row 2"),
    (lambda: ops.embedding(torch.tensor([-1, 4]), R(4, 3)), "from 0 to 3, got -1 to 4"),
], ids=["target-5", "target--1", "indices"])  # fmt: skip
def test_wrong_index_is_named_with_its_range(call: Any, words: str) -> None:
    pins = dict.fromkeys(SPECS, "reference")
    with anychip.policy(pin=pins), pytest.raises(IndexError, match=words):
        call()
