"""docs/tutorials: every page's files and commands do what the page says."""

from pathlib import Path

import pytest

from tests.integration.docs.pages import ROOT, Place, commands

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.grid
@pytest.mark.timeout(900)  # it may be the first to build the bridge
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_of_the_tutorial_print_what_it_says(page: Path, tmp_path: Path) -> None:
    place = Place(page, tmp_path, ANYCHIP_PROBE_TIMEOUT="120", OMP_NUM_THREADS="1")
    assert place.follow() == sum(len(command.lines) for command in commands(page)) > 0


def test_each_subject_has_a_short_tutorial() -> None:
    assert {page.stem for page in TUTORIALS} == {
        "bring-a-chip", "fine-tune", "own-loop", "ranks", "read-a-report", "train", "write-a-kernel"
    }  # fmt: skip
    assert [page.stem for page in TUTORIALS if len(page.read_text().splitlines()) > 80] == []
