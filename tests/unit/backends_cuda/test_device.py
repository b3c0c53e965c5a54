"""Properties of a device from the figures that are known of it; the order of calls for graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anychip import Backend, Probe, UnsupportedError
from anychip.contract import ContractError, OperatorTable
from anychip_cuda import device, nvml
from anychip_cuda.backend import CudaBackend

KNOWN = SimpleNamespace(
    name="NVIDIA H200", total_memory=150_754_820_096, uuid="abc", major=9, minor=0
)
FACTS = nvml.Facts(bandwidth=4.9e12, link_bandwidth=450e9, links=18, divided=False)


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
    """The backend on a machine with one H200, as far as torch and the library are asked."""
    device._properties.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: KNOWN)
    monkeypatch.setattr(nvml, "facts", lambda uuid: FACTS)
    monkeypatch.setattr(nvml, "driver_version", lambda: "580.65.06")
    return CudaBackend()


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    device._properties.cache_clear()


def test_properties_join_torchs_figures_and_the_librarys(chip: CudaBackend) -> None:
    found = chip.properties()
    assert (found.name, found.total_memory) == ("NVIDIA H200", 150_754_820_096)
    assert found.dtypes == {torch.float32, torch.bfloat16, torch.float16}
    assert found.flops[torch.bfloat16] == 989e12
    assert (found.bandwidth, found.link_bandwidth) == (4.9e12, 450e9)
    with pytest.raises(ValueError, match="devices 0 to 0, got 1"):
        chip.properties(1)


def test_stream_is_of_the_class_of_current_streams(
    chip: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which equal those of their own class only."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("torch.cuda's", device))
    assert chip.stream() == ("torch.cuda's", torch.device("cuda", 0))


def test_properties_of_a_divided_device_guess_no_bandwidth(
    chip: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "facts", lambda uuid: FACTS._replace(divided=True))
    assert chip.properties().bandwidth is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989), ("NVIDIA H200 NVL", 835), ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756), ("NVIDIA H20", 148), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA L40", None),
        ("NVIDIA H200 MIG 1g.18gb", None), ("NVIDIA GeForce RTX 4090", None),
    ],
)  # fmt: skip
def test_rates_are_those_of_the_data_sheet_or_none(name: str, tflops: int | None) -> None:
    assert device.rates(name).get(torch.bfloat16) == (None if tflops is None else tflops * 1e12)


def test_identity_names_device_driver_and_torchs_version(
    chip: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert chip.identity() == "NVIDIA H200 (9.0), driver 580.65.06, CUDA 13.0"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chip.identity() == "no device"


class Tape:
    """Stands for torch.cuda's streams and graphs, and writes down who was asked for what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.streams = 0

        def stream() -> SimpleNamespace:
            self.streams += 1
            return self.stream(f"side {self.streams}")

        @contextmanager
        def within(what: str) -> Iterator[None]:
            self.log.append(f"enter {what}")
            yield
            self.log.append(f"leave {what}")

        graph = SimpleNamespace(replay=lambda: self.log.append("replay"), name="graph")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream("current"))
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda s: within(s.name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph", lambda g: within(g.name))

    def stream(self, name: str) -> SimpleNamespace:
        def wait(other: SimpleNamespace) -> None:
            self.log.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)


def test_capture_warms_up_apart_then_records_once_and_replays(
    chip: CudaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    tape = Tape(monkeypatch)

    def work() -> str:
        tape.log.append("work")
        return "result"

    graph = chip.capture(work)
    assert graph.result == "result"
    graph.replay()
    assert tape.log == [
        "side 1 waits for current",
        "enter side 1", "work", "work", "work", "leave side 1",
        "current waits for side 1",
        "enter graph", "work", "leave graph",
        "replay",
    ]  # fmt: skip


class Declares(Backend):
    name, device_type, api, operators = "acme", "cpu", (2, 0), OperatorTable()
    capabilities = {"graphs": 1}  # noqa: RUF012

    def probe(self) -> Probe:
        return Probe.ready(1)


class DeclaresNot(Declares):
    capabilities = {}  # noqa: RUF012


@pytest.mark.parametrize(
    ("made", "error"), [(Declares, ContractError), (DeclaresNot, UnsupportedError)]
)
def test_capture_of_the_contract_refuses_without_work(
    made: Callable[[], Backend], error: type[Exception]
) -> None:
    def work() -> Any:
        raise AssertionError("called")

    with pytest.raises(error, match=r"acme.*graphs"):
        made().capture(work)
