"""What an answer is taken to depend on."""

import os
from pathlib import Path

import pytest

from anychip.registry import fingerprint
from anychip.registry.discovery import BACKENDS, Plugin


def test_surroundings_are_the_same_when_looked_at_twice() -> None:
    assert fingerprint.surroundings() == fingerprint.surroundings()


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
        group=BACKENDS, name="acme", module="plugin_of_test.sub:plugin",
        distribution="plugin-of-test", version="1",
    )  # fmt: skip
    first = fingerprint.fingerprint(plugin, [])
    assert fingerprint.fingerprint(plugin, []) == first
    assert fingerprint.fingerprint(plugin, ["another"]) != first
    os.utime(library, ns=(1, 1))
    second = fingerprint.fingerprint(plugin, [])
    assert second != first
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "x.pyc").write_text("")
    assert fingerprint.fingerprint(plugin, []) == second
