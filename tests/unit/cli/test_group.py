"""The subcommands: found by name, none of them imported for the help text."""

import json
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


@pytest.mark.parametrize(("name", "hint"), [
    ("trai", "did you mean 'train'?"), ("xyz", "there are backends, bench, config, conformance"),
])  # fmt: skip
def test_unknown_subcommand_is_wrong_use_with_a_hint(
    name: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert group.run([name]) == 2
    assert f"there is no command {name!r}; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "answer"), [
    ("train --lr 3", "there is no option --lr; lr is a setting: write optimizer.lr=3"),
    ("train --lr=3e-4", "write optimizer.lr=3e-4"),
    ("train --steps 3 --learning-rate 3", "write optimizer.lr=3"),
    ("train --batch-sise 8", "write data.batch_size=8"),
    ("plan --model.width 64", "write model.width=64"),
    ("plan --momentum", "write optimizer.momentum=VALUE"),
    ("train --zzz 3", "No such option '--zzz'"),
    ("train --settings --steps 3", "--settings trains nothing; leave out steps"),
    ("train --settings model.width=3", "--settings trains nothing; leave out arguments"),
])  # fmt: skip
def test_option_that_is_a_setting_is_answered_with_what_to_write(
    line: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert group.run(line.split()) == 2
    assert answer in capsys.readouterr().err


def test_settings_are_listed_for_people_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert group.run(["train", "--settings", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["settings"]
    assert group.run(["train", "--settings"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == [setting["key"] for setting in listed]
    for row, setting in zip(rows, listed, strict=True):
        assert row.rstrip().endswith(setting["meaning"])
        assert setting["default"] in (None, "") or json.dumps(setting["default"]) in row


def test_config_says_where_the_header_is(capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for option in ("--cflags", "--cmakedir", "--json"):
        assert group.run(["config", option]) == 0
        said[option] = capsys.readouterr().out.strip()
    found = json.loads(said["--json"])
    assert said["--cflags"] == f"-I{found['include']}"
    assert (Path(found["include"]) / "anychip" / "abi.h").is_file()
    assert (Path(said["--cmakedir"]) / "anychipConfig.cmake").is_file()
    assert group.run(["config", "--cflags", "--json"]) == 2
    assert "choose one of --cflags, --cmakedir and --json" in capsys.readouterr().err
