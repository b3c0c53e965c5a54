"""A campaign under the eyes of a person: a bar per level, and each survivor as it is found."""

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.mutants.campaign import Campaign, M, Verdict, fingerprint
from tests.mutants.pool import Pool
from tests.mutants.subjects import ROOT
from tests.mutants.trial import Level, Question


def remembered(name: str) -> Path:
    """Where the verdicts of an interrupted run are, for the sources as they are."""
    return ROOT / "build" / name / f"{fingerprint()}.jsonl"


def run_watched(
    console: Console, pool: Pool, about: Callable[[M, Level], Question], chosen: Sequence[M],
    listed: Collection[Any], remember: Path,
) -> list[Verdict[M]]:  # fmt: skip
    """All verdicts; every case that found something was asked without a mistake, and passed."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        console=console,
    ) as progress:  # fmt: skip
        bars = {level: progress.add_task(level, total=None) for level in ("quick", "full")}
        progress.update(bars["quick"], total=len(chosen))

        def on_verdict(verdict: Verdict[M]) -> None:
            progress.advance(bars[verdict.level])
            if verdict.survived and verdict.mutant.identity not in listed:
                progress.console.print(
                    f"{verdict.level}: {verdict.mutant.id} survives: {verdict.mutant}",
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip

        campaign = Campaign(pool, about, remember, on_verdict)
        verdicts = campaign.run(chosen, listed)
    campaign.check_killers(verdicts)
    return verdicts


def write_json(file: Path | None, verdicts: Iterable[Verdict[M]], **about_run: Any) -> None:
    """Every verdict, if a file was asked for."""
    if file is not None:
        rows = [verdict.to_json() for verdict in verdicts]
        file.write_text(json.dumps({**about_run, "verdicts": rows}))
