"""Which backend serves? An argument, ANYCHIP_BACKEND, the config, or the one that is ready.

A backend that is asked for by name is imported directly and runs or raises; it is never replaced
by another. Every choice leaves a :class:`Decision` with what became of each candidate.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from anychip.contract import (
    HOST,
    AmbiguousBackendError,
    Backend,
    BackendUnavailableError,
    Candidate,
    Decision,
    UnknownBackendError,
    UnsupportedError,
)
from anychip.registry import environment
from anychip.registry.discovery import TORCH_DEFAULT, Plugin, backend_plugins, library
from anychip.registry.instances import ready_instance, torch_default, unavailable
from anychip.registry.table import BackendRecord, answer_of, conflict, record, survey

SHAPES_ONLY = "meta"
"""torch's device type of tensors without data."""

_HOW_TO_CHOOSE = "choose one: pass its name or set ANYCHIP_BACKEND"


def backends(*, use_cache: bool = True) -> list[BackendRecord]:
    """Every plugin found: what it answers, and whether a choice without an argument takes it.

    Plugins are probed in child processes; their code does not run in this one.

    Args:
        use_cache: answers of earlier processes are shown, with their age, as long as nothing that
            they depend on has changed. ``choose`` asks anew.

    Raises:
        AmbiguousBackendError: this process is one of several workers of a job; they do not probe.
    """
    records = survey(use_cache=use_cache)
    try:
        chosen = forecast(records).name
    except (UnknownBackendError, AmbiguousBackendError, BackendUnavailableError, UnsupportedError):
        return records
    return [replace(record, chosen=record.name == chosen) for record in records]


def require(name: str) -> str:
    """Asks a backend for others to use it, in a child process but for the host's: of chips that
    are each in a process of its own none is loaded here.

    Returns:
        The name by which every process on this machine finds it.

    Raises:
        UnknownBackendError, AmbiguousBackendError, BackendUnavailableError: as :func:`choose`.
    """
    plugin = resolve(name)
    answer = ready_instance(plugin)[1] if plugin.name == HOST else answer_of(plugin)
    if answer.status != "ready":
        raise unavailable(plugin.name, answer)
    return plugin.name


def take_device(chip: Backend, number: int | None = None) -> None:
    """Makes the worker's own device current: its number on this machine counts devices.

    Nothing is to be done for a process that no launcher started, and where there is one device: the
    ranks of a host share it, and transports refuse two ranks on one accelerator by themselves.

    Args:
        number: of the worker among those of this machine that have this chip; None: all have.

    Raises:
        BackendUnavailableError: there are fewer devices than workers.
    """
    rank, count = environment.local_rank(), chip.device_count()
    if rank is None or count <= 1:
        return
    rank = rank if number is None else number
    if rank >= count:
        reason = f"rank {rank} of this machine has no device: there are {count}"
        fix = f"start at most {count} ranks on this machine"
        raise BackendUnavailableError(chip.name, "unavailable", reason, fix)
    chip.set_device(rank)


def forecast(records: Sequence[BackendRecord]) -> Decision:
    """What ``choose()`` would decide, given a table; imports nothing.

    Raises:
        The errors of :func:`choose`, as far as the table can tell.
    """
    named = environment.backend_name()
    if named is None:
        chosen, why = _pick(records)
        candidates = [_weighed(record, chosen, why) for record in records]
        return Decision(name=chosen.name, asked_by="automatic", candidates=tuple(candidates))
    plugin = resolve(named)
    if plugin.is_library:
        records = [*records, record(plugin, answer_of(plugin))]
    chosen = next(record for record in records if record.name == plugin.name)
    if chosen.status != "ready":
        raise BackendUnavailableError(named, chosen.status, chosen.reason, chosen.fix)
    candidates = [_weighed(record, chosen, chosen.reason) for record in records]
    return Decision(name=named, asked_by="environment", candidates=tuple(candidates))


def choose(name: str | None = None, *, config: str | None = None) -> Backend:
    """The backend to use: ``name``, else ANYCHIP_BACKEND, else ``config``, else automatic.

    Automatic is the one accelerator that is ready now; without one, the backend ``cpu``. The same
    name gives the same object throughout a process; its ``decision`` is that of the latest choice.

    Raises:
        UnknownBackendError: no plugin has this name; the nearest one is suggested.
        AmbiguousBackendError: two accelerators are ready, two distributions claim the name, or this
            process is one of several workers and no name was given.
        BackendUnavailableError: the backend cannot run here; says why and what helps.
    """
    if name is not None:
        return _choose_named(name, "argument")
    if (named := environment.backend_name()) is not None:
        return _choose_named(named, "environment")
    return _choose_automatic() if config is None else _choose_named(config, "config")


def owner(device_type: str) -> Backend:
    """Who serves tensors of a device type that nobody has chosen a backend for.

    The plugin of that very name, else the one plugin that is ready for the type, else the
    contract's defaults (backend ``torch``).

    Raises:
        AmbiguousBackendError: two plugins are ready for the type.
    """
    if device_type == SHAPES_ONLY:
        why = "tensors of this type have no data, and no chip serves them"
        return _decided(
            torch_default(device_type), "device type", [_candidate(TORCH_DEFAULT, True, why)]
        )
    claimants = backend_plugins().get(device_type, [])
    if len(claimants) == 1:
        try:
            backend, answer = ready_instance(claimants[0])
        except BackendUnavailableError:
            pass  # the survey below says so in the decision
        else:
            if backend.device_type == device_type:
                why = f"its name is that of the device type; {answer.reason}"
                return _decided(backend, "device type", (_candidate(claimants[0], True, why),))
    return _owner_by_probe(device_type)


def resolve(name: str) -> Plugin:
    """The one plugin of a name, or of the path of a C library.

    Raises:
        UnknownBackendError, AmbiguousBackendError: as :func:`choose`.
    """
    if "/" in name or name.endswith(".so"):
        return library(name)
    claims = backend_plugins()
    if name not in claims:
        near = difflib.get_close_matches(name.lower(), claims, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(
            f"no installed plugin provides a backend named {name!r}{hint} "
            f"(installed: {', '.join(claims)})"
        )
    if len(claims[name]) > 1:
        raise AmbiguousBackendError(conflict(claims[name]))
    return claims[name][0]


def _choose_named(name: str, asked_by: Literal["argument", "environment", "config"]) -> Backend:
    plugin = resolve(name)
    backend, answer = ready_instance(plugin)
    candidates = [
        _candidate(p, True, answer.reason) if p == plugin else _candidate(p, False, "not asked for")
        for claimants in backend_plugins().values()
        for p in claimants
    ]
    if plugin.is_library:
        candidates.append(_candidate(plugin, True, answer.reason))
    return _decided(backend, asked_by, candidates)


def _choose_automatic() -> Backend:
    records = survey(use_cache=False)
    chosen, why = _pick(records)
    backend, _ = ready_instance(resolve(chosen.name))
    return _decided(backend, "automatic", [_weighed(r, chosen, why) for r in records])


def _pick(records: Sequence[BackendRecord]) -> tuple[BackendRecord, str]:
    """The automatic choice, and why it is the one."""
    accelerators = [r for r in records if r.status == "ready" and r.kind == "accelerator"]
    if len(accelerators) > 1:
        found = ", ".join(f"{r.name} ({r.reason})" for r in accelerators)
        raise AmbiguousBackendError(
            f"{len(accelerators)} accelerators are ready: {found}; {_HOW_TO_CHOOSE}"
        )
    if accelerators:
        return accelerators[0], f"the one accelerator that is ready, {accelerators[0].reason}"
    hosts = [r for r in records if r.name == HOST]
    if len(hosts) == 1 and hosts[0].status == "ready":
        return hosts[0], f"no accelerator is ready; {hosts[0].reason}"
    if hosts:
        raise BackendUnavailableError(HOST, hosts[0].status, hosts[0].reason, hosts[0].fix)
    raise BackendUnavailableError(
        HOST,
        "unavailable",
        "no accelerator is ready and no plugin of this name is installed",
        fix="install anychip with pip; a source tree on PYTHONPATH has no entry points",
    )


def _owner_by_probe(device_type: str) -> Backend:
    records = survey(use_cache=False)
    serving = [
        r
        for r in records
        if r.status == "ready" and r.device_type == device_type and r.name != TORCH_DEFAULT.name
    ]
    if len(serving) > 1:
        names = ", ".join(r.name for r in serving)
        raise AmbiguousBackendError(
            f"tensors on {device_type!r} could be served by {names}; "
            "choose one with anychip.use(name) or ANYCHIP_BACKEND"
        )
    if serving:
        backend, _ = ready_instance(resolve(serving[0].name))
        why = f"the one plugin that is ready for {device_type!r}"
        return _decided(backend, "device type", [_weighed(r, serving[0], why) for r in records])
    default = _candidate(TORCH_DEFAULT, True, f"no plugin is ready for {device_type!r}")
    others = [_weighed(r, None, "") for r in records if r.name != TORCH_DEFAULT.name]
    return _decided(torch_default(device_type), "device type", [*others, default])


def _weighed(record: BackendRecord, chosen: BackendRecord | None, why: str) -> Candidate:
    """What became of a record in a choice among all of them."""
    if record is not chosen:
        other = "another one was chosen; " if record.status == "ready" else ""
        why = other + record.reason
    return replace(_candidate(record, record is chosen, why), status=record.status)


def _candidate(found: Plugin | BackendRecord, accepted: bool, why: str) -> Candidate:
    """A plugin in a choice that did not look at the others."""
    return Candidate(
        name=found.name, accepted=accepted, why=why, status="ready" if accepted else None,
        distribution=found.distribution, version=found.version,
    )  # fmt: skip


def _decided(
    backend: Backend,
    asked_by: Literal["argument", "environment", "config", "automatic", "device type"],
    candidates: Iterable[Candidate],
) -> Backend:
    """``backend`` with its decision; who owns a device type does not replace a user's choice."""
    if asked_by != "device type" or backend.decision is None:
        candidates = tuple(candidates)
        name = next(candidate.name for candidate in candidates if candidate.accepted)
        backend.decision = Decision(name=name, asked_by=asked_by, candidates=candidates)
    return backend
