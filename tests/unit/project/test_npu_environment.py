"""What `make test-npu` installs and builds, as far as that shows without installing anything."""

import re
from pathlib import Path

import pytest

from tests.npu import environment
from tests.npu.environment import Environment

ROOT = Path(__file__).parents[3]
PINS = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_pinned_release_is_the_one_for_the_pinned_torch() -> None:
    # torch_npu X.Y.Z demands torch==X.Y.Z.*
    assert f"torch=={environment.pinned()}" in PINS


@pytest.mark.parametrize(("release", "torch", "left_out"), [
    (environment.pinned(), environment.pinned(), set[str]()),
    ("2.12.0.post3", "2.12.0", {"torch", "setuptools", "triton", "cuda", "nvidia"}),
], ids=["pinned", "other"])  # fmt: skip
def test_constraints_of_another_release_leave_out_what_its_torch_decides(
    release: str, torch: str, left_out: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "BUILD", tmp_path)
    made = Environment(torch_npu=release)
    made.folder.mkdir()
    made._write_constraints()
    written = (made.folder / "constraints.txt").read_text().splitlines()
    missing = [line for line in PINS if line not in written]
    assert {re.split("[-=]", line)[0] for line in missing} == left_out
    assert [line for line in written if line.startswith("torch==")] == [f"torch=={torch}"]
    assert {"numpy", "pytest"} <= {line.split("==")[0] for line in written}


def test_releases_share_no_folder() -> None:
    pinned, other = Environment(torch_npu=environment.pinned()), Environment(torch_npu="2.12.0")
    assert pinned.folder != other.folder
    assert pinned.emulator == ROOT / "build" / "cann_emulator"
    assert other.emulator != pinned.emulator


def test_cached_build_is_taken_by_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "sources" / "device.cpp"
    source.parent.mkdir()
    source.write_text("int devices = 2;")
    for name, path in (("ROOT", tmp_path), ("BUILD", tmp_path / "build")):
        monkeypatch.setattr(environment, name, path)
    monkeypatch.setattr(environment, "EMULATOR", source.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    built: list[str] = []

    class Compiler(environment.Log):
        def command(self, *words: str | Path, env: object = None) -> None:
            if "--build" in words:
                built.append(source.read_text())
                libraries = made.emulator / "lib"
                libraries.mkdir(parents=True, exist_ok=True)
                for name in environment.LIBRARIES:
                    (libraries / f"lib{name}.so").write_text(source.read_text())

    made = Environment(torch_npu="2.12.0")
    log = Compiler(tmp_path / "log.txt")
    first = made.emulator / "lib" / "libascendcl.so"
    made.build(log, 1)
    made.build(log, 1)
    assert len(built) == 1
    source.write_text("int devices = 3;")
    made.build(log, 1)
    assert len(built) == 2
    assert first.read_text() == "int devices = 3;"
    # Back to the first sources: what they were built to comes from the cache.
    source.write_text("int devices = 2;")
    made.build(log, 1)
    assert len(built) == 2
    assert first.read_text() == "int devices = 2;"
