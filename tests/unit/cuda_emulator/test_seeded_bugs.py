"""Does the emulator find the mistakes that people make in kernels, and nothing in correct ones?

programs/seeded_bugs.cu holds the kernels, and the table of what must come of each.
"""

import pytest

from tests.unit.cuda_emulator.programs import SOURCES, Outcome, run, table_of

SOURCE = SOURCES / "seeded_bugs.cu"
TABLE = table_of(SOURCE, "bug")
BUGS = [row["bug"] for row in TABLE]
EXPECTED = {(row["bug"], mode): row[mode] for row in TABLE for mode in row if mode != "bug"}
ORDERS = ("forward", "reverse", "random", "warp")
MODES = (*ORDERS, "address", "late", "thread")


def outcome(bug: str, kind: str, mode: str) -> Outcome:
    if mode in ORDERS:
        return run("plain", "seeded_bugs", bug, kind, order=mode)
    if mode == "late":
        return run("address", "seeded_bugs", bug, kind, delayed="1")
    return run(mode, "seeded_bugs", bug, kind)


def word(found: Outcome) -> str:
    """As the table calls it."""
    return "report" if found.reports else found.output.split(":")[0]


def test_table_names_every_kernel_and_every_mode() -> None:
    text = SOURCE.read_text()
    assert set(TABLE[0]) == {"bug", *MODES}
    assert [bug for bug in BUGS if f"KERNEL({bug}," in text or f"CALL({bug}," in text] == BUGS
    assert text.count("template <bool kCorrect>") == len(BUGS)
    shows_nowhere = [bug for bug in BUGS if {EXPECTED[bug, mode] for mode in MODES} == {"pass"}]
    assert shows_nowhere == []


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_seeded_bug_shows_as_the_table_says(bug: str, mode: str) -> None:
    found = outcome(bug, "wrong", mode)
    assert word(found) in EXPECTED[bug, mode].split(" or "), found
    if word(found) == "error":
        assert "seeded_bugs.cu:" in found.output, "an error names the line"


@pytest.mark.grid
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bug", BUGS)
def test_correct_twin_passes(bug: str, mode: str) -> None:
    assert outcome(bug, "correct", mode) == Outcome(0, "pass", [])
