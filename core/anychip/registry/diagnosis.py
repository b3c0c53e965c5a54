"""What was looked at, and what helps? The long answer about backends, for ``anychip doctor``.

Always fresh, never from the cache, and always from a child process, also for a named backend: what
a person wants to diagnose may well crash.
"""

from typing import NamedTuple

from anychip.contract import Finding
from anychip.registry import choice, probing, table
from anychip.registry.discovery import Plugin, backend_plugins


class Diagnosis(NamedTuple):
    """One backend, examined.

    Attributes:
        record: its line of the table.
        findings: what was looked at, in order.
        traceback: of the exception that made it broken, if there was one.
        faults: how many of the last findings are rows that serve nobody, or packs that do not load.
    """

    record: table.BackendRecord
    findings: tuple[Finding, ...]
    traceback: str | None
    faults: int = 0


def diagnose(name: str | None = None, *, examine: str) -> list[Diagnosis]:
    """Examines one backend, or all of them.

    Args:
        examine: ``module:function`` that finds the faults of tables; it runs in the child process.

    Raises:
        UnknownBackendError, AmbiguousBackendError: as :func:`anychip.registry.choose`.
    """
    if name is not None:
        plugins = [choice.resolve(name)]
    else:
        plugins = [claimants[0] for claimants in backend_plugins().values() if len(claimants) == 1]
    answers = probing.probe_all(plugins, examine=examine)
    examined = [_examined(p, answer) for p, answer in zip(plugins, answers, strict=True)]
    return examined if name is not None else [*examined, *_conflicts()]


def _examined(plugin: Plugin, answer: probing.Answer) -> Diagnosis:
    record = table.record(plugin, answer.probe)
    loads = record.status in ("ready", "unavailable")
    findings = [Finding(True, f"entry point {plugin.name} = {plugin.module}, from {plugin}")]
    if loads:
        findings.append(Finding(True, "its module imports, its hooks and contract version fit"))
    findings.append(
        Finding(record.status == "ready", f"{record.status}: {record.reason}", record.fix)
    )
    if answer.probe.depends:
        findings.append(Finding(True, f"this may change with {', '.join(answer.probe.depends)}"))
    faults = [Finding(False, fault) for fault in answer.faults]
    return Diagnosis(record, (*findings, *answer.findings, *faults), answer.traceback, len(faults))


def _conflicts() -> list[Diagnosis]:
    conflicts = [claimants for claimants in backend_plugins().values() if len(claimants) > 1]
    return [
        Diagnosis(record, (Finding(False, record.reason),), None)
        for claimants in conflicts
        for record in table.conflict_records(claimants)
    ]
