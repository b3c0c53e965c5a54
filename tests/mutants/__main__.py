"""``python -m tests.mutants``: tries generated mutants against the conformance suite."""

import difflib
from collections.abc import Collection
from functools import partial
from pathlib import Path

import click
from rich.console import Console

from tests.mutants import equivalents, page
from tests.mutants.campaign import Verdict, about
from tests.mutants.generation import Identity, Mutant
from tests.mutants.pool import Pool
from tests.mutants.sample import BACKENDS, all_mutants, backend_of, sample
from tests.mutants.subjects import ROOT
from tests.mutants.watched import remembered, run_watched, write_json

SEED = 20261121
COUNT = 600
LEAST_RATE = 95.0
"""Percent of the mutants that can be told apart."""


@click.command()
@click.option("--only", default="", help="mutants of this operator or file alone")
@click.option("--count", default=COUNT, show_default=True, help="how many are tried")
@click.option("--seed", default=SEED, show_default=True, help="which ones")
@click.option("--jobs", default=2, show_default=True, help="processes at a time")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="all verdicts, as JSON")
@click.option("--fresh", is_flag=True, help="forgets verdicts of a run that was interrupted")
@click.option("--show", default="", help="only shows the mutant with this id")
def main(
    only: str, count: int, seed: int, jobs: int, json_file: Path | None, fresh: bool, show: str
) -> None:
    """Changes the operators' references and the rows of cpu, one small mistake at a time."""
    console = Console()
    pool = Pool(jobs)
    subjects = {backend: pool.subjects(backend) for backend in BACKENDS}
    every = all_mutants(subjects)
    if show:
        for mutant in every:
            if mutant.id == show:
                console.print(diff(mutant), equivalents.stanza(mutant), markup=False)
        return
    listed = equivalents.load()
    equivalents.check_fresh(listed, every)
    asked = [
        m for m in every if only in m.file or only in subjects[backend_of(m)][m.file][m.function]
    ]
    chosen = sample(asked, count, seed)
    console.print(f"{len(every)} mutants exist; {len(chosen)} are tried (seed {seed})")
    remember = remembered("mutants")
    if fresh:
        remember.unlink(missing_ok=True)
    asking = partial(about, subjects=subjects)
    verdicts = run_watched(console, pool, asking, chosen, listed, remember)
    console.print(page.tables(every, verdicts, listed, seed), markup=False, highlight=False)
    if not only and (count, seed) == (COUNT, SEED):
        page.write(every, verdicts, listed, seed)
    write_json(json_file, verdicts, seed=seed, exist=len(every))
    refuse_weakness(verdicts, listed)


def refuse_weakness(verdicts: list[Verdict[Mutant]], listed: Collection[Identity]) -> None:
    """Raises ClickException for too few killed, too many equivalent, or an entry that is killed."""
    total = page.Count(verdicts, listed)
    stale = [v.mutant.id for v in verdicts if not v.survived and v.mutant.identity in listed]
    if stale:
        raise click.ClickException(f"listed as equivalent, but killed: {', '.join(stale)}")
    if total.rate < LEAST_RATE or 20 * total.equivalent > total.tried:
        raise click.ClickException(
            f"at least {LEAST_RATE} % must be killed and at most 5 % be equivalent"
        )


def diff(mutant: Mutant) -> str:
    """The mutant as a unified diff."""
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    changed = mutant.apply(text)
    lines = difflib.unified_diff(
        text.splitlines(), changed.splitlines(), mutant.file, mutant.file, "", "", 2, ""
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
