"""Runs cases on a backend and judges them: the engine behind command, pytest and ``run()``."""

import datetime
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import anychip
from anychip import registry
from anychip.conformance import expectations, isolation, side_by_side
from anychip.conformance.case import Case
from anychip.conformance.expectations import Entry
from anychip.conformance.formats import FORMATS
from anychip.conformance.hashes import distribution_hash, plugin_hash, suite_hash
from anychip.conformance.oracles import oracle_of
from anychip.conformance.planning import SuitePlan
from anychip.conformance.priorities import next_to_fix
from anychip.conformance.report import LIMIT_S, Identity, KernelPack, Report, Result, with_outcome
from anychip.contract import Backend
from anychip.dispatch.operator import registered
from anychip.registry.discovery import kernel_pack_plugins

OnResult = Callable[[Result], None]


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
    plan: SuitePlan,
    *,
    isolate: bool = False,
    jobs: int = 1,
    limit_s: float = LIMIT_S,
    on_result: OnResult | None = None,
) -> Report:
    """Runs every case of a plan.

    Args:
        isolate: in child processes, so that a crash or a hang is one failed case.
        jobs: with 2, and without ``isolate``, a child asks about gradients, optimizers and
            training while the rest is asked here, if there is much of it and the backend is
            installed.
        limit_s: seconds that a case may take in a child process.
        on_result: called after each case, in this thread.
    """
    anychip.provenance(reset=True)
    frame = empty_report(plan, limit_s)
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
        coverage=tuple(r.coverage for r in results if r.coverage is not None),
        provenance=served.to_json(),
    )


def empty_report(plan: SuitePlan, limit_s: float = LIMIT_S) -> Report:
    """A report of a plan without any result yet."""
    command = ["anychip", "conformance", "--backend", registry.name_of(plan.backend)]
    if plan.expectations_file is not None:
        command += ["--expectations", str(plan.expectations_file)]
    return Report(
        identity=identity(plan.backend),
        level=plan.level,
        chapters=plan.chapters,
        select=plan.select,
        seed=plan.seed,
        isolated=False,
        command=shlex.join(command),
        limit_s=limit_s,
        results=(),
        must_pass=(len(plan.must_pass.ids), plan.must_pass.hash),
        references=tuple(n for n, o in registered().items() if not oracle_of(o.spec).independent),
    )


def _crashes(plan: SuitePlan, case: Case) -> bool:
    entry = plan.entry(case)
    return entry is not None and entry.crash


def _not_run(plan: SuitePlan, case: Case) -> Result:
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
    packs = {(p.distribution, p.version) for p in kernel_pack_plugins(backend)}
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
