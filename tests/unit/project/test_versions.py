"""Are the Pythons and releases of torch that commits ask by turn those that the project allows?"""

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import tomlkit

from tests import versions

ROOT = versions.ROOT
PROJECT = tomlkit.parse((ROOT / "pyproject.toml").read_text(encoding="utf-8")).unwrap()["project"]


def script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def test_pairs_ask_every_python_and_the_oldest_torch_that_are_allowed() -> None:
    first, last = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    pythons = {f"3.{minor}" for minor in range(int(first), int(last))}
    assert {python for python, _ in versions.PAIRS} | {"3.11"} == pythons
    (oldest,) = (need[7:] for need in PROJECT["dependencies"] if need.startswith("torch>="))
    assert any(torch.startswith(f"{oldest}.") for _, torch in versions.PAIRS)


def test_turns_and_slices_of_sixty_commits_ask_each_pair_about_every_file() -> None:
    seen = {(pair, n % 20) for n in range(60) for pair in versions.of_turn(str(n))}
    assert len(seen) == 20 * len(versions.PAIRS)
    assert versions.of_turn("all") == versions.PAIRS


def test_page_about_installing_says_of_each_pair_that_it_is_asked() -> None:
    page = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
    for python, torch in versions.PAIRS:
        assert re.search(rf"^\| {python} \| {torch} \|", page, re.MULTILINE), (python, torch)


def test_interpreter_is_one_that_answers_with_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert versions.interpreter("3.99") is None
    script(tmp_path / "bin" / "python3.99", "echo 'command not found' >&2; exit 127")  # a shim
    script(tmp_path / "bin" / "pyenv", f"echo {tmp_path}")
    assert versions.interpreter("3.99") is None
    found = script(tmp_path / "versions" / "3.99.1" / "bin" / "python", "echo 3.99")
    assert versions.interpreter("3.99") == found


def test_stand_ins_load_and_say_that_there_is_no_device(tmp_path: Path) -> None:
    libraries = tmp_path / "torch" / "lib"
    libraries.mkdir(parents=True)
    metadata = tmp_path / "torch-9.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Requires-Dist: sympy\nRequires-Dist: nvidia-cublas==1; x == 'y'\n\nText\n")

    def compile_(source: str, *words: str) -> None:
        command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", *words]
        subprocess.run(command, check=True, input=source, text=True)

    # A library whose symbols have a version, one whose symbols have none, and what calls both.
    (tmp_path / "map").write_text("libcublas.so.13 { *; };\n")
    script_of = f"-Wl,--version-script={tmp_path / 'map'}"
    cublas, nccl = (f"-Wl,-soname,{name}" for name in ("libcublas.so.13", "libnccl.so.2"))
    compile_("int cublasCreate() { return 0; }", "-o", f"{tmp_path}/a.so", cublas, script_of)
    compile_("int ncclSend() { return 0; }", "-o", f"{tmp_path}/b.so", nccl)
    calls = "int cublasCreate(); int ncclSend(); int (*kept)() = ncclSend;"
    calls += "int ask() { return cublasCreate() + kept(); }"
    out = ("-o", f"{libraries}/libtorch.so", f"{tmp_path}/a.so", f"{tmp_path}/b.so")
    compile_(calls, *out, "-Wl,-rpath,$ORIGIN")
    with pytest.raises(OSError, match=r"libcublas\.so\.13"):
        ctypes.CDLL(f"{libraries}/libtorch.so")
    versions.leave_out_cuda(tmp_path)
    assert ctypes.CDLL(f"{libraries}/libtorch.so").ask() == 100 + 100
    assert metadata.read_text() == "Requires-Dist: sympy\n\nText\n"
    assert sorted(os.listdir(libraries)) == ["libcublas.so.13", "libnccl.so.2", "libtorch.so"]
