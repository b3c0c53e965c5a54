"""What is chosen from a table of records; no process is started here."""

from pathlib import Path
from typing import Any

import pytest

from anychip import registry
from anychip.contract import AmbiguousBackendError, BackendUnavailableError, UnknownBackendError
from anychip.registry import BackendRecord, choice, discovery
from anychip.registry.discovery import BACKENDS, Plugin
from tests.meta.honest import HonestBackend


def _record(name: str, status: Any, kind: Any = None, reason: str = "why") -> BackendRecord:
    return BackendRecord(
        name=name, status=status, reason=reason, fix="do this", kind=kind, device_type=name,
        device_count=1, distribution=f"plugin-{name}", version="1", module=f"plugin_{name}",
    )  # fmt: skip


CPU = _record("cpu", "ready", "host")
OTHER_HOST = _record("toy", "ready", "host")
FAST = _record("fast", "ready", "accelerator")
FASTER = _record("faster", "ready", "accelerator")
ABSENT = _record("absent", "unavailable")


@pytest.mark.parametrize(("records", "expected"), [
    ([CPU], "cpu"), ([OTHER_HOST, CPU, ABSENT], "cpu"), ([CPU, FAST, ABSENT], "fast"),
    ([FAST, OTHER_HOST], "fast"),
], ids=["only_cpu", "another_host", "one_accelerator", "accelerator_without_cpu"])  # fmt: skip
def test_forecast_without_a_name_takes_the_accelerator_else_cpu(
    records: list[BackendRecord], expected: str
) -> None:
    decision = choice.forecast(records)
    assert decision.name == expected
    assert [c.name for c in decision.candidates if c.accepted] == [expected]
    assert [c.name for c in decision.candidates] == [record.name for record in records]


@pytest.mark.parametrize("records", [
    [], [OTHER_HOST], [ABSENT, _record("cpu", "broken")],
], ids=["nothing", "another_host", "cpu_broken"])  # fmt: skip
def test_forecast_without_accelerator_and_cpu_raises(records: list[BackendRecord]) -> None:
    with pytest.raises(BackendUnavailableError, match="backend 'cpu' cannot run here"):
        choice.forecast(records)


def test_forecast_with_two_accelerators_raises_naming_both() -> None:
    with pytest.raises(AmbiguousBackendError, match=r"fast \(why\), faster \(why\)"):
        choice.forecast([CPU, FAST, FASTER])


def test_named_choice_while_another_thread_reads_the_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that begin at once each read it: plugins are equal, and not the same objects."""
    monkeypatch.setattr(discovery, "installed", discovery.installed.__wrapped__)
    decision = registry.choose("cpu").decision
    assert decision is not None
    assert decision.name == "cpu"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of ``cpu``, ``absent``, and of ``acme`` twice."""
    owners = (("cpu", "a"), ("absent", "b"), ("acme", "c"), ("acme", "d"))
    plugins = tuple(
        Plugin(group=BACKENDS, name=name, module="m", distribution=owner, version="2")
        for name, owner in owners
    )
    monkeypatch.setattr(discovery, "installed", lambda: plugins)


@pytest.mark.usefixtures("installed")
def test_resolve_name_that_nobody_has_raises_with_the_nearest() -> None:
    with pytest.raises(UnknownBackendError, match=r"'CPUs'; did you mean 'cpu'\? \(installed: abs"):
        choice.resolve("CPUs")
    with pytest.raises(UnknownBackendError, match=r"named 'zzz' \(installed: absent, acme, cpu, t"):
        choice.resolve("zzz")


@pytest.mark.usefixtures("installed")
def test_resolve_name_with_two_claimants_raises_naming_both() -> None:
    expected = "2 distributions claim the name 'acme': c 2, d 2; uninstall all but one"
    with pytest.raises(AmbiguousBackendError, match=expected):
        choice.resolve("acme")


@pytest.mark.parametrize("path", ["./libacme.so", "libacme.so", "/opt/acme/lib"])
def test_resolve_path_of_a_library_is_a_plugin_by_itself(path: str) -> None:
    plugin = choice.resolve(path)
    assert plugin.is_library
    assert (plugin.module, plugin.version) == (str(Path(path).resolve()), "missing")


@pytest.mark.usefixtures("installed")
def test_forecast_with_the_variable_set_follows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYCHIP_BACKEND", "cpu")
    decision = choice.forecast([CPU, FAST, FASTER])
    assert (decision.name, decision.asked_by) == ("cpu", "environment")
    monkeypatch.setenv("ANYCHIP_BACKEND", "absent")
    with pytest.raises(BackendUnavailableError, match=r"'absent' cannot run .*\n.*do this"):
        choice.forecast([CPU, FAST, ABSENT])


@pytest.mark.parametrize(("local_rank", "expected"), [(None, 0), ("0", 0), ("1", 1)])
def test_worker_takes_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, local_rank: str | None, expected: int
) -> None:
    chip = HonestBackend()
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    registry.take_device(chip)
    assert chip.current_device() == expected


def test_worker_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(BackendUnavailableError, match="rank 2 of this machine has no device"):
        registry.take_device(HonestBackend())


def test_automatic_choice_does_not_go_by_earlier_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def survey(*, use_cache: bool = True) -> list[Any]:
        asked.append(use_cache)
        raise BackendUnavailableError("all", "unavailable", "nothing is looked at here")

    monkeypatch.setattr(choice, "survey", survey)
    with pytest.raises(BackendUnavailableError, match="nothing is looked at"):
        choice.choose()
    assert asked == [False]
