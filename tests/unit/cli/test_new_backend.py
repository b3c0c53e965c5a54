"""What ``anychip new-backend`` writes, and what it refuses. Running a project is integration."""

import ast
from pathlib import Path

import pytest

from anychip.cli.group import run

EXAMPLE = Path(__file__).parents[3] / "examples" / "minichip"


def _files(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*")
        if path.is_file()
    }  # fmt: skip


WRITTEN = {"README.md", "ci.sh", "pyproject.toml", "tests/test_backend.py"}
WRITTEN |= {"anychip_acme_x1/__init__.py", "anychip_acme_x1/expectations.toml"}
OWN = {
    "python": {
        *(f"anychip_acme_x1/{name}.py" for name in ("backend", "device", "memory", "operators")),
        "anychip_acme_x1/py.typed",
    },
    "c-abi": {"CMakeLists.txt", "chip.c", "include/anychip/abi.h"},
}
SAYS = {
    "python": ("anychip_acme_x1/backend.py", "class AcmeX1Backend(HostDevice, Backend):"),
    "c-abi": ("chip.c", '.name = "acme_x1",'),
}


@pytest.mark.parametrize("kind", OWN)
def test_new_backend_writes_a_project_with_nothing_to_fill_in(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "project"
    assert run(["new-backend", "acme_x1", "--kind", kind, "--directory", str(target)]) == 0
    files = _files(target)
    assert set(files) == WRITTEN | OWN[kind]
    assert '\nacme_x1 = "anychip_acme_x1"\n' in files["pyproject.toml"]
    assert 'name = "anychip-acme-x1"' in files["pyproject.toml"]
    file, line = SAYS[kind]
    assert line in files[file]
    for path, text in files.items():
        assert "$" not in text.replace('$(dirname "$0")', ""), path
        if path.endswith(".py"):
            ast.parse(text)
            assert max(map(len, text.splitlines())) <= 100, path
    assert (target / "ci.sh").stat().st_mode & 0o111


def test_minichip_and_its_hook_are_what_new_backend_writes(tmp_path: Path) -> None:
    """The example, the template and the guide are one chip; tests of docs have the guide."""
    target = tmp_path / "project"
    assert run(["new-backend", "minichip", "--kind", "c-abi", "--directory", str(target)]) == 0
    hook = "anychip_minichip/__init__.py"
    for here, there in (("chip.c", "minichip.c"), (hook, hook)):
        assert (target / here).read_text() == (EXAMPLE / there).read_text(), there


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
    pytest.param(["acme", "--kind", "cabi"], "'cabi' is not one of 'python', 'c-abi'", id="kind"),
    pytest.param([], "Missing argument 'NAME'", id="no_name"),
])  # fmt: skip
def test_new_backend_with_wrong_use_writes_nothing_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    args: list[str], message: str,
) -> None:  # fmt: skip
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
