"""Bad plugins, each a real distribution, all at once in one environment next to good ones."""

import json
import os
from typing import Any, NamedTuple

import pytest

from tests.integration.plugins.environments import (
    READY_ACCELERATOR,
    READY_HOST,
    Environment,
    good_plugin,
)
from tests.integration.train.processes import is_running

PROBE_TIMEOUT_S = "30"


class Bad(NamedTuple):
    """A plugin's source, and what the table must say of it."""

    source: str | None
    reason: str
    status: str = "broken"


def _like_good(name: str, old: str, new: str) -> str:
    source = good_plugin(name)
    assert old in source
    return source.replace(old, new)


FLOOD = """
import sys
for stream in (sys.stdout, sys.stderr):
    for _ in range(20000):
        stream.write("noise " * 20 + "\\n")
"""
THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(100000,)).start()
"""
GRANDCHILD = """
import os, pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
pathlib.Path(os.environ["TEST_GRANDCHILD"]).write_text(str(child.pid))
"""

OTHER_SOURCES = {
    "raises": (
        'raise RuntimeError("libraises.so.3:\\n  undefined symbol: \\x1b[31mfoo\\x1b[0m")',
        "importing 'plugin_raises' raised RuntimeError: libraises.so.3: undefined symbol: "
        "[31mfoo [0m",
    ),
    "exits": ("raise SystemExit(3)", "importing 'plugin_exits' raised SystemExit: 3"),
    "vanishes": ("import os; os._exit(0)", "its process ended with exit code 0 without an answer"),
    "quits": (
        'import os, sys; print("no licence", file=sys.stderr, flush=True); os._exit(7)',
        "its process ended with exit code 7 without an answer; its last line on stderr: no licence",
    ),
    "segfaults": (
        "import ctypes; ctypes.string_at(0)", "its process died with SIGSEGV without an answer"
    ),
    "hangs": ("import time; time.sleep(1000)", "no answer within 30 s"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "no_hook": ("", "'plugin_no_hook' has no hook anychip_backend()"),
    "other_name": (
        good_plugin("another"),
        "its entry point is named 'other_name', but the backend's name is 'another'",
    ),
    "probes_others": (
        "import anychip; anychip.backends()",
        "importing 'plugin_probes_others' raised ContractError: a plugin asked for the other "
        "backends while it was being probed",
    ),
    "module_missing": (
        None,
        "importing 'plugin_module_missing' raised ModuleNotFoundError: No module named "
        "'plugin_module_missing'",
    ),
}  # fmt: skip
CHANGED = {
    "wrong_signature": (
        "def anychip_backend()", "def anychip_backend(chips)",
        "a hook does not fit: PluginValidationError: Plugin 'wrong_signature' for hook "
        "'anychip_backend' hookimpl definition: anychip_backend(chips) Argument(s) {'chips'} are "
        "declared in the hookimpl but can not be found in the hookspec",
    ),
    "misspelt_hook": (
        "def anychip_backend()", "def anychip_backnd()",
        "a hook does not fit: PluginValidationError: unknown hook 'anychip_backnd' in plugin ",
    ),
    "unmarked_hook": ("@hookimpl", "",
                      "plugin_unmarked_hook.anychip_backend is not marked with @anychip.hookimpl"),
    "not_a_backend": ("return Good()", 'return "a backend"',
                      "anychip_backend() must return an instance of anychip.Backend, got a str"),
    "a_class": (
        "return Good()", "return Good",
        "anychip_backend() must return an instance of anychip.Backend, got the class Good",
    ),
    "abstract": ("def probe", "def prove",
                 "anychip_backend() raised TypeError: Can't instantiate abstract class Good with"),
    "no_table": ("OperatorTable()", "{}", "its operators must be of type OperatorTable, got {}"),
    "probe_raises": (READY_HOST, "1 / 0", "probe() raised ZeroDivisionError: division by zero"),
    "probe_says_true": (READY_HOST, "True", "probe() must return an anychip.Probe, got bool"),
    "ready_with_nothing": (READY_HOST, 'Probe(status="ready", reason="yes")',
                           "probe() says ready with 0 devices"),
}  # fmt: skip
"""Name to what a good plugin has, what stands there instead, and the reason."""
VERSIONS = {"next_major": "3.0", "next_minor": "2.1", "last_major": "0.9"}
OF_ANOTHER = "it was made for version {} of the contract, and this anychip has 2.0"

CATALOGUE: dict[str, Bad] = {
    **{name: Bad(*given) for name, given in OTHER_SOURCES.items()},
    **{name: Bad(_like_good(name, old, new), reason)
       for name, (old, new, reason) in CHANGED.items()},
    **{name: Bad(_like_good(name, "(2, 0)", str(tuple(map(int, version.split("."))))),
                 OF_ANOTHER.format(version), "incompatible")
       for name, version in VERSIONS.items()},
    "next_minor_with_its_hook": Bad(
        _like_good("next_minor_with_its_hook", "(2, 0)", "(2, 1)")
        + "@hookimpl\ndef anychip_of_2_1(): pass\n",
        OF_ANOTHER.format("2.1"), "incompatible",
    ),
    "of_an_earlier_contract": Bad(
        good_plugin("of_an_earlier_contract") + "Good.native_communicator = lambda self: None\n",
        "it has native_communicator(), which this anychip does not call", "incompatible",
    ),
    "no_device": Bad(good_plugin("no_device", 'Probe.unavailable("no device", fix="plug one in")'),
                     "no device", "unavailable"),
}  # fmt: skip
"""Name to plugin; a reason in the table must begin with the one given here."""

NOISY_BUT_GOOD = {
    "floods": FLOOD + good_plugin("floods"), "threads": THREAD + good_plugin("threads"),
    "starts_a_process": GRANDCHILD + good_plugin("starts_a_process"),
}  # fmt: skip

LOOK = """
import json, sys
import anychip
records = [record.to_json() for record in anychip.backends()]
assert "torch" not in sys.modules
import torch
from anychip import registry
good = registry.choose("good")
imported = sorted(name for name in sys.modules if name.startswith("plugin_"))
print(json.dumps({"records": records, "imported": imported, "good": good.probe().status}))
"""
NOT_BY_NAME = ("vanishes", "quits", "segfaults", "hangs", "interrupts", "probes_others")
"""What these do to a process they do also to that of a user who asks for them by name; the last one
may ask for the others there."""


class Seen(NamedTuple):
    """The environment with all plugins, and what a process in it saw."""

    environment: Environment
    records: dict[str, list[dict[str, Any]]]
    imported: list[str]
    good_status: str
    grandchild: int


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("bad_plugins")
    environment = Environment(directory)
    for name, bad in CATALOGUE.items():
        environment.add_plugin(name, bad.source)
    for name, source in NOISY_BUT_GOOD.items():
        environment.add_plugin(name, source)
    environment.add_good("good")
    environment.add_good("fast", READY_ACCELERATOR)
    for distribution in ("acme-old", "acme-new"):
        entry = {"anychip.backends": {"acme": distribution.replace("-", "_")}}
        environment.add_distribution(distribution, entry, version="2.5")
    pid_file = directory / "grandchild"
    output = environment.run_code(
        LOOK, ANYCHIP_PROBE_TIMEOUT=PROBE_TIMEOUT_S, TEST_GRANDCHILD=str(pid_file)
    )
    answer = json.loads(output)  # a flood on stdout would not be JSON
    records: dict[str, list[dict[str, Any]]] = {}
    for record in answer["records"]:
        records.setdefault(record["name"], []).append(record)
    grandchild = int(pid_file.read_text())
    return Seen(environment, records, answer["imported"], answer["good"], grandchild)


@pytest.mark.grid
@pytest.mark.parametrize("name", CATALOGUE)
def test_table_with_a_bad_plugin_says_why_in_one_clean_line(seen: Seen, name: str) -> None:
    (record,) = seen.records[name]
    expected = CATALOGUE[name]
    assert record["status"] == expected.status
    assert record["reason"].startswith(expected.reason)
    assert record["reason"].isprintable()
    assert len(record["reason"]) <= 300
    assert (record["distribution"], record["version"]) == (f"plugin-{name}", "1.0")
    assert record["kind"] is None


@pytest.mark.parametrize("name", ["good", "fast", *NOISY_BUT_GOOD])
def test_table_next_to_bad_plugins_has_the_good_ones_ready(seen: Seen, name: str) -> None:
    (record,) = seen.records[name]
    assert record["status"] == "ready"


def test_table_with_one_ready_accelerator_marks_it_as_chosen(seen: Seen) -> None:
    assert [name for name, records in seen.records.items() if records[0]["chosen"]] == ["fast"]


def test_unchosen_plugins_are_never_imported(seen: Seen) -> None:
    assert seen.imported == ["plugin_good"]
    assert seen.good_status == "ready"


def test_two_distributions_with_one_name_are_both_reported_and_both_named(seen: Seen) -> None:
    records = seen.records["acme"]
    assert {record["distribution"] for record in records} == {"acme-old", "acme-new"}
    for record in records:
        assert record["status"] == "broken"
        assert "acme-old 2.5" in record["reason"]
        assert "acme-new 2.5" in record["reason"]


def test_distribution_with_unreadable_entry_points_is_reported(environment: Environment) -> None:
    # Not in the common environment: torch's own search for plugins does not survive this one.
    environment.add_distribution("unreadable", {"anychip.backends": {}})
    metadata = environment.site / "unreadable-1.0.dist-info" / "entry_points.txt"
    metadata.write_text("[anychip.backends]\nthis is no entry point\n")
    environment.add_good("good")
    done = environment.anychip("backends", "--json")
    records = {record["name"]: record for record in json.loads(done.stdout)["backends"]}
    assert records["good"]["status"] == "ready"
    assert records["unreadable"]["status"] == "broken"
    assert records["unreadable"]["reason"].startswith("the entry_points.txt of unreadable 1.0 ")


def test_thread_that_a_plugin_left_holds_up_nobody(environment: Environment) -> None:
    environment.add_plugin("threads", NOISY_BUT_GOOD["threads"])
    # Were the thread waited for, this would run into the limit of the process instead.
    assert environment.anychip("doctor", "threads", ANYCHIP_PROBE_TIMEOUT="100000").returncode == 0


def test_process_that_a_probe_started_is_gone_afterwards(seen: Seen) -> None:
    assert not is_running(seen.grandchild)


@pytest.mark.grid
@pytest.mark.parametrize("name", [name for name in CATALOGUE if name not in NOT_BY_NAME])
def test_bad_plugin_asked_for_by_name_raises_with_the_reason_of_the_table(
    seen: Seen, name: str
) -> None:
    done = seen.environment.run("-c", f"from anychip import registry; registry.choose({name!r})")
    assert done.returncode == 1
    last = [line for line in done.stderr.splitlines() if "BackendUnavailableError" in line][-1]
    assert CATALOGUE[name].reason in last
    assert CATALOGUE[name].status in last


@pytest.mark.grid
@pytest.mark.parametrize("name", ["segfaults", "vanishes", "floods"])
def test_doctor_for_a_plugin_that_kills_its_process_survives(seen: Seen, name: str) -> None:
    done = seen.environment.anychip("doctor", name, TEST_GRANDCHILD=os.devnull)
    expected = 0 if name in NOISY_BUT_GOOD else 3
    assert done.returncode == expected
    assert "noise" not in done.stdout + done.stderr
    if expected:
        assert CATALOGUE[name].reason in done.stdout
