"""The backend as the registry sees it, and what it makes of driver, torch and kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anychip
from anychip.runtime import table_faults
from anychip_cuda import anychip_backend, backend, driver, native, nvml, readiness
from anychip_cuda.driver import Answer, Files, Part
from anychip_cuda.readiness import TorchBuild
from anychip_cuda.table import make_table
from tests import warm_python

H200 = Part("NVIDIA H200", (9, 0), 132, 150 << 30, "default")
CUDA_13 = TorchBuild("2.13.0+cu130", "13.0", None)
ROCM = TorchBuild("2.13.0+rocm7.0", None, "7.0.1")


def built(compiler: str) -> Any:
    """A native module that says what it was built with."""
    info = {"compiler": compiler, "architectures": "80-real 90-real 90-virtual", "abi": 1}
    return SimpleNamespace(build_info=lambda: info)


def test_import_touches_no_device_and_probe_answers_in_another_process() -> None:
    """Nothing may be started that a fork would not survive, or that a machine may not have."""
    program = (
        "import anychip_cuda.backend as b, torch; made = b.CudaBackend(); "
        "print(made.probe().status, torch.cuda.is_initialized())"
    )
    done = warm_python.run("-c", program)
    assert done.returncode == 0, done.stderr
    status, initialized = done.stdout.split()
    assert status in ("ready", "unavailable", "incompatible")
    assert initialized == "False"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device here")
def test_backend_by_name_without_a_device_says_why_and_what_helps() -> None:
    with pytest.raises(anychip.BackendUnavailableError) as caught:
        anychip.use("cuda")
    assert caught.value.status in ("unavailable", "incompatible")
    assert caught.value.reason
    assert caught.value.fix


def test_probe_takes_the_facts_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ask", lambda: Answer((13, 0), (H200, H200)))
    monkeypatch.setattr(driver, "files", lambda: Files(2, ()))
    monkeypatch.setattr(backend, "_TORCH", CUDA_13)
    monkeypatch.setattr(backend, "_PROBLEM", None)
    found = anychip_backend().probe()
    assert (found.status, found.device_count) == ("ready", 2)
    assert found.reason == "2 x NVIDIA H200, native kernels"


def test_probe_of_a_build_for_rocm_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "ask", lambda: pytest.fail("there is no such driver"))
    monkeypatch.setattr(backend, "_TORCH", ROCM)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = anychip_backend().probe()
    assert (found.status, found.device_count) == ("ready", 8)
    assert "ROCm 7.0.1" in found.reason


@pytest.mark.parametrize(
    ("module", "version", "torch_build", "problem"),
    [
        (None, (13, 0), CUDA_13, "cannot be loaded"),
        (built("nvcc 13.0.88"), (13, 1), CUDA_13, None),
        (built("nvcc 13.0.88"), None, CUDA_13, None),  # the probe says that there is no driver
        (built("nvcc 13.0.88"), (12, 8), CUDA_13, "built for CUDA 13.0.88"),
        (built("nvcc 13.0.88"), (13, 0), ROCM, "NVIDIA devices"),
    ],
    ids=["not built", "fits", "no driver", "old driver", "rocm"],
)
def test_kernels_are_called_only_where_the_driver_runs_them(
    module: Any, version: tuple[int, int] | None, torch_build: TorchBuild, problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(native, "module", module)
    monkeypatch.setattr(native, "problem", None if module else "they cannot be loaded")
    monkeypatch.setattr(driver, "version", lambda: version)
    monkeypatch.setattr(backend, "_TORCH", torch_build)
    found = backend._kernels_problem()
    assert (found is None) if problem is None else (problem in str(found))


def test_diagnose_has_a_line_for_driver_devices_kernels_and_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(driver, "ask", lambda: Answer((13, 0), (H200,)))
    monkeypatch.setattr(backend, "_TORCH", CUDA_13)
    monkeypatch.setattr(backend, "_PROBLEM", None)
    monkeypatch.setattr(native, "module", built("nvcc 13.0.88"))
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.65.06")
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    found = anychip_backend().diagnose()
    assert [(finding.ok, finding.text.split(",")[0]) for finding in found] == [
        (True, "driver for CUDA 13.0"), (True, "device 0: NVIDIA H200"),
        (True, "native kernels for 80-real 90-real 90-virtual by nvcc 13.0.88"),
        (True, "driver 580.65.06 by the management library"),
        (False, "torch is built without NCCL"),
    ]  # fmt: skip


def test_diagnose_without_kernels_says_how_to_build_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_PROBLEM", "no nvcc was found")
    finding = next(f for f in anychip_backend().diagnose() if f.text == "no nvcc was found")
    assert (finding.ok, finding.fix) == (False, native.BUILD_COMMAND)


def test_backend_declares_graphs_and_communicates_by_nccl() -> None:
    made = anychip_backend()
    assert made.capabilities["graphs"] == 1
    assert set(made.capabilities) > {"streams", "memory_stats", "memory_peak", "pinned_memory"}
    assert made.c10d_backend == "nccl"


def test_every_operator_of_the_issue_that_is_mapped_has_its_rows() -> None:
    rows = {(row.operator, row.direction) for row in anychip_backend().operators}
    both = ["linear", "grouped_linear", "attention", "attention_varlen"]
    wanted = {(name, direction) for name in both for direction in ("forward", "backward")}
    assert rows >= wanted | {("embedding", "forward")}
    assert readiness.OLDEST == (8, 0)


def test_every_row_can_be_called_as_its_operator_calls_it() -> None:
    kernels: Any = SimpleNamespace()
    table = make_table(kernels)
    assert len(table) > len(make_table(None))
    assert table_faults([table]) == []
