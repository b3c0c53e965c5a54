"""docs/adding-an-operator.md: its files are written into an empty directory, its commands run."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "adding-an-operator.md"
# What an installed anychip brings without being asked.
IMPORTS = [str(ROOT / "core"), *(str(path) for path in (ROOT / "backends").iterdir())]


class Command(NamedTuple):
    """A command of the page and the lines that the page says it prints."""

    text: str
    lines: list[str]


def blocks() -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def files() -> dict[str, str]:
    """The files of the page by name, which their first line gives."""
    found = [text for language, text in blocks() if language in ("python", "toml")]
    return {text.partition("\n")[0].removeprefix("# "): text for text in found}


def commands() -> list[Command]:
    """The commands, each with the block of output behind it, if there is one."""
    found: list[Command] = []
    for language, text in blocks():
        if language == "bash":
            found.append(Command(text.strip(), []))
        elif language == "text":
            found[-1].lines.extend(text.splitlines())
    return found


class Place:
    """An empty directory with the page's files, and a shell in it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.site = directory / "project", directory / "site"
        shims = directory / "bin"
        for folder in (self.directory, shims):
            folder.mkdir(parents=True)
        for name, text in files().items():
            (self.directory / name).write_text(text, encoding="utf-8")
        for name, module in (("python", ""), ("anychip", "-m anychip ")):
            (shims / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module}"$@"\n')
            (shims / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(shims), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join([str(self.site), *IMPORTS]),
            "ANYCHIP_CACHE_DIR": str(directory / "cache"),
            # pip installs beside the tests, with what is here already.
            "PIP_TARGET": str(self.site),
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", "-c", command], cwd=self.directory, env=self.environment, capture_output=True,
            text=True, timeout=200, check=False,
        )  # fmt: skip


def plain(text: str) -> str:
    """Text with single spaces: tables may be of any width."""
    return " ".join(text.split())


def test_page_has_one_operator_file_one_test_and_one_pack() -> None:
    names = ["relu_squared.py", "test_relu_squared.py", "relu_squared_cpu.py", "pyproject.toml"]
    assert list(files()) == names


@pytest.mark.grid
def test_commands_of_the_page_print_what_it_says(tmp_path: Path) -> None:
    place = Place(tmp_path)
    checked = 0
    for command in commands():
        done = place.run(command.text)
        output = done.stdout + done.stderr
        assert done.returncode == 0, f"{command.text}\n{output}"
        rest = plain(output)
        for line in command.lines:
            head, found, rest = rest.partition(plain(line))
            assert found, f"{command.text}\nprinted no {line!r} after\n{head}\nof\n{output}"
            checked += 1
    assert checked >= 12


@pytest.mark.grid
def test_pack_of_the_page_with_a_wrong_row_fails_the_suite(tmp_path: Path) -> None:
    place = Place(tmp_path)
    file = place.directory / "relu_squared_cpu.py"
    assert ".mul_(2.0)" in file.read_text()
    file.write_text(file.read_text().replace(".mul_(2.0)", ".mul_(2.00001)"))
    assert place.run("python -m pip install .").returncode == 0
    done = place.run("anychip conformance --backend cpu --chapter gradients -k relu_squared")
    assert done.returncode == 1, done.stdout
    assert "gradient of x: 14 of 35 elements are outside the bound" in done.stdout


def test_operator_of_the_page_runs_before_a_backend_was_chosen_and_has_one_name(
    tmp_path: Path,
) -> None:
    place = Place(tmp_path)
    (place.directory / "twice.py").write_text(
        "import torch, anychip, relu_squared\n"
        "print(relu_squared.relu_squared(torch.tensor([-2.0, 3.0])).tolist())\n"
        "anychip.operator(relu_squared.SPEC)\n"
    )
    done = place.run("python twice.py")
    assert (done.returncode, done.stdout) == (1, "[0.0, 9.0]\n")
    assert "ContractError: operator 'relu_squared' exists already" in done.stderr
