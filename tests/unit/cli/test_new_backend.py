"""What ``anychip new-backend`` writes, and what it refuses. Running a project is integration."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from anychip.cli.group import run


def _files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_new_backend_writes_a_project_with_nothing_left_to_fill_in(tmp_path: Path) -> None:
    target = tmp_path / "project"
    assert run(["new-backend", "acme_x1", "--directory", str(target)]) == 0
    files = _files(target)
    assert set(files) == {
        "README.md",
        "ci.sh",
        "pyproject.toml",
        "anychip_acme_x1/__init__.py",
        "anychip_acme_x1/backend.py",
        "anychip_acme_x1/device.py",
        "anychip_acme_x1/expectations.toml",
        "anychip_acme_x1/memory.py",
        "anychip_acme_x1/operators.py",
        "anychip_acme_x1/py.typed",
        "tests/test_backend.py",
    }
    assert '\nacme_x1 = "anychip_acme_x1"\n' in files["pyproject.toml"]
    assert 'name = "anychip-acme-x1"' in files["pyproject.toml"]
    assert "class AcmeX1Backend(HostDevice, Backend):" in files["anychip_acme_x1/backend.py"]
    for path, text in files.items():
        assert "$" not in text.replace('$(dirname "$0")', ""), path
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 100, path
    assert (target / "ci.sh").stat().st_mode & 0o111


def test_new_backend_without_a_directory_is_named_after_the_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new-backend", "acme"]) == 0
    assert (tmp_path / "anychip-acme" / "pyproject.toml").is_file()
    assert capsys.readouterr().out.startswith("wrote anychip-acme: ")


@pytest.mark.parametrize(("args", "message"), [
    pytest.param(["Acme"], "NAME must be lower-case letters", id="capital"),
    pytest.param(["2acme"], "NAME must be lower-case letters", id="digit_first"),
    pytest.param(["class"], "NAME must be lower-case letters", id="keyword"),
    pytest.param(["../acme"], "NAME must be lower-case letters", id="path"),
    pytest.param(["torch"], "a backend named 'torch' is installed already", id="taken"),
    pytest.param(["acme", "--kind", "c-abi"], "'c-abi' is not 'python'", id="kind"),
    pytest.param([], "Missing argument 'NAME'", id="no_name"),
])  # fmt: skip
def test_new_backend_with_wrong_use_writes_nothing_and_says_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new-backend", *args]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_new_backend_in_a_folder_with_files_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert run(["new-backend", "acme", "--directory", str(tmp_path)]) == 2
    assert "exists and is not empty; nothing was written" in capsys.readouterr().err
    assert _files(tmp_path) == {"README.md": "mine"}
