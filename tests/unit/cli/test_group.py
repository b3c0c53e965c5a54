"""The subcommands: found by name, none of them imported for the help text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import anychip
from anychip.cli import group

CORE = Path(anychip.__file__).parents[1]


def test_help_lists_every_subcommand_and_imports_none() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(CORE)!r})\n"
        "from anychip.cli.group import run\n"
        "run(['--help'])\n"
        "loaded = [m for m in sys.modules if m.endswith('_command')]\n"
        "assert not loaded and 'torch' not in sys.modules, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in group.SUBCOMMANDS:
        assert f"  {name} " in done.stdout


@pytest.mark.parametrize("args", [["--version"], ["--debug", "--version"]])
def test_version_is_printed_with_the_packages_name(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert group.run(args) == 0
    assert capsys.readouterr().out == f"anychip, version {anychip.__version__}\n"


@pytest.mark.parametrize(
    ("name", "hint"),
    [("trai", "did you mean 'train'?"), ("xyz", "there are backends, bench, conformance, doctor")],
)
def test_unknown_subcommand_is_wrong_use_with_a_hint(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert group.run([name]) == 2
    assert f"there is no command {name!r}; {hint}" in capsys.readouterr().err
