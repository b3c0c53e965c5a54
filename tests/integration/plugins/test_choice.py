"""Which backend a process gets: precedence, decision records, device types nobody chose for."""

import json
from typing import Any

import pytest

from tests.integration.plugins.environments import READY_ACCELERATOR, Environment

CHOOSE = """
import dataclasses, json, sys
from anychip import registry
backend = registry.choose({arguments})
again = registry.choose(backend.name)
decision = dataclasses.asdict(backend.decision)
imported = sorted(name for name in sys.modules if name.startswith("plugin_"))
print(json.dumps({{"name": backend.name, "same": again is backend, "imported": imported}}))
"""
DECISION = """
import dataclasses, json
from anychip import registry
backend = registry.choose({arguments})
print(json.dumps(dataclasses.asdict(backend.decision)))
"""
TORCH_ADAPTER = """
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

def autoload():
    _setup_privateuseone_for_python_backend("acme")
"""


def _decision(environment: Environment, arguments: str = "", **variables: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(
        environment.run_code(DECISION.format(arguments=arguments), **variables)
    )
    return answer


def _error(environment: Environment, code: str, **variables: str) -> str:
    """The last line of the traceback of code that must fail."""
    done = environment.run("-c", code, **variables)
    assert done.returncode == 1, done.stdout
    lines = [line for line in done.stderr.splitlines() if line.startswith("anychip.contract")]
    return lines[-1]


@pytest.fixture
def fakes(environment: Environment) -> Environment:
    """A host, two other hosts, and an accelerator that is not there."""
    environment.add_good("cpu")
    environment.add_good("one")
    environment.add_good("two")
    environment.add_good("absent", 'Probe.unavailable("no device", fix="plug one in")')
    return environment


@pytest.mark.parametrize(("arguments", "variable", "expected", "asked_by"), [
    pytest.param('"one", config="cpu"', "two", "one", "argument", id="argument_beats_all"),
    pytest.param('config="one"', "two", "two", "environment", id="environment_beats_config"),
    pytest.param('config="one"', "", "one", "config", id="config_beats_automatic"),
    pytest.param("", "", "cpu", "automatic", id="automatic_is_cpu"),
])  # fmt: skip
def test_choose_with_several_wishes_takes_the_first_of_the_order(
    fakes: Environment, arguments: str, variable: str, expected: str, asked_by: str
) -> None:
    decision = _decision(fakes, arguments, ANYCHIP_BACKEND=variable)
    assert (decision["name"], decision["asked_by"]) == (expected, asked_by)


def test_choose_named_leaves_the_others_alone_and_says_so(fakes: Environment) -> None:
    answer = json.loads(
        fakes.run_code(CHOOSE.format(arguments='"one"'), ANYCHIP_PROBE_TIMEOUT="0.001")
    )  # no probe would answer
    assert answer == {"name": "one", "same": True, "imported": ["plugin_one"]}
    candidates = {c["name"]: c for c in _decision(fakes, '"one"')["candidates"]}
    assert candidates["one"]["accepted"]
    assert candidates["one"]["distribution"] == "plugin-one"
    assert candidates["two"] == {
        "name": "two", "accepted": False, "why": "not asked for", "status": None,
        "distribution": "plugin-two", "version": "1.0",
    }  # fmt: skip


def test_choose_automatic_records_every_candidate_with_its_reason(fakes: Environment) -> None:
    decision = _decision(fakes)
    why = {c["name"]: (c["accepted"], c["status"], c["why"]) for c in decision["candidates"]}
    assert why == {
        "absent": (False, "unavailable", "no device"),
        "cpu": (True, "ready", "no accelerator is ready; 1 device"),
        "one": (False, "ready", "another one was chosen; 1 device"),
        "torch": (False, "unavailable", "torch reports no accelerator"),
        "two": (False, "ready", "another one was chosen; 1 device"),
    }


def test_choose_backend_that_cannot_run_raises_and_takes_no_other(fakes: Environment) -> None:
    code = 'from anychip import registry; registry.choose("absent")'
    expected = "backend 'absent' cannot run here (unavailable): no device"
    assert expected in _error(fakes, code)
    from_variable = "from anychip import registry; registry.choose()"
    assert expected in _error(fakes, from_variable, ANYCHIP_BACKEND="absent")


def test_choose_asks_anew_whatever_was_answered_before(fakes: Environment) -> None:
    # Nothing that the fingerprint looks at tells that the device came, and went away.
    fakes.add_good(
        "fast",
        'Probe.ready(1) if __import__("os").environ["CHIP"] == "in" else '
        'Probe.unavailable("pulled out")',
    )
    assert _decision(fakes, CHIP="none")["name"] == "cpu"
    (chosen,) = (c for c in _decision(fakes, CHIP="in")["candidates"] if c["accepted"])
    assert chosen["name"] == "fast"
    assert chosen["why"] == "the one accelerator that is ready, 1 device"
    decision = _decision(fakes, CHIP="out")
    assert decision["name"] == "cpu"
    fast = next(c for c in decision["candidates"] if c["name"] == "fast")
    assert (fast["status"], fast["why"]) == ("unavailable", "pulled out")
    fakes.anychip("backends", CHIP="in")
    assert _decision(fakes, CHIP="out")["name"] == "cpu"


@pytest.mark.grid
@pytest.mark.parametrize("call", ["choose()", "backends()", 'owner("xpu")'])
def test_worker_without_a_name_does_not_probe_and_says_what_to_set(
    fakes: Environment, call: str
) -> None:
    error = _error(
        fakes, f"from anychip import registry; registry.{call}", WORLD_SIZE="4", LOCAL_RANK="1"
    )
    assert "a worker (WORLD_SIZE=4) does not look for one by itself" in error
    assert "set ANYCHIP_BACKEND=<name> for all workers" in error


@pytest.mark.parametrize(("arguments", "variables"), [
    pytest.param('"one"', {}, id="argument"),
    pytest.param("", {"ANYCHIP_BACKEND": "one"}, id="environment"),
])  # fmt: skip
def test_worker_that_is_told_the_name_gets_it_without_a_probe(
    fakes: Environment, arguments: str, variables: dict[str, str]
) -> None:
    assert _decision(fakes, arguments, WORLD_SIZE="4", LOCAL_RANK="1", **variables)["name"] == "one"
    assert not fakes.cache.exists()


def test_only_worker_of_its_job_may_choose_by_itself(fakes: Environment) -> None:
    assert _decision(fakes, WORLD_SIZE="1", LOCAL_RANK="0")["name"] == "cpu"


OWNER = """
import json, sys
from anychip import registry
backend = registry.owner({device_type!r})
decision = backend.decision
chosen = next(c for c in decision.candidates if c.accepted)
facts = [backend.name, backend.device_type, decision.asked_by, *registry.provenance_of(backend)]
print(json.dumps([facts, len(backend.operators), chosen.why]))
"""


def test_owner_is_the_plugin_of_the_device_types_name_without_a_probe_of_others(
    fakes: Environment,
) -> None:
    output = fakes.run_code(OWNER.format(device_type="cpu"), ANYCHIP_PROBE_TIMEOUT="0.001")
    facts, _, why = json.loads(output)
    assert facts == ["cpu", "cpu", "device type", "plugin-cpu", "1.0"]
    assert why == "its name is that of the device type; 1 device"


def test_owner_without_a_plugin_of_that_name_is_the_one_that_is_ready(fakes: Environment) -> None:
    fakes.add_good("fast", READY_ACCELERATOR, device_type="acme")
    facts, _, why = json.loads(fakes.run_code(OWNER.format(device_type="acme")))
    assert facts == ["fast", "acme", "device type", "plugin-fast", "1.0"]
    assert why == "the one plugin that is ready for 'acme'"


def test_owner_with_two_ready_plugins_raises_naming_both(fakes: Environment) -> None:
    fakes.add_good("fast", READY_ACCELERATOR, device_type="acme")
    fakes.add_good("faster", READY_ACCELERATOR, device_type="acme")
    error = _error(fakes, 'from anychip import registry; registry.owner("acme")')
    assert "tensors on 'acme' could be served by fast, faster" in error


def test_owner_without_any_plugin_is_the_default_without_operators(fakes: Environment) -> None:
    facts, rows, why = json.loads(fakes.run_code(OWNER.format(device_type="mkldnn")))
    assert facts[:4] == ["torch", "mkldnn", "device type", "anychip"]
    assert rows == 0
    assert why == "no plugin is ready for 'mkldnn'"


def test_owner_of_tensors_without_data_is_the_default_without_a_probe(fakes: Environment) -> None:
    code = OWNER.format(device_type="meta")
    facts, rows, _ = json.loads(fakes.run_code(code, WORLD_SIZE="2", LOCAL_RANK="0"))
    assert facts[:2] == ["torch", "meta"]
    assert rows == 0


def test_owner_of_a_chosen_backend_keeps_the_users_decision(fakes: Environment) -> None:
    code = """
    from anychip import registry
    backend = registry.choose("cpu")
    assert registry.owner("cpu") is backend
    print(backend.decision.asked_by)
    """
    assert fakes.run_code(code) == "argument\n"


@pytest.fixture
def torch_knows_acme(environment: Environment) -> Environment:
    """A torch extension that brings a device ``acme``, loaded by ``import torch``."""
    environment.add_good("cpu")
    environment.add_distribution("torch-acme", {"torch.backends": {"acme": "torch_acme:autoload"}})
    environment.add_module("torch_acme", TORCH_ADAPTER)
    return environment


@pytest.mark.grid
def test_accelerator_that_only_torch_knows_is_served_by_the_default(
    torch_knows_acme: Environment,
) -> None:
    code = """
    from anychip import registry
    backend = registry.choose()
    assert registry.owner("acme") is backend
    chosen = next(c for c in backend.decision.candidates if c.accepted)
    assert "torch's own support for 'acme'" in chosen.why, chosen.why
    print(backend.name, backend.device_type, backend.device(0), len(backend.operators))
    """
    assert torch_knows_acme.run_code(code) == "torch acme acme:0 0\n"


def test_accelerator_that_torch_and_a_plugin_know_is_served_by_the_plugin(
    torch_knows_acme: Environment,
) -> None:
    torch_knows_acme.add_good("fast", READY_ACCELERATOR, device_type="acme")
    decision = _decision(torch_knows_acme)
    assert decision["name"] == "fast"
    default = next(c for c in decision["candidates"] if c["name"] == "torch")
    assert default["why"] == "the backend fast serves torch's 'acme' devices"


def test_second_private_use_device_is_refused_before_its_plugin_is_imported(
    torch_knows_acme: Environment,
) -> None:
    torch_knows_acme.add_good("other", READY_ACCELERATOR, device_type="other")
    code = """
    import sys, torch
    from anychip import registry
    from anychip.contract import BackendUnavailableError
    try:
        registry.choose("other")
    except BackendUnavailableError as error:
        print(error)
    print("plugin_other" in sys.modules, registry.choose("cpu").name)
    """
    output = torch_knows_acme.run_code(code)
    assert "it needs torch's private-use device type for 'other'" in output
    assert "'acme' has it already" in output
    assert output.endswith("False cpu\n")
