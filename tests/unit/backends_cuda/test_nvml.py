"""What is read of NVIDIA's management library, by libraries that have its symbols, or some."""

from pathlib import Path

import pytest

from anychip_cuda import nvml
from tests.unit.backends_cuda.shared_libraries import NVML, library

H200 = nvml.Facts(
    bandwidth=2 * 3201e6 * 6144 / 8, link_bandwidth=17 * 25e9, links=17, divided=False
)
"""4.9 TB/s and, over the 17 of 18 links that are up, 425 GB/s."""


@pytest.mark.parametrize("uuid", ["abc", "GPU-abc"])
def test_facts_of_a_known_device_are_figures_in_bytes_per_second(tmp_path: Path, uuid: str) -> None:
    path = library(tmp_path, NVML, INIT=0, BUS=0)
    assert nvml.facts(uuid, path) == H200
    assert nvml.facts(uuid, path) == H200, "the library was not closed after the first time"
    assert nvml.driver_version(path) == "580.65.06"


def test_facts_without_one_figure_keep_the_others(tmp_path: Path) -> None:
    path = library(tmp_path, NVML, INIT=0, BUS=3)
    assert nvml.facts("abc", path) == H200._replace(bandwidth=None)


def test_facts_of_an_unknown_device_are_unknown(tmp_path: Path) -> None:
    assert nvml.facts("MIG-1", library(tmp_path, NVML, INIT=0, BUS=0)) == nvml.Facts()


def test_facts_of_an_old_library_without_the_symbols_are_unknown(tmp_path: Path) -> None:
    path = library(tmp_path, NVML, INIT=0, BUS=0, OLD=1)
    assert nvml.facts("abc", path) == nvml.Facts()
    assert nvml.driver_version(path) == "580.65.06"


def test_facts_when_the_library_does_not_start_are_unknown(tmp_path: Path) -> None:
    path = library(tmp_path, NVML, INIT=9, BUS=0)
    assert nvml.facts("abc", path) == nvml.Facts()
    assert nvml.driver_version(path) is None


@pytest.mark.parametrize("name", ["libabsent.so.1", "libc.so.6"], ids=["absent", "another"])
def test_facts_without_the_library_are_unknown(name: str) -> None:
    assert nvml.facts("abc", name) == nvml.Facts()
    assert nvml.driver_version(name) is None
