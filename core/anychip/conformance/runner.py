"""Runs cases on a backend and judges them: the engine behind command, pytest and ``run()``."""

from __future__ import annotations

import datetime
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

import anychip
from anychip import registry, runtime
from anychip.conformance import expectations, expression
from anychip.conformance.case import (
    Case,
    CheckFailedError,
    Context,
    Level,
    undeclared_capability,
)
from anychip.conformance.chapters import all_cases, check_chapters, device
from anychip.conformance.expectations import Entry, Expectations
from anychip.conformance.formats import FORMATS
from anychip.conformance.hashes import distribution_hash, plugin_hash, suite_hash
from anychip.conformance.must_pass import MustPass, must_pass
from anychip.conformance.oracles import oracle_of
from anychip.conformance.report import (
    Identity,
    KernelPack,
    Outcome,
    Report,
    Result,
    with_outcome,
)
from anychip.contract import Backend, UnsupportedError
from anychip.dispatch import selection
from anychip.dispatch.operator import registered
from anychip.registry.discovery import kernel_pack_plugins

OnResult = Callable[[Result], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is to be run, on which backend, under which expectations."""

    backend: Backend
    level: Level
    chapters: tuple[str, ...]
    select: str
    cases: tuple[Case, ...]
    expected: Expectations
    stale: tuple[Entry, ...]
    version: str
    must_pass: MustPass
    seed: int = 0

    def entry(self, case: Case) -> Entry | None:
        """What the backend says about a case."""
        return self.expected.find(case.id)


def activate(backend: str | Backend | None) -> Backend:
    """The backend under test, serving its device type in this process.

    Raises:
        UnknownBackendError, BackendUnavailableError: as ``anychip.use``.
    """
    if not isinstance(backend, Backend):
        return anychip.use(backend)
    runtime.connect()
    selection.activate(backend)
    return backend


def plan(
    backend: Backend,
    *,
    level: Level = "quick",
    chapters: Iterable[str] = (),
    select: str = "",
    seed: int = 0,
    expectations_file: Path | None = None,
) -> Plan:
    """Which cases a run has.

    Raises:
        ValueError: no such chapter; not an expression; no case is selected; a malformed list.
    """
    named = check_chapters(chapters)
    context = Context(backend, level, seed)
    every = list(all_cases(context))
    _check_ids(every)
    asked = [c for c in every if c.chapter in named and (level == "full" or not c.full)]
    chosen = expression.select(asked, select)
    if not chosen:
        raise ValueError(_nothing(select, level, asked, every))
    if device.row_faults(backend):  # whatever was asked for: a row that is never called passes all
        chosen += [c for c in every if c.id == device.ROWS and c not in chosen]
    expected = expectations.load(backend, expectations_file)
    return Plan(
        backend=backend,
        level=level,
        chapters=named,
        select=select,
        cases=tuple(chosen),
        expected=expected,
        stale=tuple(expected.stale([case.id for case in every])),
        version=registry.provenance_of(backend)[1],
        must_pass=must_pass(every, backend, level),
        seed=seed,
    )


def _check_ids(cases: Sequence[Case]) -> None:
    seen: set[str] = set()
    for case in cases:
        assert case.id not in seen, f"two cases have the id {case.id}"
        seen.add(case.id)


def _nothing(select: str, level: Level, asked: Sequence[Case], every: Sequence[Case]) -> str:
    elsewhere = expression.select(every, select)
    hint = "`-k` words are parts of ids like " + (asked[0].id if asked else every[0].id)
    if elsewhere:
        first = elsewhere[0]
        hint = f"{first.id} is in chapter {first.chapter}"
        hint += ", at level full" if first.full and level == "quick" else ""
    return f"no case is selected by {select!r}; {hint}"


def run_case(case: Case, backend: Backend, level: Level, seed: int = 0) -> Result:
    """Asks one question, in this process; whatever is raised becomes a result."""
    context = Context(backend, level, seed)
    start = time.perf_counter()
    outcome: Outcome = "passed"
    reason = ""
    missing: str | None = None
    try:
        if case.capability is not None and case.capability not in backend.capabilities:
            outcome, missing = "unsupported", case.capability
        else:
            with nullcontext() if case.elsewhere else _clean_state(backend):
                case.run(context)
    except CheckFailedError as error:
        outcome, reason = "failed", str(error)
    except UnsupportedError as error:
        missing = undeclared_capability(error, backend)
        outcome, reason = ("unsupported", "") if missing else ("failed", describe(error))
    except Exception as error:
        outcome, reason = "failed", describe(error)
    return Result(
        case=case.id,
        outcome=outcome,
        reason=f"{missing} is not declared" if missing else reason,
        capability=missing,
        note=context.note,
        seconds=time.perf_counter() - start,
        call=context.call,
        served_by=context.served_by,
        measurements=tuple(context.measurements),
        curve=context.curve,
    )


@contextmanager
def _clean_state(backend: Backend) -> Iterator[None]:
    """Every case starts on device 0, from one random state, and leaves autograd as it was."""
    with suppress(Exception):  # a set_device that fails is for the device chapter to find
        backend.set_device(0)
    _seed(backend)
    with torch.enable_grad(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _seed(backend: Backend) -> None:
    # torch.manual_seed keeps a stack trace for each kind of device that has not started.
    if backend.is_host:
        torch.default_generator.manual_seed(0)
    else:
        torch.manual_seed(0)


def describe(error: BaseException) -> str:
    """An exception that no check raised: type, message, and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    where = "; ".join(f"{Path(f.filename).name}:{f.lineno} in {f.name}" for f in reversed(frames))
    return f"{type(error).__name__}: {error}\nraised at {where}"


def judge(result: Result, entry: Entry | None, version: str) -> Result:
    """The result in the light of what the backend says about the case."""
    if entry is None:
        return result
    if result.outcome == "passed" or (
        result.outcome == "unsupported" and entry.kind == "expected_failure"
    ):
        return with_outcome(
            result,
            "unexpected pass",
            f"it is listed as {entry.kind} ({entry.reason}), and it is {result.outcome}; take "
            f"{entry.case!r} out of the list, or narrow it to what fails",
        )
    if result.crashed and entry.kind == "unsupported":
        text = "a crash may be listed as an expected failure only, not as unsupported"
        return with_outcome(result, "failed", f"{result.reason}\n{text}")
    overdue = entry.expired(version, datetime.date.today())
    if overdue is not None:
        return with_outcome(result, "failed", f"{result.reason}\n{overdue}")
    if entry.kind == "unsupported":
        return with_outcome(result, "unsupported", entry.reason, entry.capability)
    return with_outcome(result, "expected failure", entry.reason)


def run_plan(
    plan: Plan,
    *,
    isolate: bool = False,
    jobs: int = 1,
    limit_s: float = 300.0,
    on_result: OnResult | None = None,
) -> Report:
    """Runs every case of a plan.

    Args:
        isolate: in child processes, so that a crash or a hang is one failed case.
        jobs: with 2, and without ``isolate``, a child asks about gradients while operators are
            asked here, if there are many of both and the backend is installed.
        limit_s: seconds that a case may take in a child process.
        on_result: called after each case, in this thread.
    """
    from anychip.conformance import isolation, side_by_side
    from anychip.conformance.priorities import next_to_fix

    anychip.provenance(reset=True)
    frame = empty_report(plan)
    started, start = datetime.datetime.now(datetime.timezone.utc), time.perf_counter()
    skipped = [c for c in plan.cases if not isolate and _crashes(plan, c)]
    to_run = [case for case in plan.cases if case not in skipped]
    served = isolation.Served()
    raw: Iterator[Result]
    if isolate:
        raw = isolation.run_isolated(plan, to_run, limit_s, served)
    else:
        raw = side_by_side.run_side_by_side(plan, to_run, jobs, limit_s, served)
    results = []
    for case, result in zip(to_run, raw, strict=True):
        results.append(judge(result, plan.entry(case), plan.version))
        if on_result is not None:
            on_result(results[-1])
    results = expectations.advised(results, plan.expected)
    served.add(anychip.provenance().to_json())
    served.add_idle(plan)
    results += [_not_run(plan, case) for case in skipped]
    results += [_stale(entry) for entry in plan.stale]
    return replace(
        frame,
        isolated=isolate,
        results=tuple(results),
        started=started.isoformat(timespec="seconds"),
        seconds=time.perf_counter() - start,
        next_to_fix=next_to_fix(results),
        provenance=served.to_json(),
    )


def empty_report(plan: Plan) -> Report:
    """A report of a plan without any result yet."""
    return Report(
        identity=identity(plan.backend),
        level=plan.level,
        chapters=plan.chapters,
        select=plan.select,
        seed=plan.seed,
        isolated=False,
        results=(),
        must_pass=(len(plan.must_pass.ids), plan.must_pass.hash),
        references=tuple(n for n, o in registered().items() if not oracle_of(o.spec).independent),
    )


def _crashes(plan: Plan, case: Case) -> bool:
    entry = plan.entry(case)
    return entry is not None and entry.crash


def _not_run(plan: Plan, case: Case) -> Result:
    entry = plan.entry(case)
    assert entry is not None
    reason = f"{entry.reason} (it ends the process: not run without --isolate)"
    return Result(case=case.id, outcome="expected failure", reason=reason)


def _stale(entry: Entry) -> Result:
    reason = f"{entry.kind} ({entry.reason}): no case has such an id; take it out of the list"
    return Result(case=entry.case, outcome="stale entry", reason=reason)


def identity(backend: Backend) -> Identity:
    """Which backend it is, for the report."""
    distribution, version = registry.provenance_of(backend)
    claimed = backend.properties().dtypes
    packs = {(p.distribution, p.version) for p in kernel_pack_plugins(backend.name)}
    return Identity(
        backend=backend.name,
        device_type=backend.device_type,
        device=backend.identity(),
        num_devices=backend.device_count(),
        distribution=distribution,
        version=version,
        api=backend.api,
        capabilities=dict(backend.capabilities),
        dtypes=tuple(format.name for dtype, format in FORMATS.items() if dtype in claimed),
        plugin_hash=plugin_hash(backend),
        suite_hash=suite_hash(),
        kernel_packs=tuple(
            KernelPack(name, number, distribution_hash(name)) for name, number in sorted(packs)
        ),
    )
