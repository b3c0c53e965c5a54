"""Does a training that is off name the row that is wrong, and only that?"""

from collections.abc import Iterator

import pytest

from anychip import conformance
from anychip.contract import Backend
from anychip.dispatch import selection
from tests.meta.catalogue import CATALOGUE
from tests.meta.honest import HonestBackend, Row, make_table, reference_rows

BLAMED = {
    "gradient-too-large-by-1e-5": "linear backward",
    "correction-off-by-one": "adamw forward",
    "probabilities-in-bf16": "cross_entropy backward",
    "repeated-token-averaged": "embedding backward",
}
"""Wrong backends of the chapter by the part of a training that is wrong."""


@pytest.fixture(autouse=True)
def selection_is_restored() -> Iterator[None]:
    before = selection.current
    yield
    selection.current = before


def reason_of(backend: Backend, select: str) -> str:
    report = conformance.run(backend, chapters=["training"], select=select)
    (failed,) = report.failures
    return failed.reason


@pytest.mark.grid
@pytest.mark.parametrize("name", list(BLAMED))
def test_training_names_the_row_that_is_wrong(name: str) -> None:
    wrong = next(wrong for wrong in CATALOGUE if wrong.name == name)
    assert f"\nto blame: {BLAMED[name]} (" in reason_of(wrong.make(), wrong.select)


@pytest.mark.grid
def test_training_names_two_rows_that_are_wrong() -> None:
    right = reference_rows()

    def larger(direction: str, operator: str) -> Row:
        def row(*args: object, **attrs: object) -> object:
            found = right[operator, direction](*args, **attrs)
            return (found[0] * 1.001, *found[1:])

        return row

    keys = [("linear", "backward"), ("gelu", "backward")]
    rows = {**right, **{(o, d): larger(d, o) for o, d in keys}}
    kind = type("TwoWrong", (HonestBackend,), {"operators": make_table(rows)})
    reason = reason_of(kind(), "momentum")
    assert "no row alone is to blame: 2 are wrong, or wrong together" in reason
    assert "linear backward" in reason
    assert "gelu backward" in reason
    assert "forward" not in reason.partition("together: ")[2]
