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


@pytest.mark.parametrize(("uuid", "settings", "found", "version"), [
    ("abc", {"BUS": 3}, H200._replace(bandwidth=None), "580.65.06"),
    ("MIG-1", {"BUS": 0}, nvml.Facts(), "580.65.06"),
    ("abc", {"BUS": 0, "OLD": 1}, nvml.Facts(), "580.65.06"),
    ("abc", {"BUS": 0, "INIT": 9}, nvml.Facts(), None),
], ids=["one-figure-less", "unknown-device", "without-symbols", "does-not-start"])  # fmt: skip
def test_facts_that_are_not_there_are_unknown(
    tmp_path: Path, uuid: str, settings: dict[str, int], found: nvml.Facts, version: str | None
) -> None:
    path = library(tmp_path, NVML, **{"INIT": 0} | settings)
    assert nvml.facts(uuid, path) == found
    assert nvml.driver_version(path) == version


@pytest.mark.parametrize("name", ["libabsent.so.1", "libc.so.6"], ids=["absent", "another"])
def test_facts_without_the_library_are_unknown(name: str) -> None:
    assert nvml.facts("abc", name) == nvml.Facts()
    assert nvml.driver_version(name) is None
