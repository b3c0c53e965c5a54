"""Operators that a plugin brings for somebody else's chip."""

import json

import pytest

from tests.integration.plugins.environments import Environment, good_plugin

PACK = """
from anychip.contract import OperatorTable, hookimpl
table = OperatorTable()

@table.forward("rms_norm")
def rms_norm(x, weight, *, eps):
    return backend_name

@hookimpl
def anychip_operators(backend):
    global backend_name
    backend_name = backend.name
    return {result}
"""
LOOK = """
import json, sys
from anychip import registry
packs = registry.kernel_packs(registry.choose("acme"))
found = [[len(table), [row.label for row in table], *origin] for table, *origin in packs]
print(json.dumps([found, sorted(name for name in sys.modules if name.startswith("pack_"))]))
"""


@pytest.fixture
def acme(environment: Environment) -> Environment:
    environment.add_good("acme")
    return environment


def _add_pack(environment: Environment, entry: str, module: str, source: str) -> None:
    groups = {"anychip.kernels": {entry: module}}
    environment.add_distribution(module.replace("_", "-"), groups, version="3.1")
    environment.add_module(module, source)


def test_packs_for_a_backend_are_loaded_by_name_and_others_are_not_imported(
    acme: Environment,
) -> None:
    _add_pack(acme, "acme.slow", "pack_b", PACK.format(result="[table, OperatorTable()]"))
    _add_pack(acme, "acme.fast", "pack_a", PACK.format(result="table"))
    _add_pack(acme, "acme.nothing", "pack_c", PACK.format(result="None"))
    _add_pack(acme, "other.fast", "pack_d", "raise RuntimeError('for another chip')")
    _add_pack(acme, "cpu.any", "pack_e", PACK.format(result="table"))
    found, imported = json.loads(acme.run_code(LOOK))
    assert found == [
        [1, ["pack_a.rms_norm"], "pack-a", "3.1"], [1, ["pack_b.rms_norm"], "pack-b", "3.1"],
        [0, [], "pack-b", "3.1"], [1, ["pack_e.rms_norm"], "pack-e", "3.1"],
    ]  # fmt: skip
    assert imported == ["pack_a", "pack_b", "pack_c", "pack_e"]


TABLE = PACK.format(result="table")
BROKEN = {
    "import_fails": ("acme.bad", "raise OSError('no lib')", "raised OSError: no lib"),
    "no_hook": ("acme.bad", "", "'pack_bad' has no hook anychip_operators(backend)"),
    "wrong_signature": ("acme.bad", TABLE.replace("(backend)", "(chip)"),
                        "a hook does not fit: PluginValidationError"),
    "not_a_table": ("acme.bad", PACK.format(result="[1]"), "must return OperatorTables, got int"),
    "hook_raises": ("acme.bad", PACK.format(result="1 / 0"),
                    "anychip_operators() raised ZeroDivisionError: division by zero"),
    "changes_a_setting": ("acme.bad",
                          f"import torch; torch.set_default_dtype(torch.float64){TABLE}",
                          "changed torch's default dtype from torch.float32 to torch.float64"),
    "no_pack_name": ("acme", TABLE, "its entry point must be named acme.<pack>"),
}  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(("entry", "source", "reason"), BROKEN.values(), ids=BROKEN)
def test_broken_pack_is_an_error_that_names_it(
    acme: Environment, entry: str, source: str, reason: str
) -> None:
    _add_pack(acme, entry, "pack_bad", source)
    done = acme.run("-c", LOOK)
    assert done.returncode == 1
    error = next(line for line in done.stderr.splitlines() if "ContractError: " in line)
    assert f"the kernel pack {entry!r} of pack-bad 3.1" in error
    assert reason in error


def test_pack_with_a_row_for_no_operator_is_an_error_that_names_the_nearest(
    acme: Environment,
) -> None:
    _add_pack(acme, "acme.bad", "pack_bad", TABLE.replace('"rms_norm"', '"rms_nrm"'))
    done = acme.run("-c", "import anychip; anychip.use('acme')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        "ContractError: the kernel pack pack-bad 3.1 has the row pack_bad.rms_norm, and no "
        "operator is named 'rms_nrm'; did you mean 'rms_norm'?; fix it, or uninstall pack-bad"
    )


def test_backend_that_changes_a_setting_of_torchs_is_an_error_that_names_it(
    environment: Environment,
) -> None:
    change = "import torch; torch.set_num_threads(7)"
    source = good_plugin("acme").replace("def probe(self):", f"def probe(self):\n        {change}")
    environment.add_plugin("acme", source)
    code = """
    import torch, anychip
    torch.set_num_threads(2)
    try:
        anychip.use("acme")
    except anychip.ContractError as error:
        print(error, torch.get_num_threads())
    """
    assert environment.run_code(code) == (
        "the backend 'acme' of plugin-acme 1.0 changed torch's number of threads from 2 to 7, "
        "which belongs to the user's program and is put back; leave it, or put it back before "
        "returning 2\n"
    )
