"""Is every row that could serve nobody found, and is no row suspected that serves somebody?"""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anychip_cpu.operators
import anychip_cuda.operators
import anychip_npu.operators
from anychip.contract import ContractError, OperatorTable
from anychip.runtime import table_faults
from anychip_cpu.backend import CpuBackend
from tests.meta.honest import HonestRows


def never(*_: Any) -> Any:
    raise AssertionError("a table is looked at, and nothing is called")


def forward(x: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    return never(x, weight, eps)


def bare(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return never(x, weight, eps)


def backward(g: Tensor, x: Tensor, w: Tensor, rstd: Tensor, *, eps: float, needs: Any) -> Any:
    return never(g, x, w, rstd, eps, needs)


SIZE = "the limit of 'hidden' must be a range or a set with a size in it: "
CALL = "is called as <lambda>(x, weight, eps=): too many positional arguments"
WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("soft_max", forward, {}, "named 'soft_max'; did you mean 'softmax'?"),
    ("rms_norm", forward, {"limits": {"hiden": range(9)}}, "of 'hiden'; did you mean 'hidden'?"),
    ("rms_norm", forward, {"limits": {"dim": {1}}}, "the sizes of rms_norm are hidden, rows"),
    ("rms_norm", forward, {"limits": {"hidden": range(8, 1)}}, f"{SIZE}range(8, 1)"),
    ("rms_norm", forward, {"limits": {"hidden": 8}}, f"{SIZE}8"),
    ("rms_norm", forward, {"dtypes": {torch.int8}}, "it takes no float type"),
    ("rms_norm", forward, {"dtypes": {"bfloat16"}}, "it takes no float type"),
    ("rms_norm", lambda x, *, eps: None, {}, CALL),
    ("rms_norm", lambda x, weight, *, epsilon: None, {}, "argument: 'epsilon'"),
    ("rms_norm", forward, {"accepts": lambda x: True}, CALL),
    ("rms_norm", bare, {}, "bare returns 1 results by its annotation, and 2 are expected"),
    ("softmax'", never, {"limits": {"rows": {1}}}, "cannot have limits, since it is not given x"),
    ("rms_norm'", lambda g, x, w, rstd, *, eps: None, {}, "unexpected keyword argument 'needs'"),
    ("adamw'", backward, {}, "adamw has no gradient"),
    ("pair", forward, {"num_residuals": 2}, "forward returns 2 results by its annotation, and 3"),
    ("pair", forward, {"backward": forward}, "forward(grad0, x, weight, own0, eps=, needs=)"),
]
"""Operator, with an apostrophe for its backward; a row's function and conditions; what is found."""


def add(table: OperatorTable, name: str, function: Any, conditions: dict[str, Any]) -> None:
    if name == "pair":
        right = {"backward": backward, "fake_residuals": bare, "num_residuals": 1}
        table.pair("rms_norm", forward=function, **{**right, **conditions})
    elif name.endswith("'"):
        table.backward(name[:-1], **conditions)(function)
    else:
        table.forward(name, **conditions)(function)


@pytest.mark.parametrize(("name", "function", "conditions", "words"), WRONG)
def test_row_that_could_serve_nobody_is_named_with_what_is_expected(
    name: str, function: Any, conditions: dict[str, Any], words: str
) -> None:
    table = OperatorTable()
    for right, row in (("rms_norm", forward), ("rms_norm'", backward), ("pair", forward)):
        add(table, right, row, {})
    assert table_faults([table]) == []
    add(table, name, function, conditions)
    assert words in " ".join(table_faults([table]))


def test_rows_of_backends_that_work_are_not_suspected() -> None:
    tables = [CpuBackend.operators, anychip_cuda.operators.table, HonestRows.operators]
    assert sum(map(len, tables)) > 100
    assert table_faults(tables) == []


@pytest.mark.parametrize("condition", [{"kind": None}, {"kind": "fast"}, {"alignment": 3.5e9}])
def test_row_of_no_known_kind_or_alignment_is_refused_where_it_is_declared(
    condition: dict[str, Any],
) -> None:
    with pytest.raises(ContractError, match="row for 'gelu': kind="):
        OperatorTable().forward("gelu", **condition)


def test_table_that_is_remade_leaves_out_and_changes_rows_and_keeps_their_order() -> None:
    declared = OperatorTable(kind="mapped", contiguous=True)
    for name in ("gelu", "silu", "tanh"):
        declared.forward(name, contiguous=name != "tanh")(forward)
    made = declared.remade(
        lambda row: None if row.operator == "silu" else replace(row, function=backward)
    )
    found = [(row.operator, row.kind, row.contiguous, row.function) for row in made]
    assert found == [("gelu", "mapped", True, backward), ("tanh", "mapped", False, backward)]
    assert [row.function for row in declared] == [forward] * 3


def test_rows_of_an_operator_are_in_a_file_of_the_same_name_in_each_backend() -> None:
    places = {
        (row.operator, row.function.__module__.rpartition(".")[2])
        for backend in (anychip_cpu.table, anychip_cuda.table, anychip_npu.table)
        for row in backend.declared
        if row.function.__module__.startswith("anychip_")  # not a reference that is a row
    }
    assert len(places) > 40
    files = Counter(operator for operator, _ in places)
    several = [f"{operator} in {file}.py" for operator, file in places if files[operator] > 1]
    assert several == []
