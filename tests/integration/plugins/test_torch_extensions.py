"""An extension that torch loads by itself, and cannot: the other chips work all the same."""

import json
from pathlib import Path

import pytest

from anychip.registry import extensions
from tests.integration.plugins.environments import Environment, good_plugin

NOTICE = (
    "anychip: Failed to load the backend extension: broken (OSError: no driver); "
    "starting again without torch's extensions\n"
)
TRAIN = ("train", "--backend", "cpu", "--steps", "1", "model.layers=1", "model.width=16",
         "model.heads=2", "model.context=16")  # fmt: skip
EXTENSION = """
import os

def load():
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # as one does that imports torch itself
    raise OSError("no driver")
"""
TORCH = """
import os
import sys

if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
    said = "Failed to load the backend extension: broken. You can disable it"
    raise RuntimeError(said) from OSError("no driver")
print(*sys.argv[1:])
sys.exit(7)
"""
"""In place of torch: fails as torch does; started again, it prints the arguments and ends."""
LATE = good_plugin("late").replace("def probe(self):", "def probe(self):\n        import torch")
"""A plugin that imports torch when it is asked, not before."""


@pytest.fixture
def broken(environment: Environment) -> Environment:
    """Where torch has such an extension, next to the host's backend and another plugin."""
    environment.add_distribution(
        "broken-extension", {"torch.backends": {"broken": "broken_extension:load"}}
    )
    environment.add_module("broken_extension", EXTENSION)
    environment.add_distribution("host", {"anychip.backends": {"cpu": "anychip_cpu"}})
    environment.add_plugin("late", LATE)
    return environment


@pytest.mark.grid
def test_command_starts_again_without_extensions_and_says_so(
    broken: Environment, tmp_path: Path
) -> None:
    done = broken.anychip(*TRAIN, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOTICE) == 1
    assert (tmp_path / "out").exists()
    told = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    quiet = broken.anychip(*TRAIN, "--out", str(tmp_path / "quiet"), **told)
    assert quiet.returncode == 0, quiet.stderr
    assert "extension" not in quiet.stderr


def test_command_starts_again_once_with_its_arguments(environment: Environment) -> None:
    """What the case above shows with torch, which takes seconds to start."""
    environment.is_warm = False
    environment.add_module("torch", TORCH)
    done = environment.anychip(*TRAIN)
    assert (done.returncode, done.stderr) == (7, NOTICE)
    assert done.stdout.split() == list(TRAIN)


def test_table_says_of_each_backend_what_it_says_itself(broken: Environment) -> None:
    done = broken.anychip("backends", "--json", ANYCHIP_PROBE_TIMEOUT="100")
    assert done.returncode == 0, done.stderr
    records = {record["name"]: record for record in json.loads(done.stdout)["backends"]}
    assert records["late"]["status"] == records["cpu"]["status"] == "ready"
    assert "extension" not in done.stdout


def test_failure_is_found_among_causes_and_in_texts() -> None:
    said = "Failed to load the backend extension: acme. You can disable it"
    torchs, outer = RuntimeError(said), ImportError("a plugin")
    outer.__cause__ = torchs
    wanted = "Failed to load the backend extension: acme"
    assert extensions.failure(outer) == wanted
    assert extensions.failure(f"probe() raised RuntimeError: {said}") == wanted
    torchs.__cause__ = OSError("no driver")
    assert extensions.failure(outer) == f"{wanted} (OSError: no driver)"
    assert extensions.failure(ValueError("another matter")) == ""


def test_there_is_no_second_restart(broken: Environment) -> None:
    code = """
        from anychip.registry import extensions
        print(repr(extensions.failure("Failed to load the backend extension: acme. You can")))
    """
    assert broken.run_code(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "''\n"
    assert "acme" in broken.run_code(code, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
