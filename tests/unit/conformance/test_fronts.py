"""The command, pytest and isolation, each in a process of its own, on plugins of this test.

``goodchip`` keeps to the contract. ``badchip`` is the same with rows that segfault, hang and end
the process, and a method that prints a lot.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from anychip.conformance import expectations
from tests import warm_python

PLUGIN = """
from __future__ import annotations

import ctypes, os, sys, time
import torch
from anychip import Backend, OperatorTable, Probe, hookimpl
from anychip.contract import DeviceProperties, Memory, MemoryInfo
from anychip.operators import gelu, rms_norm, swiglu

BAD = {bad}
table = OperatorTable()


class ChipMemory(Memory):
    def info(self, index=None):
        self.backend.check_index(index)
        return MemoryInfo(1 << 30, 1 << 30)


class Chip(Backend):
    name, device_type, api, operators, capabilities = "{name}", "cpu", (2, 0), table, {{}}

    def __init__(self):
        self.memory = ChipMemory(self)

    def probe(self):
        return Probe.ready(1, kind="host")

    def device(self, index=None):
        self.check_index(index)
        return torch.device("cpu")

    def current_device(self):
        return 0

    def set_device(self, index):
        self.check_index(index)

    def properties(self, index=None):
        self.check_index(index)
        dtypes = frozenset({{torch.float32}})
        return DeviceProperties(name="chip", total_memory=1 << 30, dtypes=dtypes)

    def identity(self):
        if BAD:
            print("x" * 200_000)
            print("y" * 200_000, file=sys.stderr)
        return "chip"


@table.forward("rms_norm")
def crashing(x, weight, *, eps):
    if BAD:
        ctypes.string_at(0)
    return rms_norm.forward(x, weight, eps=eps)


@table.forward("gelu")
def hanging(x, *, approximate):
    if BAD:
        time.sleep(600)
    return gelu.forward(x, approximate=approximate)


@table.forward("swiglu")
def leaving(gate, up):
    if BAD:
        os._exit(7)
    return swiglu.forward(gate, up)


@hookimpl
def anychip_backend():
    return Chip()
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder with two distributions as they look when installed."""
    for name, bad in (("goodchip", False), ("badchip", True)):
        package = tmp_path / f"anychip_{name}"
        package.mkdir()
        (package / "__init__.py").write_text(PLUGIN.format(name=name, bad=bad))
        info = tmp_path / f"anychip_{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: anychip-{name}\nVersion: 1.2\n"
        )
        (info / "entry_points.txt").write_text(f"[anychip.backends]\n{name} = anychip_{name}\n")
    return tmp_path


def run(plugins: Path, *command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(plugins), os.environ.get("PYTHONPATH", "")])
    return warm_python.run("-m", *command, cwd=plugins, env={**os.environ, "PYTHONPATH": path})


CALL = "fp32/4x8"


def test_command_on_a_good_plugin_passes_and_writes_every_report(plugins: Path) -> None:
    report, page, junit = (plugins / name for name in ("r.json", "r.html", "r.xml"))
    done = run(
        plugins, "anychip", "conformance", "--backend", "goodchip", "--chapter", "device",
        "--chapter", "operators", "-k", "device or rms_norm", "--seed", "3",
        "--json", str(report), "--html", str(page), "--junit", str(junit),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "level quick, seed 3: backend goodchip" in done.stdout
    assert "backend goodchip: passed" in done.stdout
    document = json.loads(report.read_text())
    assert document["passed"] is True
    assert document["seed"] == 3
    assert document["identity"]["distribution"] == "anychip-goodchip"
    assert document["identity"]["version"] == "1.2"
    assert len(document["identity"]["plugin_hash"]) == 64
    assert "goodchip" in page.read_text()
    assert ElementTree.parse(junit).getroot().get("failures") == "0"
    verified = run(plugins / "anychip_badchip", "anychip", "conformance", "verify", str(report))
    assert verified.returncode == 1, verified.stdout + verified.stderr
    assert "backend goodchip, version 1.2 of anychip-goodchip" in verified.stdout
    assert "- only a selection was run" in verified.stdout
    assert "the statement DOES NOT HOLD" in verified.stdout
    assert "must-pass cases without a result" in verified.stdout


@pytest.mark.grid
def test_isolation_makes_a_crash_a_hang_and_an_exit_one_failed_case_each(plugins: Path) -> None:
    report, listed = plugins / "r.json", plugins / "list.toml"
    listed.write_text(
        '[[unsupported]]\ncase = "operators/swiglu/*"\nreason = "r"\ncapability = "graphs"\n'
    )
    select = (
        "operators/rms_norm/fp32/4x8 or operators/gelu/fp32/17.none or operators/swiglu/fp32/17"
        " or operators/layer_norm/fp32/4x8 or device/identity"
    )
    done = run(
        plugins, "anychip", "conformance", "--backend", "badchip", "--isolate", "--limit", "8",
        "-k", select, "--json", str(report), "--expectations", str(listed),
        "--write-expectations", str(plugins / "first.toml"),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    first = expectations.parse((plugins / "first.toml").read_text(), "first.toml").entries
    crashing = {("rms_norm", True), ("gelu", True), ("swiglu", True)}
    assert {(e.case.split("/")[1], e.crash) for e in first} == crashing
    refused = run(plugins, "anychip", "conformance", "--write-expectations", str(listed))
    assert (refused.returncode, "it exists" in refused.stderr) == (2, True), refused.stderr
    document = json.loads(report.read_text())
    served = {row["operator"]: row["calls"] for row in document["provenance"]["operators"]}
    assert served == {"layer_norm": 1}  # the counts of a process end with it
    assert [item["subject"] for item in document["next_to_fix"]] == ["rms_norm", "gelu", "swiglu"]
    results = {r["case"]: r for r in json.loads(report.read_text())["results"]}
    assert "died with SIGSEGV" in results["operators/rms_norm/fp32/4x8"]["reason"]
    assert "no answer within 8 s" in results["operators/gelu/fp32/17.none"]["reason"]
    left = results["operators/swiglu/fp32/17"]
    assert "exit code 7" in left["reason"]
    assert "may be listed as an expected failure only, not as unsupported" in left["reason"]
    assert left["outcome"] == "failed"
    assert all(results[c]["crashed"] for c in results if "rms_norm" in c or "gelu" in c)
    passed = {case for case, row in results.items() if row["outcome"] == "passed"}
    assert passed == {"device/identity", "operators/layer_norm/fp32/4x8"}
    assert "--isolate" in done.stdout


@pytest.mark.grid
def test_commands_that_failures_print_ask_that_case_again_and_fail_again(plugins: Path) -> None:
    package = plugins / "anychip_badchip" / "__init__.py"
    wrong = "return gelu.forward(x, approximate=approximate)"
    text = package.read_text().replace("time.sleep(600)", f"{wrong} * (1.0 + 1e-3)")
    text = text.replace("if BAD:\n            print", "if False:\n            print")
    refusing = "    def synchronize(self, index=None):\n        raise RuntimeError('no driver')\n\n"
    package.write_text(text.replace("    def identity", f"{refusing}    def identity"))
    listed = plugins / "a list.toml"
    listed.touch()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(plugins)}

    def ask(command: str) -> tuple[int, str]:
        done = subprocess.run(command, shell=True, env=variables, capture_output=True, text=True)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout

    cases = ["device/synchronize", "operators/gelu/fp32/17.none", "operators/swiglu/fp32/17"]
    words = f'-k "{" or ".join(cases)}" --seed 2 --isolate --limit 60'
    code, said = ask(
        f"anychip conformance --backend badchip --expectations '{listed}' {words}"
    )  # fmt: skip
    again = [line.partition("again: ")[2] for line in said.splitlines() if "again: " in line]
    assert (code, len(again)) == (1, 3), said
    assert again[2].endswith('"operators/swiglu/fp32/17" --seed 2 --isolate --limit 60')
    for case, command in zip(cases, again, strict=True):
        code, said = ask(command)
        assert code == 1, said
        assert "level quick, seed 2: backend badchip" in said
        assert f"FAILED {case}\n" in said
        assert f"again: {command}\n" in said
        assert f"{case.partition('/')[0]}: 1 cases, 1 failed" in said
        assert said.count(" cases, ") == 1


@pytest.mark.grid
def test_expected_crash_and_hang_are_run_in_isolation_only(plugins: Path) -> None:
    listed = plugins / "list.toml"
    listed.write_text(
        '[[expected_failure]]\ncase = "operators/rms_norm/*"\nreason = "null pointer"\n'
        'until = "9.9"\ncrash = true\n'
        '[[expected_failure]]\ncase = "operators/gelu/*"\nreason = "waits for ever"\n'
        'until = "9.9"\ncrash = true\n'
    )
    select = "operators/rms_norm/fp32/4x8 or operators/gelu/fp32/17.none"
    for option in ([], ["--isolate", "--limit", "8"]):
        done = run(
            plugins, "anychip", "conformance", "--backend", "badchip", "--expectations",
            str(listed), "-k", select, *option,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "expected failure: 1 case: null pointer" in done.stdout
        assert "expected failure: 1 case: waits for ever" in done.stdout


@pytest.mark.grid
def test_pytest_front_gives_an_item_per_case(plugins: Path) -> None:
    done = run(
        plugins, "pytest", "-q", "-p", "no:cacheprovider", "-p", "anychip.conformance.plugin",
        "--pyargs", "anychip.conformance", "--backend", "goodchip", "-k", "device or 3x17",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" in done.stdout  # streams are not declared


@pytest.mark.grid
def test_pytest_front_shows_the_explanation_of_a_failure(plugins: Path) -> None:
    with (plugins / "anychip_goodchip" / "__init__.py").open("a") as module:
        module.write("table.forward('soft_max')(crashing)\n")
    listed = plugins / "list.toml"
    listed.write_text('[[expected_failure]]\ncase = "device/identity"\nreason = "r"\nuntil = "9"\n')
    done = run(
        plugins, "pytest", "-q", "-p", "no:cacheprovider", "-p", "anychip.conformance.plugin",
        "--pyargs", "anychip.conformance", "--backend", "goodchip", "-k", "identity",
        "--expectations", str(listed),
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UNEXPECTED PASS device/identity" in done.stdout
    command = f"anychip conformance --backend goodchip --expectations {listed}"
    assert f'{command} -k "device/identity"' in done.stdout
    assert "FAILED device/rows" in done.stdout
    assert "did you mean 'softmax'?" in done.stdout


@pytest.mark.grid
@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["--backend", "goodchip", "--chapter", "serving"], 2, "there is no chapter 'serving'"),
    (["--backend", "goodchip", "-k", "a and ("], 2, "expected, got"),
    (["--backend", "goodchip", "--html", "none/x.html"], 2, "there is no folder"),
    (["--backend", "goodchip", "--junit", "none/x.xml"], 2, "there is no folder"),
    (["--backend", "goodchip", "verify", "list.toml"], 2, "--backend has no effect"),
    (["--backend", "goodchip", "--json", "none/x.json"], 2, "there is no folder"),
    (["--backend", "goodchip", "--expectations", "none.toml"], 2, "none.toml"),
    (["--backend", "goodship"], 2, "goodchip"), (["--backend", "npu"], 3, "cannot run here"),
])  # fmt: skip
def test_wrong_use_is_one_message_and_the_right_exit_code(
    plugins: Path, arguments: list[str], code: int, words: str
) -> None:
    done = run(plugins, "anychip", "conformance", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


THIRD_PARTY = """
import torch
import anychip
from anychip import conformance
from anychip.contract import Bound, Cost, OperatorSpec, Sample

SLIP = 0.0

def forward(x):
    # float64, in which the suite runs the reference as its oracle, does not share the slip.
    slip = SLIP * (x.dtype != torch.float64)
    return (2.0 * x.float().square() * (1.0 + slip)).to(x.dtype).contiguous()

anychip.register(OperatorSpec(
    name="twice_square",
    namespace="acme",
    signature="(Tensor x) -> Tensor",
    equation="y = 2 x^2",
    source="a test",
    forward=forward,
    fake=lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=lambda grad, x, *, needs: ((4.0 * x.float() * grad.float()).to(x.dtype),),
    saved=("x",),
    differentiable=("x",),
    samples=lambda make: [
        Sample((make.normal(5, 7),), {}, "5x7, normal"), Sample((make.normal(3),), {}, "3")
    ],
    cost=lambda x: Cost(0, 0),
    bound=Bound(forward=2, backward=3, length=lambda *_, **__: 1),
))
report = conformance.run("goodchip", select="twice_square")
assert report.passed, [report.explain(r) for r in report.failures]
assert report.references == ("twice_square",), report.references
assert len(report.results) >= 20
SLIP = 1e-5
assert not conformance.run("goodchip", select="twice_square and operators").passed
"""


@pytest.mark.grid
def test_operator_of_a_third_party_is_compared_with_its_reference_in_float64(plugins: Path) -> None:
    (plugins / "script.py").write_text(THIRD_PARTY)
    done = run(plugins, "script")
    assert done.returncode == 0, done.stdout + done.stderr
