"""What can run here? One record for every plugin found, from probes in child processes or a cache.

Which of them is chosen is the business of :mod:`.choice`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from anychip.contract import Kind, Probe, Status
from anychip.registry import environment, fingerprint, probe_cache, probing
from anychip.registry.discovery import TORCH_BACKEND, Plugin, backend_plugins


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendRecord:
    """One line of the table of backends.

    Attributes:
        name: the backend's name.
        status: ready, unavailable (no device or driver), incompatible (versions) or broken.
        reason: one line; for a ready backend what it found.
        fix: the command or step that helps, or None.
        kind: accelerator or host; None unless the backend is ready.
        device_type: torch's name of the devices it serves; None when it is not known.
        device_count: devices found.
        distribution, version: who brings the plugin.
        module: the plugin's module.
        chosen: this is the backend that a choice without an argument takes.
        age_s: seconds since it answered, when that was in an earlier process; None: just now.
    """

    name: str
    status: Status
    reason: str
    fix: str | None
    kind: Kind | None
    device_type: str | None
    device_count: int
    distribution: str
    version: str
    module: str
    chosen: bool = False
    age_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return asdict(self)


def survey(*, use_cache: bool) -> list[BackendRecord]:
    """A record for every plugin, sorted by name; none is marked as chosen.

    Args:
        use_cache: for showing; a choice asks anew.

    Raises:
        AmbiguousBackendError: this process is one of several workers.
        ContractError: this process is itself a probe.
    """
    environment.require_probing_allowed()
    claims = backend_plugins()
    answers = _answers([c[0] for c in claims.values() if len(c) == 1], use_cache=use_cache)
    records: list[BackendRecord] = []
    for claimants in claims.values():
        if len(claimants) > 1:
            records += conflict_records(claimants)
        else:
            records.append(record(claimants[0], *answers[claimants[0]]))
    return _without_claimed_torch(records)


def record(plugin: Plugin, answer: Probe, age_s: float | None = None) -> BackendRecord:
    """The line for a plugin and its answer."""
    is_ready = answer.status == "ready"
    return BackendRecord(
        name=plugin.name, status=answer.status, reason=answer.reason, fix=answer.fix,
        kind=answer.kind if is_ready else None, device_type=answer.device_type or None,
        device_count=answer.device_count if is_ready else 0, distribution=plugin.distribution,
        version=plugin.version, module=plugin.module, age_s=age_s,
    )  # fmt: skip


def conflict(claimants: Sequence[Plugin]) -> str:
    """Why a name with several claimants cannot be used."""
    return (
        f"{len(claimants)} distributions claim the name {claimants[0].name!r}: "
        f"{', '.join(map(str, claimants))}; uninstall all but one"
    )


def conflict_records(claimants: Sequence[Plugin]) -> list[BackendRecord]:
    """A line for each claimant of one name."""
    return [record(plugin, Probe.broken(conflict(claimants))) for plugin in claimants]


def answer_of(plugin: Plugin) -> Probe:
    """The answer of one plugin, given just now in a child process."""
    return _answers([plugin], use_cache=False)[plugin][0]


def _answers(
    plugins: Sequence[Plugin], *, use_cache: bool
) -> dict[Plugin, tuple[Probe, float | None]]:
    """The answer of each plugin, and its age if it is from the cache."""
    around = fingerprint.surroundings()
    keys = {plugin: fingerprint.fingerprint(plugin, around) for plugin in plugins}
    known = probe_cache.read() if use_cache else {}
    answers: dict[Plugin, tuple[Probe, float | None]] = {
        plugin: known[key] for plugin, key in keys.items() if key in known
    }
    unknown = [plugin for plugin in plugins if plugin not in answers]
    if unknown:
        fresh = {p: a.probe for p, a in zip(unknown, probing.probe_all(unknown), strict=True)}
        # Also with use_cache=False: what was just seen is better than what the file has.
        probe_cache.write({keys[plugin]: probe for plugin, probe in fresh.items()})
        answers |= {plugin: (probe, None) for plugin, probe in fresh.items()}
    return answers


def _without_claimed_torch(records: list[BackendRecord]) -> list[BackendRecord]:
    """Takes the ``torch`` backend back where a plugin serves the same devices."""
    servers = {
        r.device_type: r.name for r in records if r.status == "ready" and r.name != TORCH_BACKEND
    }
    return [
        replace(
            r,
            status="unavailable",
            reason=f"the backend {servers[r.device_type]} serves torch's {r.device_type!r} devices",
            kind=None,
            device_count=0,
        )
        if r.name == TORCH_BACKEND and r.status == "ready" and r.device_type in servers
        else r
        for r in records
    ]
