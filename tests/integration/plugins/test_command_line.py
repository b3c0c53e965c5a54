"""``anychip backends`` and ``anychip doctor`` in environments of real distributions."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.plugins.environments import READY_ACCELERATOR, Environment, good_plugin


@pytest.fixture
def fakes(environment: Environment) -> Environment:
    environment.add_good("cpu")
    answer = 'Probe.unavailable("no device", fix="plug one in").depending_on("ACME", "/dev/acme*")'
    environment.add_good("absent", answer)
    environment.add_plugin("bad", "raise RuntimeError('no [bold]library[/bold]')")
    return environment


def test_backends_as_json_keeps_to_the_documented_schema(fakes: Environment) -> None:
    done = fakes.anychip("backends", "--json")
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert set(answer) == {"schema", "backends", "decision", "problem"}
    assert answer["schema"] == 1
    assert answer["problem"] is None
    assert [record["name"] for record in answer["backends"]] == ["absent", "bad", "cpu", "torch"]
    assert answer["backends"][2] == {
        "name": "cpu", "status": "ready", "reason": "1 device", "fix": None, "kind": "host",
        "device_type": "cpu", "device_count": 1, "distribution": "plugin-cpu", "version": "1.0",
        "module": "plugin_cpu", "chosen": True, "age_s": None,
    }  # fmt: skip
    assert answer["decision"]["name"] == "cpu"
    assert answer["decision"]["asked_by"] == "automatic"
    assert [c["accepted"] for c in answer["decision"]["candidates"]] == [False, False, True, False]


def test_backends_for_people_shows_each_on_a_line_and_the_choice(fakes: Environment) -> None:
    done = fakes.anychip("backends")
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.replace("*", " ").splitlines() if line}
    assert "unavailable" in lines["absent"]
    assert "no [bold]library[/bold]" in lines["bad"]  # not taken as markup
    assert "ready" in lines["cpu"]
    assert "backend cpu (automatic: no accelerator is ready; 1 device)" in done.stdout
    assert "to fix absent: plug one in" in done.stdout


@pytest.mark.parametrize(("variable", "problem"), [
    pytest.param("cpuu", "did you mean 'cpu'?", id="unknown"),
    pytest.param("absent", "backend 'absent' cannot run here", id="cannot_run"),
])  # fmt: skip
def test_backends_with_a_wish_that_fails_says_so_and_chooses_nothing(
    fakes: Environment, variable: str, problem: str
) -> None:
    done = fakes.anychip("backends", "--json", ANYCHIP_BACKEND=variable)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    assert problem in answer["problem"]
    assert answer["decision"] is None
    assert not any(record["chosen"] for record in answer["backends"])


def test_backends_with_two_ready_accelerators_says_how_to_choose(fakes: Environment) -> None:
    fakes.add_good("fast", READY_ACCELERATOR)
    fakes.add_good("faster", READY_ACCELERATOR)
    done = fakes.anychip("backends")
    assert done.returncode == 0
    assert "nothing is chosen: 2 accelerators are ready: fast (2 devices), faster" in done.stdout
    assert "set ANYCHIP_BACKEND" in done.stdout


@pytest.mark.grid
@pytest.mark.parametrize(("name", "code", "texts"), [
    pytest.param("cpu", 0, ("ok  ready: 1 device", "ok  the table has no rows"), id="ready"),
    pytest.param(
        "absent", 3,
        ("no  unavailable: no device", "to fix it: plug one in", "change with ACME, /dev/acme*"),
        id="absent",
    ),
    pytest.param("bad", 3, ("no  broken: importing 'plugin_bad' raised",), id="broken"),
])  # fmt: skip
def test_doctor_for_a_name_says_what_was_looked_at_and_ends_with_its_code(
    fakes: Environment, name: str, code: int, texts: tuple[str, ...]
) -> None:
    done = fakes.anychip("doctor", name)
    assert done.returncode == code
    assert f"ok  entry point {name} = plugin_{name}, from plugin-{name} 1.0" in done.stdout
    for text in texts:
        assert text in done.stdout


PACK = """
from anychip.contract import OperatorTable, hookimpl
table = OperatorTable()
table.forward("rms_norm", limits={"hiden": range(9)})(lambda x, weight, *, eps: None)

@hookimpl
def anychip_operators(backend):
    return table
"""


def test_doctor_finds_rows_that_fit_no_operator_and_packs_that_do_not_load(
    fakes: Environment,
) -> None:
    source = good_plugin("acme").replace("OperatorTable()", "table", 1)
    row = "table.forward('soft_max')(lambda x: x)\n"
    head = "from anychip.contract import OperatorTable\ntable = OperatorTable()\n"
    fakes.add_plugin("acme", head + row + source)
    for name, code in (("pack_wrong", PACK), ("pack_gone", "raise OSError('no lib')")):
        fakes.add_distribution(name.replace("_", "-"), {"anychip.kernels": {f"acme.{name}": name}})
        fakes.add_module(name, code)
    done = fakes.anychip("doctor", "acme")
    assert done.returncode == 1, done.stdout
    faults = [line for line in done.stdout.splitlines() if line.startswith("  no  ")]
    assert len(faults) == 3, done.stdout
    assert "the kernel pack 'acme.pack_gone' of pack-gone 1.0" in faults[0]
    assert "raised OSError: no lib" in faults[0]
    assert "the table of acme: soft_max forward" in faults[1]
    assert "did you mean 'softmax'?" in faults[1]
    assert "kernel pack acme.pack_wrong, from pack-wrong 1.0: rms_norm forward" in faults[2]
    assert "limits speak of 'hiden'; did you mean 'hidden'?" in faults[2]


def test_doctor_asked_for_the_traceback_shows_where_a_plugin_raised(fakes: Environment) -> None:
    assert "Traceback" not in fakes.anychip("doctor", "bad").stdout
    shown = fakes.anychip("doctor", "bad", "--traceback").stdout
    assert "Traceback (most recent call last):" in shown
    assert "plugin_bad.py" in shown


def test_doctor_without_a_name_examines_all_and_succeeds(fakes: Environment) -> None:
    done = fakes.anychip("doctor")
    assert done.returncode == 0
    for name in ("absent", "bad", "cpu", "torch"):
        assert any(line.startswith(name) for line in done.stdout.splitlines())
    assert "operators  are called in " in done.stdout


@pytest.mark.grid
@pytest.mark.parametrize(("args", "code", "text"), [
    pytest.param(("doctor", "cpuu"), 2, "did you mean 'cpu'?", id="unknown_backend"),
    pytest.param(("bckends",), 2, "did you mean 'backends'?", id="unknown_command"),
    pytest.param(("backends", "--jsn"), 2, "--json", id="unknown_option"),
])  # fmt: skip
def test_wrong_use_is_one_message_without_a_traceback(
    fakes: Environment, args: tuple[str, ...], code: int, text: str
) -> None:
    done = fakes.anychip(*args)
    assert done.returncode == code
    assert done.stderr.startswith("anychip: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_wrong_use_with_debug_shows_the_traceback(fakes: Environment) -> None:
    for args, variables in ((("--debug",), {}), ((), {"ANYCHIP_DEBUG": "1"})):
        done = fakes.anychip("doctor", "cpuu", *args, **variables)
        assert done.returncode == 1
        assert "Traceback (most recent call last):" in done.stderr
        assert "UnknownBackendError" in done.stderr


def test_probe_time_limit_that_is_no_number_is_wrong_use(fakes: Environment) -> None:
    done = fakes.anychip("backends", "--no-cache", ANYCHIP_PROBE_TIMEOUT="soon")
    assert done.returncode == 2
    assert "ANYCHIP_PROBE_TIMEOUT must be a positive number of seconds, got 'soon'" in done.stderr


HANGS = """
import os, pathlib, time
pathlib.Path(os.environ["TEST_PID"]).write_text(str(os.getpid()))
time.sleep(1000)
"""


def test_interrupt_while_plugins_are_probed_ends_their_processes_too(
    environment: Environment, tmp_path: Path
) -> None:
    environment.add_plugin("hangs", HANGS)
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-m", "anychip", "backends"],
        env={**environment.variables(), "TEST_PID": str(pid_file), "ANYCHIP_PROBE_TIMEOUT": "500"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (pid_file.exists() and pid_file.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert (out, err.strip()) == ("", "anychip: interrupted")
    with pytest.raises(ProcessLookupError):  # the parent has reaped it
        os.kill(int(pid_file.read_text()), 0)
