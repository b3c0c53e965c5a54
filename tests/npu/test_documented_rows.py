"""docs/npu.md shows the rows as they are. Needs no torch_npu."""

import pytest

from anychip_npu import table
from tests.npu import documented_rows


def test_page_has_the_table_of_the_rows() -> None:
    page = documented_rows.PAGE.read_text()

    assert page == documented_rows.placed(page), "run python -m tests.npu.documented_rows"


def test_table_has_a_line_for_each_row_and_reason() -> None:
    lines = list(documented_rows.lines())

    assert len(lines) == len(table.declared) + len(table.reference_only)
    assert all(line.count(" | ") == 4 for line in lines)


def test_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="must have the lines"):
        documented_rows.placed("no marks")
