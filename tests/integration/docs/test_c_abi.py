"""docs/c-abi.md: its commands run in an empty directory, and its first kernel serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "c-abi.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def shell(command: str, directory: Path) -> str:
    """What a command prints, with ``anychip`` and ``cc`` as after an installation."""
    shims = directory / "bin"
    shims.mkdir(exist_ok=True)
    (shims / "anychip").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m anychip "$@"\n')
    (shims / "anychip").chmod(0o755)
    path = f"{shims}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "EXAMPLES": str(ROOT / "examples")}
    done = subprocess.run(
        ["sh", "-ec", command], cwd=directory, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.grid
def test_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    commands = blocks("bash")
    assert len(commands) == 2
    printed = [shell(command, tmp_path) for command in commands]
    assert "Minichip 0, by libchip.so" in printed[0]
    assert re.search(r"^backend minichip: passed$", printed[1], re.MULTILINE)


def test_first_kernel_of_the_page_takes_additions_from_the_host(tmp_path: Path) -> None:
    (kernel,) = blocks("c")
    source = (ROOT / "examples" / "minichip" / "minichip.c").read_text(encoding="utf-8")
    (line,) = re.findall(r"`(\.operators = .*?,)` into it", PAGE)
    table = "static const anychip_library library = {\n"
    assert table in source
    (tmp_path / "chip.c").write_text(source.replace(table, f"{kernel}\n{table}    {line}\n"))
    shell(blocks("bash")[0].splitlines()[1], tmp_path)
    (tmp_path / "count.py").write_text(
        "import anychip, torch\n"
        "chip = anychip.use('./libchip.so')\n"
        "x = torch.arange(6.0).to(chip.device())\n"
        "y = (x + x).add_(x, alpha=2) + 1\n"
        "print(y.tolist(), dict(chip.host_calls()))\n"
    )
    printed = shell(f'"{sys.executable}" count.py', tmp_path)
    assert printed.strip() == "[1.0, 5.0, 9.0, 13.0, 17.0, 21.0] {'aten::add.Tensor': 1}"
