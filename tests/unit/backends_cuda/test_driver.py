"""What is read of NVIDIA's driver: from a library with its symbols, a folder with its files."""

from pathlib import Path

import pytest

from anychip_cuda import driver
from tests.unit.backends_cuda.shared_libraries import DRIVER, library


def test_ask_with_devices_reads_what_the_driver_says(tmp_path: Path) -> None:
    path = library(tmp_path, DRIVER, VERSION=13020, INIT=0, COUNT=1, MODE=3)
    found = driver.ask(path)
    part = driver.Part("NVIDIA H200", (9, 0), 132, 150_000_000_000, "exclusive process")
    assert found == driver.Answer((13, 2), (part,), 0, "")
    assert driver.version(path) == (13, 2)


def test_ask_with_two_devices_goes_by_their_handles(tmp_path: Path) -> None:
    path = library(tmp_path, DRIVER, VERSION=12040, INIT=0, COUNT=2, MODE=9)
    first, second = driver.ask(path).parts
    assert (first.name, first.capability, first.compute_mode) == ("NVIDIA H200", (9, 0), "mode 9")
    assert (second.name, second.capability) == ("NVIDIA T4", (7, 5))


@pytest.mark.parametrize(
    ("code", "label"), [(100, "CUDA_ERROR_NO_DEVICE"), (999, "error 999")], ids=["named", "unnamed"]
)
def test_ask_when_the_driver_refuses_gives_its_code_and_name(
    tmp_path: Path, code: int, label: str
) -> None:
    path = library(tmp_path, DRIVER, VERSION=13000, INIT=code, COUNT=0, MODE=0)
    assert driver.ask(path) == driver.Answer((13, 0), (), code, label)


@pytest.mark.parametrize("name", ["libabsent.so.1", "libc.so.6"], ids=["absent", "not a driver"])
def test_ask_without_a_driver_says_which_library_is_of_no_use(name: str) -> None:
    assert driver.ask(name) == driver.Answer(label=f"{name} cannot be used")
    assert driver.version(name) is None


def test_files_counts_served_devices_and_names_forbidden_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    dev.mkdir()
    assert driver.files(proc, dev) == driver.Files(0, ())
    for device in ("0000:3b:00.0", "0000:86:00.0"):
        (proc / "gpus" / device).mkdir(parents=True)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (dev / name).touch()
    # Root may open everything, so that the modes of the files say nothing here.
    shut = str(dev / "nvidia1")
    monkeypatch.setattr(driver.os, "access", lambda path, mode: str(path) != shut)
    assert driver.files(proc, dev) == driver.Files(2, (shut,))
