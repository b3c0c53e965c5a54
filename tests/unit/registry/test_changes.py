"""A plugin of contract 1.0 is told each thing it must change, in one sentence, and nothing else."""

import sys
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

import anychip_cpu.backend
import anychip_cuda.operators
from anychip import ops
from anychip.contract import API_VERSION, Backend, OperatorTable, Probe, hookimpl
from anychip.registry import changes, loading
from anychip.registry.discovery import BACKENDS, Plugin

LAST = "State api = (2, 0)."
DTYPE = "out_dtype=None, the dtype of the result"
ROWS = "rows=None after the tensors that were there (in a backward after rng)"


class Old(Backend):
    name, device_type, api, operators = "old", "cpu", (1, 0), OperatorTable()

    def probe(self) -> Probe:
        return Probe.ready(1, kind="host")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Any: ...
def linear_backward(grad: Tensor, x: Tensor, weight: Tensor, *, needs: Any) -> Any: ...
def dropout(x: Tensor, rng: Tensor, *, p: float) -> Any: ...
def dropout_by_name(x: Tensor, rng: Tensor, **attrs: Any) -> Any: ...
def dropout_new(x: Tensor, rng: Tensor, where: Any, *, p: float, **index: int) -> Any: ...
def add_norm(x: Tensor, residual: Tensor, weight: Tensor, rng: Tensor, **_: Any) -> Any: ...
def anything(*args: Any, **attrs: Any) -> Any: ...
def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Any: ...


def _old(*rows: tuple[str, str, Any], **parts: Any) -> Old:
    backend, table = Old(), OperatorTable()
    for name, direction, function in rows:
        getattr(table, direction)(name)(function)
    backend.operators = table
    vars(backend).update(parts)
    return backend


@pytest.mark.parametrize(("rows", "wanted"), [
    ((), []),
    ((("rms_norm", "forward", rms_norm),), []),
    ((("linear", "forward", linear),), [f"Rows for linear take {DTYPE}."]),
    ((("linear", "backward", linear_backward),), [f"Rows for linear take {DTYPE}."]),
    ((("linear", "forward", linear), ("linear", "backward", linear_backward)),
     [f"Rows for linear take {DTYPE}."]),
    ((("linear", "forward", anything), ("grouped_linear", "backward", anything)), []),
    (
        (("dropout", "forward", dropout), ("grouped_linear", "forward", linear)),
        [
            f"Rows for grouped_linear take {DTYPE}.",
            f"Rows for dropout take {ROWS}, and width=0 and column=0 by name.",
        ],
    ),
    ((("dropout", "forward", dropout_by_name),),
     [f"Rows for dropout take {ROWS}, and width=0 and column=0 by name."]),
    ((("dropout", "forward", dropout_new),), []),
    ((("dropout_add_rms_norm", "forward", add_norm),),
     [f"Rows for dropout_add_rms_norm take {ROWS}."]),
])  # fmt: skip
def test_row_of_an_earlier_contract_is_one_sentence(rows: Any, wanted: list[str]) -> None:
    assert changes.sentences(_old(*rows)) == [*wanted, LAST]


def test_condition_and_pair_are_called_with_the_same_arguments() -> None:
    table = OperatorTable()
    table.forward("linear", accepts=lambda x, weight, bias: True)(anything)
    pairs = OperatorTable()
    given = {"backward": anything, "num_residuals": 1, "fake_residuals": anything}
    pairs.pair("linear", forward=anything, **{**given, "backward": linear_backward})
    pairs.pair("dropout", forward=anything, **{**given, "fake_residuals": dropout})
    assert changes.sentences(_old(operators=table)) == [f"Rows for linear take {DTYPE}.", LAST]
    told = changes.sentences(_old(operators=pairs))
    assert [text.split()[2] for text in told[:-1]] == ["linear", "dropout"]


def test_method_of_an_earlier_contract_is_one_sentence() -> None:
    told = changes.sentences(_old(native_communicator=lambda: None))
    assert told == ["Write transport(job) in place of native_communicator().", LAST]


def test_numbers_of_tensors_and_names_are_those_of_the_operators() -> None:
    for name, added in changes.ADDED.items():
        operator = getattr(ops, name)
        signature, gradient = operator.signature, operator.gradient
        assert gradient is not None
        assert added.forward == len(signature.positional)
        assert added.backward == len(gradient.kernel.names)
        assert set(added.names) <= set(signature.attr_names)


@pytest.mark.parametrize(
    "table", [anychip_cpu.backend.CpuBackend.operators, anychip_cuda.operators.table]
)
def test_rows_of_this_contract_have_nothing_to_change(table: OperatorTable) -> None:
    assert changes.sentences(_old(operators=table)) == [LAST]


@pytest.mark.parametrize(("api", "advice"), [
    (
        (1, 0),
        "install a newer version of the plugin, or change this one: "
        f"Rows for linear take {DTYPE}. {LAST}",
    ),
    ((1, 7), None),
    ((0, 9), "install a newer version of the plugin"),
    ((API_VERSION[0], API_VERSION[1] + 1), "install a newer version of anychip"),
])  # fmt: skip
def test_load_of_another_contract_says_what_to_change(
    api: tuple[int, int], advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = _old(("linear", "forward", linear))
    backend.api = api
    module = ModuleType("plugin_of_an_earlier_contract")
    module.anychip_backend = hookimpl(lambda: backend)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    plugin = Plugin(
        group=BACKENDS, name="old", module=module.__name__, distribution="old", version="3"
    )
    with pytest.raises(loading.LoadError) as caught:
        loading.load(plugin)
    found = caught.value.probe
    its = ".".join(map(str, api))
    assert found.status == "incompatible"
    assert (
        found.reason == f"it was made for version {its} of the contract, and this anychip has 2.0"
    )
    assert found.fix is not None
    assert found.fix == advice or (advice is None and LAST in found.fix)
