"""The suite as a pytest run: ``pytest -p anychip.conformance.plugin --pyargs anychip.conformance``.

Every case is an item, named by its id, so that pytest's own ``-k``, ``-x``, ``--lf``, JUnit output
and plugins work. Unsupported cases are skipped and expected failures are xfailed, with their
reasons; an unexpected pass and a stale entry fail.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anychip.conformance.asking import activate, run_case
from anychip.conformance.case import LEVELS, Case
from anychip.conformance.chapters import CHAPTERS, device
from anychip.conformance.planning import SuitePlan, plan
from anychip.conformance.runner import empty_report, judge
from anychip.contract import AnychipError, BackendUnavailableError

PACKAGE = Path(__file__).parent
ALWAYS = pytest.StashKey[pytest.Item]()
WRONG_USE = 2
CANNOT_RUN = 3
"""Exit codes, those of ``anychip conformance``."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite; those that pytest has itself are pytest's."""
    group = parser.getgroup("anychip conformance")
    group.addoption("--backend", help="the backend under test")
    group.addoption("--level", choices=LEVELS, default="quick", help="how much is asked")
    group.addoption(
        "--chapter", action="append", default=[], choices=list(CHAPTERS), help="only this chapter"
    )
    group.addoption("--seed", type=int, default=0, help="of all random inputs")
    group.addoption("--expectations", type=Path, help="in place of the backend's own list")


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """The package of the suite is collected as its cases."""
    if path.resolve() == PACKAGE.resolve():
        suite: pytest.Collector = Suite.from_parent(parent, path=path)
        return suite
    return None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A row that could serve nobody is found whatever ``-k`` selects."""
    item = config.stash.get(ALWAYS, None)
    if item is not None and item not in items:
        items.append(item)


class Suite(pytest.Directory):
    """All cases of a run."""

    def collect(self) -> Iterator[pytest.Item]:
        """Plans the run, and gives an item for each case and each stale entry."""
        options = self.config.option
        try:
            made = plan(
                activate(options.backend),
                level=options.level,
                chapters=options.chapter,
                seed=options.seed,
                expectations_file=options.expectations,
            )
        except BackendUnavailableError as error:
            pytest.exit(str(error), returncode=CANNOT_RUN)
        except (AnychipError, ValueError, FileNotFoundError) as error:
            pytest.exit(str(error), returncode=WRONG_USE)
        wrong_rows = device.row_faults(made.backend)
        for case in made.cases:
            item = CaseItem.from_parent(self, name=case.id, plan=made, case=case)
            if wrong_rows and case.id == device.ROWS:
                self.config.stash[ALWAYS] = item
            yield item
        for entry in made.stale:
            yield StaleItem.from_parent(self, name=f"stale entry {entry.case}", reason=entry.reason)


class CaseItem(pytest.Item):
    """One case."""

    def __init__(self, *, plan: SuitePlan, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.plan, self.case = plan, case

    def runtest(self) -> None:
        """Runs the case and turns its outcome into pytest's."""
        entry = self.plan.entry(self.case)
        if entry is not None and entry.crash:
            pytest.xfail(f"{entry.reason} (it ends the process: not run)")
        result = judge(
            run_case(self.case, self.plan.backend, self.plan.level, self.plan.seed),
            entry,
            self.plan.version,
        )
        if result.outcome == "unsupported":
            pytest.skip(result.reason)
        if result.outcome == "expected failure":
            pytest.xfail(result.reason)
        if not result.ok:
            raise CaseFailedError(empty_report(self.plan).explain(result))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """The explanation alone: a traceback of the suite helps nobody."""
        if isinstance(excinfo.value, CaseFailedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        """How pytest names the item."""
        return self.path, None, self.case.id


class StaleItem(pytest.Item):
    """An entry of the list that matches no case; it fails."""

    def __init__(self, *, reason: str, **rest: Any) -> None:
        super().__init__(**rest)
        self.reason = reason

    def runtest(self) -> None:
        """Fails."""
        pytest.fail(f"{self.name}: no case has such an id ({self.reason})", pytrace=False)


class CaseFailedError(AssertionError):
    """A case failed; the message is its explanation."""
