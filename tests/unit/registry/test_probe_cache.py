"""How long answers are remembered, what they depend on, and that a damaged file is an empty one."""

import json
import os
import time
from pathlib import Path

import pytest

from anychip.contract import Probe
from anychip.registry import fingerprint, probe_cache
from anychip.registry.discovery import BACKENDS, Plugin

ANSWERS = {
    "ready": Probe.ready(2, kind="host", reason="two").depending_on(),
    "incompatible": Probe.incompatible("too new", fix="upgrade").depending_on(),
    "unavailable": Probe.unavailable("no device").depending_on("ACME_LICENCE", "/dev/null"),
    "broken": Probe.broken("raised").depending_on("ACME_LICENCE"),
    "nobody knows on what it depends": Probe.ready(2),
}
SHOWN = {"ready", "incompatible", "unavailable"}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYCHIP_CACHE_DIR", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache" / "probes.json"


def _age(file: Path, seconds: float) -> None:
    content = json.loads(file.read_text())
    for entry in content["answers"].values():
        entry["time"] = time.time() - seconds
    file.write_text(json.dumps(content))


def _read() -> dict[str, Probe]:
    return {key: probe for key, (probe, _) in probe_cache.read().items()}


def test_answers_written_are_read_back_equal_but_those_that_nothing_outdates(file: Path) -> None:
    probe_cache.write(ANSWERS)
    assert _read() == {key: ANSWERS[key] for key in SHOWN}
    assert [path.name for path in file.parent.iterdir()] == ["probes.json"]


def test_answers_written_later_join_the_earlier_ones(file: Path) -> None:
    probe_cache.write({"a": ANSWERS["ready"], "b": ANSWERS["unavailable"]})
    probe_cache.write({"b": ANSWERS["ready"]})
    assert _read() == {"a": ANSWERS["ready"], "b": ANSWERS["ready"]}


@pytest.mark.parametrize(("age_s", "expected"), [
    (30, SHOWN), (100000, set()), (-60, set()),
], ids=["half_a_minute", "all_expired", "in_the_future"])  # fmt: skip
def test_answers_expire(file: Path, age_s: float, expected: set[str]) -> None:
    probe_cache.write(ANSWERS)
    _age(file, age_s)
    known = probe_cache.read()
    assert set(known) == expected
    assert all(age_s <= age <= age_s + 60 for _, age in known.values())


def test_expired_answers_leave_the_file_with_the_next_write(file: Path) -> None:
    probe_cache.write({"old": ANSWERS["ready"]})
    _age(file, 100000)
    probe_cache.write({"new": ANSWERS["ready"]})
    assert set(json.loads(file.read_text())["answers"]) == {"new"}


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"schema": 3, "answers": {}}', '{"schema": 2, "answers": []}',
    '{"schema": 2, "answers": {"k": {"time": 1}}}',
    '{"schema": 2, "answers": {"k": {"time": 1, "probe": {"status": "fine"}}}}',
    '{"schema": 2, "answers": {"k": {"time": 1, "probe": {"status": "fine", "reason": ""}}}}',
    '{"schema": 2, "answers": {"k": {"time": "x", "probe": {"status": "ready"}}}}',
    '{"schema": 2, "answers": {"k": {"time": 1, "state": "", "probe": {"status": "ready", '
    '"reason": "", "depends": [3]}}}}',
    "\x00\x01",
])  # fmt: skip
def test_file_that_is_damaged_is_as_if_it_were_empty(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert probe_cache.read() == {}
    probe_cache.write({"a": ANSWERS["ready"]})
    assert _read() == {"a": ANSWERS["ready"]}


@pytest.mark.parametrize("change", ["nothing", "variable", "file", "file_behind_a_star"])
def test_answer_holds_while_what_it_says_it_depends_on_is_as_it_was(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    answer = Probe.ready(1).depending_on(
        "ACME_LICENCE", str(tmp_path / "driver"), str(tmp_path / "node*")
    )
    probe_cache.write({"a": answer})
    if change == "variable":
        monkeypatch.setenv("ACME_LICENCE", "")
    elif change != "nothing":
        (tmp_path / {"file": "driver", "file_behind_a_star": "node7"}[change]).touch()
    assert _read() == ({"a": answer} if change == "nothing" else {})


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
