"""The chips of this folder, compiled; and the one that a file of cases is about."""

import os
import subprocess
from pathlib import Path

import pytest

import anychip
from anychip.cabi import Library, include_directory

HERE = Path(__file__).parent
SOURCES = {
    "minichip": HERE.parents[2] / "examples/minichip/minichip.c",
    **{name: HERE / f"{name}.c" for name in ("kernelchip", "sharechip")},
}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each chip, compiled as the example's README says."""
    folder = tmp_path_factory.mktemp("libraries")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    for name, source in SOURCES.items():
        made = ["gcc", *flags, f"-I{include_directory()}", source, "-o", folder / f"lib{name}.so"]
        subprocess.run(made, check=True)
    return {name: folder / f"lib{name}.so" for name in SOURCES}


@pytest.fixture(scope="module")
def chip() -> Library:
    """The library that ANYCHIP_TEST_CHIP names, in a process of its own."""
    found = anychip.use(os.environ["ANYCHIP_TEST_CHIP"])
    assert isinstance(found, Library)
    return found
