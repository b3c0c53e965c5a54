"""The child's side of a probe: loads one plugin, asks it, writes the answer to a file, ends.

The answer goes to a file because stdout and stderr belong to the plugin, which may flood them.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, NoReturn

from anychip.contract import Backend, ContractError, Finding, OperatorTable, Probe
from anychip.registry import extensions
from anychip.registry.discovery import BACKENDS, Plugin, kernel_pack_plugins
from anychip.registry.kernel_packs import pack_tables
from anychip.registry.loading import LoadError, ask, describe, load, one_line


def main(request: Mapping[str, Any]) -> NoReturn:
    """Answers ``request``, as :mod:`.probing` writes it, and ends the process.

    The answer appears under its name complete or not at all. Threads that the plugin left and its
    exit handlers have no say: the process ends at once.
    """
    answer_file = Path(request["answer_file"])
    unfinished = answer_file.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(_answer(request)), encoding="utf-8")
    unfinished.replace(answer_file)
    os._exit(0)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    plugin = Plugin(
        group=BACKENDS,
        **{key: request[key] for key in ("name", "module", "distribution", "version", "problem")},
    )
    findings: list[Finding] = []
    faults: list[str] = []
    trace = None
    try:
        backend = load(plugin)
        probe = ask(backend)
        if request["examine"]:
            findings = _diagnose(backend)
            # A torch that failed to start has left parts of itself, and cannot be started again.
            if "torch" in sys.modules or "torch._C" not in sys.modules:
                faults = _faults(backend, findings, request["examine"])
    except LoadError as error:
        probe = error.probe
        trace = _traceback(error.__cause__)
    except BaseException as error:
        # KeyboardInterrupt, GeneratorExit or a type of the plugin's own: an answer like the others.
        probe, trace = Probe.broken(describe(error)), _traceback(error)
    if extensions.failure(probe.reason):  # of another plugin, which says nothing about this one
        extensions.restart_without(sys.orig_argv[1:])
    return {"probe": probe.to_json(), "findings": findings, "faults": faults, "traceback": trace}


def _diagnose(backend: Backend) -> list[Finding]:
    try:
        return [
            Finding(bool(ok), one_line(str(text)), fix if fix is None else one_line(str(fix)))
            for ok, text, fix in backend.diagnose()
        ]
    except (Exception, SystemExit) as error:
        return [Finding(False, f"diagnose() raised {describe(error)}")]


def _faults(backend: Backend, findings: list[Finding], examine: str) -> list[str]:
    """What is wrong with the backend's table and its packs; what is right joins the findings."""
    find: Callable[[Iterable[OperatorTable]], list[str]] = EntryPoint("", examine, "").load()
    tables, faults = {f"the table of {backend.name}": [backend.operators]}, []
    for pack in kernel_pack_plugins(backend):
        try:
            tables[f"kernel pack {pack.name}, from {pack}"] = pack_tables(pack, backend)
        except ContractError as error:
            faults.append(one_line(str(error)))
    for name, some in tables.items():
        found = find(some)
        faults += [one_line(f"{name}: {fault}") for fault in found]
        if not found:
            count = sum(map(len, some))
            findings.append(Finding(True, f"{name}: {count} rows, which fit their operators"))
    return faults


def _traceback(error: BaseException | None) -> str | None:
    return "".join(traceback.format_exception(error)) if error else None
