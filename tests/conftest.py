"""What every test runs under: this checkout's code, no settings of the person, no time limits.

With ``--slice``, of tests marked ``grid`` only this commit's thirty-seventh runs, and of long ones
a sixth (tests/slices.py). A run of more than one file ends with the files that took longest.
"""

import gc
import os
import signal
from collections import Counter

import hypothesis
import pytest

from tests import slices

# As `make test`: a sum by two threads has other bits than by one, and tests compare them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

hypothesis.settings.register_profile("anychip", deadline=None, derandomize=True)
hypothesis.settings.load_profile("anychip")

SLICE = pytest.StashKey[slices.Slice]()
SLOWEST_FILES = 12
LONG = tuple(slices.listed(slices.LONG_TESTS))
LONGEST = ("tests/integration/cabi/test_sanitizers.py",)
"""Begin first: of two minutes in one process the last ones would be theirs alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slice",
        action="store_true",
        help="of tests marked 'grid', run this commit's slice (ANYCHIP_SLICE: another, or all)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Child processes import what the tests import, installed or not."""
    # Ranks have one thread each, and bits depend on it. OpenMP reads it when torch is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A job in the background starts with SIGINT ignored, and so would what the tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    roots = [str(path) for path in config.getini("pythonpath")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Record())
    if config.getoption("--slice"):
        try:
            config.stash[SLICE] = asked = slices.chosen()
        except slices.SliceError as error:
            raise pytest.UsageError(str(error)) from None
        # Workers need not count the commits again.
        os.environ[slices.VARIABLE] = "all" if asked.number is None else str(asked.number)


def pytest_report_header(config: pytest.Config) -> str:
    return f"grids: {config.stash.get(SLICE, 'all slices')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out the cases of grids that belong to other slices."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
    asked = config.stash.get(SLICE, None)
    if asked is None:
        return
    ids = {item.nodeid for item in items}
    files = {case.partition("::")[0] for case in ids}
    gone = [c for c in asked.always if c.partition("::")[0] in files and c not in ids]
    long = [c for c in LONG if c.partition("::")[0] in files]
    gone += [c for c in long if not any(case.startswith(c) for case in ids)]
    if gone:
        raise pytest.UsageError(
            f"{slices.FAILED_BEFORE.name} and {slices.LONG_TESTS.name} list what is no case: {gone}"
        )
    others = [item for item in items if not is_asked(item, asked)]
    if others:
        config.hook.pytest_deselected(items=others)
        left_out = {item.nodeid for item in others}
        items[:] = [item for item in items if item.nodeid not in left_out]


def is_asked(item: pytest.Item, asked: slices.Slice) -> bool:
    """Whether this commit runs a test."""
    if mark := item.get_closest_marker("grid"):
        return asked.takes(item.nodeid, *mark.args)
    return not item.nodeid.startswith(LONG) or asked.takes(item.nodeid, parts=slices.PARTS)


def pytest_collection_finish() -> None:
    """Thousands of cases live as long as the run: no collection of garbage need look at them."""
    gc.collect()
    gc.freeze()


class Record:
    """Of one run: the seconds of each file, over all workers, and which cases of grids failed."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration
        if report.failed and ("grid" in report.keywords or report.nodeid.startswith(LONG)):
            self.failed.add(report.nodeid)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Where the time went, and which cases every later commit will ask."""
        if len(self.seconds) > 1:
            whole = f"{self.seconds.total():.0f} s in {len(self.seconds)}"
            terminalreporter.section(f"slowest files, of {whole}")
            for file, took in self.seconds.most_common(SLOWEST_FILES):
                terminalreporter.write_line(f"{took:6.1f} s  {file}")
        for case in slices.remember(self.failed) if SLICE in config.stash else []:
            terminalreporter.write_line(f"added to {slices.FAILED_BEFORE.name}; commit it: {case}")


@pytest.fixture(autouse=True)
def settings_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes ANYCHIP_* from the environment, so that no choice made outside decides a test.

    Which emulated CUDA kernels are tested, and in which order of threads, is what the caller asks.
    """
    asked = ("ANYCHIP_CUDA_EMULATED", "ANYCHIP_EMULATOR_")
    for name in [name for name in os.environ if name.startswith("ANYCHIP_")]:
        if not name.startswith(asked):
            monkeypatch.delenv(name)
