"""Runs cases in child processes: a segmentation fault or a hang is one failed case, not the end.

One child runs case after case and reports each. When it dies or takes too long, the case at hand
has failed, and a new child goes on with the next.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from anychip import registry
from anychip.children import STARTUP_S, Child, lines_of
from anychip.conformance.case import Case
from anychip.conformance.chapters import CHAPTERS
from anychip.conformance.planning import SuitePlan
from anychip.conformance.report import Result
from anychip.dispatch import selection
from anychip.dispatch.tally import unserved


class Served:
    """Provenance of several processes, added up."""

    def __init__(self) -> None:
        self.calls: dict[str, Counter[tuple[tuple[str, Any], ...]]] = {}

    def add(self, found: Mapping[str, Any]) -> None:
        """One more provenance's JSON."""
        for part in ("operators", "refused", "torch"):
            known = self.calls.setdefault(part, Counter())
            for row in found.get(part, ()):
                key = tuple((name, value) for name, value in row.items() if name != "calls")
                known[key] += row["calls"]

    def add_idle(self, plan: SuitePlan) -> None:
        """Every row that may have served nothing; of a partial run those of what was called."""
        whole = not plan.select and plan.chapters == tuple(CHAPTERS)
        called = {
            (dict(key)["operator"], dict(key)["direction"]) for key in self.calls["operators"]
        }
        idle = [
            asdict(unserved(row, provider))
            for provider in selection.providers_for(plan.backend.device_type)
            for row in provider.table
            if whole or (row.operator, row.direction) in called
        ]
        self.add({"operators": idle, "refused": ()})

    def to_json(self) -> dict[str, Any]:
        """As ``Provenance.to_json``; rows that served no call have 0 of them."""
        parts = {
            part: [{**dict(key), "calls": calls} for key, calls in known.items()]
            for part, known in self.calls.items()
        }
        parts["operators"].sort(
            key=lambda r: (r["operator"], r["direction"] != "forward", r["kind"])
        )
        return {"schema": 1, **parts}


def run_isolated(
    plan: SuitePlan, cases: Iterable[Case], limit_s: float, served: Served
) -> Iterator[Result]:
    """Results of some of a plan's cases, each of which is taken when the child is free.

    Args:
        served: is told what served the operators of each case.

    Raises:
        ValueError: the backend was made by hand, and a child could not find it by its name.
        RuntimeError: the child died before its first case, so that no other one would do better.
    """
    backend = plan.backend
    if registry.provenance_of(backend)[1] == "not installed":
        raise ValueError(
            f"--isolate starts child processes that look for {backend.name!r} among the installed "
            "plugins; this one was handed over as an object"
        )
    child: Child | None = None
    try:
        for case in cases:
            child = child or _started(plan)
            child.tell(case.id)
            said = next(lines_of([child], limit_s), None)
            if said is not None:
                message = json.loads(said[1])
                served.add(message["served"])
                yield Result.from_json(message["result"])
                continue
            how = child.how_it_ended(limit_s)
            child.end()
            child = None
            yield Result(case=case.id, outcome="failed", reason=how, crashed=True)
    finally:
        if child is not None:
            child.end()


def _started(plan: SuitePlan) -> Child:
    child = Child.start("anychip.conformance.worker")
    name = registry.name_of(plan.backend)
    child.tell({"backend": name, "level": plan.level, "seed": plan.seed})
    if next(lines_of([child], STARTUP_S), None) is None:
        how = child.how_it_ended(STARTUP_S)
        child.end()
        raise RuntimeError(f"the process that asks the cases did not start: {how}")
    return child
