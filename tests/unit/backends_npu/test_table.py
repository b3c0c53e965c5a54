"""Rows that call what a release of torch_npu does not have."""

import sys
from types import ModuleType
from typing import Any

import pytest

from anychip.contract import OperatorTable
from anychip_npu import table


def test_row_that_calls_what_a_release_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(*args: Any) -> None: ...

    calls = {"aten::mm": "aclnnMm", "aten::_foreach_norm.Scalar": "aclnnForeachNorm"}
    rows = OperatorTable(kind="mapped")
    rows.forward("linear", calls=calls)(row)
    rows.forward("gelu", calls={**calls, "aten::no_such.out": "aclnnNoSuch"})(row)
    there, lacking = rows
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    assert table.unknown(lacking) == [], "nobody can tell without torch_npu"
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    assert (table.unknown(there), table.unknown(lacking)) == ([], ["aten::no_such"])
    assert [made.operator for made in rows.remade(table.served)] == ["linear"]
