"""When plugins are probed anew and when an answer is remembered; the plugin counts its probes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.plugins.environments import READY_HOST, Environment, good_plugin

COUNT = """
import os
with open(os.environ["TEST_COUNT"], "a") as file:
    file.write("x")
"""


class Counted(Environment):
    """An environment with one plugin, ``acme``, that counts how often it is imported."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, is_warm=True)
        self.count_file = directory / "count"
        answer = f'{READY_HOST}.depending_on("ACME_*")'
        self.add_plugin("acme", COUNT + good_plugin("acme", answer))
        self.look()

    def look(self, *options: str, **variables: str) -> str:
        """Lists the backends; returns the status of ``acme``."""
        variables = {"TEST_COUNT": str(self.count_file), **variables}
        done = self.anychip("backends", "--json", *options, **variables)
        assert done.returncode == 0, done.stderr
        records = {record["name"]: record for record in json.loads(done.stdout)["backends"]}
        return str(records["acme"]["status"])

    @property
    def num_probes(self) -> int:
        return len(self.count_file.read_text())


@pytest.fixture
def counted(tmp_path: Path) -> Counted:
    return Counted(tmp_path)


def test_cache_with_nothing_changed_answers_without_a_probe(counted: Counted) -> None:
    assert counted.num_probes == 1
    assert counted.look() == "ready"
    assert counted.look(HOSTNAME="elsewhere", TERM="dumb", ANYCHIP_BACKEND="acme") == "ready"
    shown = counted.anychip("backends", TEST_COUNT=str(counted.count_file)).stdout
    assert re.search(r"acme +ready .* \(answered \d+ (s|min) ago\) *\n", shown)
    assert "it asks anew, as --no-cache does" in shown
    assert counted.num_probes == 1


def test_cache_when_told_to_be_bypassed_probes_and_remembers(counted: Counted) -> None:
    counted.look("--no-cache")
    counted.look()
    assert counted.num_probes == 2


def _change_module(counted: Counted) -> None:
    os.utime(counted.site / "plugin_acme.py", ns=(1, 1))


def _upgrade(counted: Counted) -> None:
    old = counted.site / "plugin_acme-1.0.dist-info"
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-acme\nVersion: 1.1\n")
    old.rename(counted.site / "plugin_acme-1.1.dist-info")


def _reinstall(counted: Counted) -> None:
    (counted.site / "plugin_acme-1.0.dist-info" / "RECORD").write_text("lib.so,sha256=abc,12\n")


def _install_another(counted: Counted) -> None:
    counted.add_distribution("torch-acme", {})


def _damage_file(counted: Counted) -> None:
    (counted.cache / "probes.json").write_text('{"schema": 2, "answers": {"half')


@pytest.mark.parametrize(
    "change", [_change_module, _upgrade, _reinstall, _install_another, _damage_file],
)  # fmt: skip
def test_cache_after_a_change_probes_again(
    counted: Counted, change: Callable[[Counted], None]
) -> None:
    change(counted)
    assert counted.look() == "ready"
    assert counted.num_probes == 2


def test_cache_in_another_environment_probes_again(counted: Counted) -> None:
    counted.look(ACME_VISIBLE_DEVICES="1", HOME_OF_ACME="/opt")
    counted.look(ACME_HOME="/opt/acme")
    assert counted.num_probes == 3


LICENSED = """(Probe.ready(1) if __import__("os").environ.get("ACME_LICENCE") else
Probe.unavailable("no licence", fix="export ACME_LICENCE=..."))"""


@pytest.mark.parametrize("depends", ["", '.depending_on("ACME_LICENCE")'], ids=["old", "stated"])
def test_backend_is_ready_when_done_is_what_its_fix_says(tmp_path: Path, depends: str) -> None:
    environment = Environment(tmp_path, is_warm=True)
    environment.add_good("acme", LICENSED + depends)
    for licence, expected in (("", "unavailable"), ("7", "ready")):
        done = environment.anychip("backends", "--json", ACME_LICENCE=licence)
        records = {record["name"]: record for record in json.loads(done.stdout)["backends"]}
        assert records["acme"]["status"] == expected


def test_cache_that_cannot_be_written_is_no_error(counted: Counted) -> None:
    blocked = counted.site / "plugin_acme.py" / "cache"  # below a file
    assert counted.look(ANYCHIP_CACHE_DIR=str(blocked)) == "ready"
    assert counted.num_probes == 2
