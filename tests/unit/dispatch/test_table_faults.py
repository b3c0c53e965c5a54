"""Is every row that could serve nobody found, and is no row suspected that serves somebody?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip_cpu.operators
import anychip_cuda.operators
from anychip.contract import OperatorTable
from anychip.runtime import table_faults
from tests.meta.honest import HonestRows


def forward(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    raise AssertionError("a table is looked at, and nothing is called")


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, *, eps: float, needs: Any
) -> Any:
    raise AssertionError("a table is looked at, and nothing is called")


def bare(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    raise AssertionError("a table is looked at, and nothing is called")


def add(table: OperatorTable, name: str = "rms_norm", function: Any = forward, **more: Any) -> None:
    table.forward(name, **more)(function)


def add_pair(table: OperatorTable, **more: Any) -> None:
    right = {"forward": forward, "backward": backward, "fake_residuals": bare}
    table.pair("rms_norm", **{**right, "num_residuals": 1, **more})


WRONG: dict[str, tuple[Callable[[OperatorTable], Any], str]] = {
    "operator": (lambda t: add(t, "soft_max"), "named 'soft_max'; did you mean 'softmax'?"),
    "limit": (
        lambda t: add(t, limits={"hiden": range(1, 9)}),
        "limits speak of 'hiden'; did you mean 'hidden'?",
    ),
    "limit_of_another_operator": (
        lambda t: add(t, limits={"head_dim": range(1, 9)}),
        "limits speak of 'head_dim'; the sizes of rms_norm are hidden, rows",
    ),
    "empty_limit": (
        lambda t: add(t, limits={"hidden": range(8, 1)}),
        "the limit of 'hidden' must be a range or a set with a size in it: range(8, 1)",
    ),
    "limit_is_a_number": (
        lambda t: add(t, limits={"hidden": 8}),
        "the limit of 'hidden' must be a range or a set with a size in it: 8",
    ),
    "limit_of_what_the_backward_has_not": (
        lambda t: t.backward("softmax", limits={"rows": range(9)})(lambda *_, **__: None),
        "it cannot have limits, since it is not given x; use accepts",
    ),
    "dtypes": (lambda t: add(t, dtypes={torch.int8}), "it takes no float type"),
    "dtypes_as_text": (lambda t: add(t, dtypes={"bfloat16"}), "it takes no float type"),
    "signature": (
        lambda t: add(t, function=lambda x, *, eps: None),
        "is called as <lambda>(x, weight, eps=): too many positional arguments",
    ),
    "attribute": (
        lambda t: add(t, function=lambda x, weight, *, epsilon: None),
        "missing a required argument: 'epsilon'",
    ),
    "accepts": (
        lambda t: add(t, accepts=lambda x: True),
        "is called as <lambda>(x, weight, eps=): too many positional arguments",
    ),
    "backward_without_needs": (
        lambda t: t.backward("rms_norm")(lambda grad, x, weight, rstd, *, eps: None),
        "got an unexpected keyword argument 'needs'",
    ),
    "backward_of_what_has_none": (lambda t: t.backward("adamw")(backward), "has no gradient"),
    "residual": (
        lambda t: add(t, function=bare),
        "bare returns 1 results by its annotation, and 2 are expected",
    ),
    "residuals_of_a_pair": (
        lambda t: add_pair(t, num_residuals=2),
        "forward returns 2 results by its annotation, and 3 are expected",
    ),
    "backward_of_a_pair": (
        lambda t: add_pair(t, backward=forward),
        "is called as forward(grad0, x, weight, own0, eps=, needs=)",
    ),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_row_that_could_serve_nobody_is_named_with_what_is_expected(name: str) -> None:
    table, (change, words) = OperatorTable(), WRONG[name]
    add(table)
    add_pair(table)
    assert table_faults([table]) == []
    change(table)
    found = table_faults([table])
    assert found
    assert words in " ".join(found)


def test_rows_of_backends_that_work_are_not_suspected() -> None:
    tables = [
        anychip_cpu.operators.table,
        anychip_cuda.operators.table,
        HonestRows.operators,
    ]
    assert sum(map(len, tables)) > 100
    assert table_faults(tables) == []
