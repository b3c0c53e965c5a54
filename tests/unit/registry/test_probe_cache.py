"""How long answers are remembered, and that a damaged file is an empty one."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from anychip.contract import Probe
from anychip.registry import probe_cache

ANSWERS = {
    "ready": Probe.ready(2, kind="host", reason="two"),
    "incompatible": Probe.incompatible("too new", fix="upgrade"),
    "unavailable": Probe.unavailable("no device"),
    "broken": Probe.broken("raised"),
}


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ANYCHIP_CACHE_DIR", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache" / "probes.json"


def _age(file: Path, seconds: float) -> None:
    content = json.loads(file.read_text())
    for entry in content["answers"].values():
        entry["time"] = time.time() - seconds
    file.write_text(json.dumps(content))


def test_answers_written_are_read_back_equal(file: Path) -> None:
    probe_cache.write(ANSWERS)
    assert probe_cache.read() == ANSWERS
    assert [path.name for path in file.parent.iterdir()] == ["probes.json"]


def test_answers_written_later_join_the_earlier_ones(file: Path) -> None:
    probe_cache.write({"a": ANSWERS["ready"], "b": ANSWERS["broken"]})
    probe_cache.write({"b": ANSWERS["ready"]})
    assert probe_cache.read() == {"a": ANSWERS["ready"], "b": ANSWERS["ready"]}


@pytest.mark.parametrize(
    ("age_s", "expected"),
    [
        (30, {"ready", "incompatible", "unavailable", "broken"}),
        (90, {"ready", "incompatible", "unavailable"}),
        (7200, {"ready", "incompatible"}),
        (100000, set()),
        (-60, set()),
    ],
    ids=["half_a_minute", "broken_expired", "unavailable_expired", "all_expired", "in_the_future"],
)
def test_answers_expire_by_status(file: Path, age_s: float, expected: set[str]) -> None:
    probe_cache.write(ANSWERS)
    _age(file, age_s)
    assert set(probe_cache.read()) == expected


def test_expired_answers_leave_the_file_with_the_next_write(file: Path) -> None:
    probe_cache.write({"old": ANSWERS["ready"]})
    _age(file, 100000)
    probe_cache.write({"new": ANSWERS["ready"]})
    assert set(json.loads(file.read_text())["answers"]) == {"new"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 2, "answers": {}}',
        '{"schema": 1, "answers": []}',
        '{"schema": 1, "answers": {"k": {"time": 1}}}',
        '{"schema": 1, "answers": {"k": {"time": 1, "probe": {"status": "fine"}}}}',
        '{"schema": 1, "answers": {"k": {"time": 1, "probe": {"status": "fine", "reason": ""}}}}',
        '{"schema": 1, "answers": {"k": {"time": "x", "probe": {"status": "ready"}}}}',
        "\x00\x01",
    ],
)
def test_file_that_is_damaged_is_as_if_it_were_empty(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert probe_cache.read() == {}
    probe_cache.write({"a": ANSWERS["ready"]})
    assert probe_cache.read() == {"a": ANSWERS["ready"]}
