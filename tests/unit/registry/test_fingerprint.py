"""What an answer is taken to depend on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anychip.registry import fingerprint
from anychip.registry.discovery import BACKENDS, Plugin


@pytest.mark.parametrize(
    "name", ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "ACME_VISIBLE_DEVICES", "ACME_HOME", "OMP_X"]
)
def test_surroundings_hold_variables_that_lead_to_software_or_devices(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "seen")
    assert fingerprint.surroundings()["environment"][name] == "seen"


@pytest.mark.parametrize(
    "name", ["HOME", "TERM", "PWD", "OLDPWD", "XDG_RUNTIME_DIR", "ANYCHIP_BACKEND", "ANYCHIP_DEBUG"]
)
def test_surroundings_leave_out_variables_that_change_with_the_session(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "seen")
    assert name not in fingerprint.surroundings()["environment"]


def test_surroundings_are_the_same_when_looked_at_twice() -> None:
    assert fingerprint.surroundings() == fingerprint.surroundings()


def test_surroundings_leave_out_terminals_and_keep_other_nodes() -> None:
    nodes = [line.split()[0] for line in fingerprint.surroundings()["nodes"]]
    assert "/dev/null" in nodes
    assert not [node for node in nodes if node.startswith(("/dev/pts/", "/dev/tty"))]


def test_fingerprint_follows_the_files_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "plugin_of_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    library = package / "lib.so"
    library.write_text("old")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin = Plugin(
        group=BACKENDS,
        name="acme",
        module="plugin_of_test.sub:plugin",
        distribution="plugin-of-test",
        version="1",
    )
    first = fingerprint.fingerprint(plugin, {})
    assert fingerprint.fingerprint(plugin, {}) == first
    assert fingerprint.fingerprint(plugin, {"nodes": ["/dev/acme0 240:0"]}) != first
    os.utime(library, ns=(1, 1))
    second = fingerprint.fingerprint(plugin, {})
    assert second != first
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("")
    assert fingerprint.fingerprint(plugin, {}) == second
