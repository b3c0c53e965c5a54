"""Environments of real distributions for tests: metadata and modules that importlib.metadata sees.

An environment is a directory at the front of PYTHONPATH. It hides the entry points of an installed
anychip, so that a test decides alone which plugins there are.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

from tests import warm_python

CORE = Path(__file__).parents[3] / "core"
LIMIT_S = 280.0
"""Of a process: a conformance suite takes a minute and a half of one core."""

GOOD_PLUGIN = """
from anychip.contract import Backend, Finding, OperatorTable, Probe, hookimpl

class Good(Backend):
    name, device_type, api, operators = {name!r}, {device_type!r}, (2, 0), OperatorTable()

    def probe(self):
        return {answer}

    def diagnose(self):
        return [Finding(True, "the table has no rows")]

@hookimpl
def anychip_backend():
    return Good()
"""
STAND_IN = """
import json, os, sys
if json.loads(sys.argv[1])["name"] == "torch":
    class accelerator:
        current_accelerator = staticmethod(lambda check_available: None)
else:
    del sys.modules["torch"]
    sys.path.remove(os.path.dirname(__file__))
    import torch
    sys.path.insert(0, os.path.dirname(__file__))
"""
READY_HOST = 'Probe.ready(1, kind="host")'
READY_ACCELERATOR = "Probe.ready(2)"


class Environment:
    """A directory of distributions, and a cache of its own.

    ``is_warm``: the processes that run in it have imported torch already, and the probe of the
    backend named torch, which is a process of its own, finds a stand-in without accelerators. Not
    where torch itself has to find a distribution, or where a test asks who imports torch.
    """

    def __init__(self, directory: Path, *, is_warm: bool = False) -> None:
        self.site = directory / "site"
        self.cache = directory / "cache"
        self.site.mkdir(parents=True)
        self.is_warm = is_warm
        if is_warm:
            self.add_module("torch", STAND_IN)
        self.add_distribution("anychip", {})

    def add_distribution(
        self, name: str, entry_points: Mapping[str, Mapping[str, str]], version: str = "1.0"
    ) -> None:
        """Writes the metadata of a distribution; ``entry_points``: group to name to value."""
        if self.is_warm and "torch.backends" in entry_points:
            self.is_warm = False
            (self.site / "torch.py").unlink()
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
        groups = {"anychip.backends": {}, **entry_points}
        lines = [
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))

    def add_module(self, module: str, source: str) -> Path:
        """Writes a module and returns its file."""
        file = self.site / f"{module}.py"
        file.write_text(dedent(source))
        return file

    def add_plugin(self, name: str, source: str | None) -> None:
        """Distribution ``plugin-<name>`` with backend ``<name>``; None leaves the module out."""
        self.add_distribution(f"plugin-{name}", {"anychip.backends": {name: f"plugin_{name}"}})
        if source is not None:
            self.add_module(f"plugin_{name}", source)

    def add_good(self, name: str, answer: str = READY_HOST, device_type: str = "cpu") -> None:
        """A plugin that keeps to the contract, and answers its probe with ``answer``."""
        self.add_plugin(name, good_plugin(name, answer, device_type))

    def run(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs Python with ``args`` and extra environment variables in this environment."""
        env = {**self.variables(), **variables}
        if self.is_warm:
            return warm_python.run(*args, env=env, timeout=LIMIT_S)
        return subprocess.run(
            [sys.executable, *args], env=env, capture_output=True, text=True, timeout=LIMIT_S
        )

    def variables(self) -> dict[str, str]:
        """The environment variables of a process in this environment."""
        return {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(self.site), str(CORE)]),
            "ANYCHIP_CACHE_DIR": str(self.cache),
        }  # fmt: skip

    def run_code(self, code: str, **variables: str) -> str:
        """Runs a piece of Python that must succeed; returns what it printed."""
        done = self.run("-c", dedent(code), **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def anychip(self, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs the command line."""
        return self.run("-m", "anychip", *args, **variables)


def good_plugin(name: str, answer: str = READY_HOST, device_type: str = "cpu") -> str:
    """Source of a plugin that keeps to the contract."""
    return GOOD_PLUGIN.format(name=name, answer=answer, device_type=device_type)
