"""``python -m tests.red_team``: tries generated wrong backends against the conformance suite."""

from functools import partial
from pathlib import Path
from types import MappingProxyType

import click
from rich.console import Console

from tests.mutants.pool import Pool
from tests.mutants.trial import PRELOADED, Level, Question
from tests.mutants.watched import remembered, run_watched, write_json
from tests.red_team import page, ranks
from tests.red_team.generation import mistakes
from tests.red_team.methods import CHAPTERS, METHODS
from tests.red_team.mistake import Mistake
from tests.red_team.reach import Reach, reach

SEED = 20261124
COUNT = 500
SILENCE_S = 300.0
"""An exception on a stream ends the emulated stream, and who waits for it waits for ever."""
OURS = [*PRELOADED, "anychip.conformance.chapters", "tests.red_team.methods", "tests.red_team.seam",
        "tests.red_team.ranks"]  # fmt: skip
"""What every process has from its parent: here nothing of ours is changed."""


def about(mistake: Mistake, level: Level, come: Reach = MappingProxyType({})) -> Question:
    """What is asked about a mistake: at quick the cases that are known to come to it, else those
    that may come to its place.
    """
    chapters = ranks.CHAPTERS if mistake.target[0] == ranks.PART else ()
    chapters = CHAPTERS if mistake.target in METHODS else chapters
    is_known = level == "quick" and not mistake.needs_all_calls
    return Question(
        backend=mistake.backend, operators=() if chapters else (mistake.target[0],),
        chapters=chapters, level=level, wrong=mistake,
        cases=come.get(mistake.id) if is_known else None,
    )  # fmt: skip


@click.command()
@click.option("--count", default=COUNT, show_default=True, help="how many are tried")
@click.option("--seed", default=SEED, show_default=True, help="which ones")
@click.option("--only", default="", help="those alone whose sentence has this in it")
@click.option("--jobs", default=2, show_default=True, help="processes at a time")
@click.option("--reach-only", is_flag=True, help="only whether a case comes to each")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="all verdicts, as JSON")
def main(
    count: int, seed: int, only: str, jobs: int, reach_only: bool, json_file: Path | None
) -> None:
    """Makes rows and methods wrong under random conditions, and asks the suite about each."""
    console = Console()
    made, discarded = mistakes(count, seed)
    chosen = [m for m in made if only in str(m)]
    pool = Pool(jobs, OURS, SILENCE_S)
    come = reach(pool, chosen)
    console.print(page.reached(come, chosen), markup=False, highlight=False, soft_wrap=True)
    if reach_only:
        return
    question = partial(about, come=come)
    listed = page.reasons().equivalent
    verdicts = run_watched(console, pool, question, chosen, listed, remembered("red_team"))
    console.print(page.tables(verdicts, discarded, seed), markup=False, highlight=False)
    if not only and (count, seed) == (COUNT, SEED):
        page.publish(verdicts, discarded, seed)
    write_json(json_file, verdicts, seed=seed)
    weak = page.weakness(verdicts)
    if weak:
        raise click.ClickException(weak)


if __name__ == "__main__":
    main()
