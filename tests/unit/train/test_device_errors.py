"""Where the host waits for a device that failed, training has the error of the contract."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import anychip
from anychip import runtime
from anychip.contract import Backend, DeviceError, OperatorTable, Probe

TRAIN = Path(runtime.__file__).parent / "train"
WAITS = {"item", "tolist", "cpu", "numpy"}


class Failed(Backend):
    """A host whose work has failed, as every wait for it says; its adapter only knows a number."""

    name, device_type, api, operators = "failed", "cpu", (2, 0), OperatorTable()

    def probe(self) -> Probe:
        return Probe.ready(1)

    def synchronize(self, index: int | None = None) -> None:
        raise DeviceError("failed: synchronize(device 0)", 7, "CORE", "add: trap")


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_active", Failed())


@pytest.mark.usefixtures("failed")
def test_error_of_an_adapter_becomes_that_of_the_device() -> None:
    told = pytest.raises(DeviceError, match=r"failed with CORE \(7\): add: trap")
    with told as caught, runtime.device_errors("cpu"):
        raise RuntimeError("stream synchronize failed, error code:7")

    assert str(caught.value.__cause__) == "stream synchronize failed, error code:7"


@pytest.mark.usefixtures("failed")
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("full"), DeviceError("x", 1, "Y"), ValueError("shape"),
], ids=["memory", "known already", "another type"])  # fmt: skip
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, runtime.device_errors("cpu"):
        raise error

    assert caught.value is error


def test_error_while_the_device_works_is_not_taken_for_its_failure() -> None:
    anychip.use("cpu")
    with pytest.raises(RuntimeError, match=r"^mine$"), runtime.device_errors("cpu"):
        raise RuntimeError("mine")


def test_value_on_the_host_is_the_tensors() -> None:
    tensor = torch.tensor([1.5, -2.0], requires_grad=True)

    assert runtime.on_host(tensor).tolist() == [1.5, -2.0]


def waits(tree: ast.AST) -> Iterator[int]:
    """Lines that call a method which waits for a device, on anything but the answer of on_host."""
    here = {
        ast.unparse(node.targets[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("on_host(")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            tensor = ast.unparse(node.func.value)
            if node.func.attr in WAITS and "on_host(" not in tensor and tensor not in here:
                yield node.lineno


def test_training_waits_for_a_device_through_one_function() -> None:
    found = [
        f"{path.relative_to(TRAIN)}:{line}"
        for path in sorted(TRAIN.rglob("*.py"))
        # Tokens of files are on the host; what scores documents runs a model.
        if path.parent.name not in ("data", "preparing") or path.stem == "scoring"
        for line in waits(ast.parse(path.read_text()))
    ]

    assert found == [], "wait by anychip.runtime.on_host(tensor): it tells why a device has failed"
