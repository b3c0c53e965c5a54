"""The chips of this folder, compiled; and the one that a file of cases is about."""

import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

import anychip
from anychip.cabi import Library, include_directory

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples"
SOURCES = {
    **{name: [EXAMPLES / name / f"{name}.c"] for name in ("minichip", "asyncchip")},
    "opencl": [*sorted((EXAMPLES / "opencl").glob("*.c")), "-lOpenCL", "-lm"],
    **{name: [HERE / f"{name}.c"] for name in ("sharechip", "wrongchip", "mistakenchip")},
}


class Libraries(dict[str, Path]):
    """Each chip, compiled as the example's README says, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __missing__(self, chip: str) -> Path:
        """Skips the test where a chip's driver is missing; fails it in CI, which installs it."""
        made = self.folder / f"lib{chip}.so"
        flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        command = ["gcc", *flags, f"-I{include_directory()}", *SOURCES[chip], "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if "CL/cl.h: No such file" in done.stderr or "cannot find -lOpenCL" in done.stderr:
            missing("OpenCL's headers and loader")
        assert done.returncode == 0, done.stderr
        if not Library(made).device_count():
            missing("an OpenCL device")
        self[chip] = made
        return made


def missing(what: str) -> NoReturn:
    reason = f"{what} is missing: apt install pocl-opencl-icd ocl-icd-opencl-dev"
    if os.environ.get("ANYCHIP_TEST_OPENCL") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture(scope="module")
def chip() -> Library:
    """The library that ANYCHIP_TEST_CHIP names, in a process of its own."""
    found = anychip.use(os.environ["ANYCHIP_TEST_CHIP"])
    assert isinstance(found, Library)
    return found
