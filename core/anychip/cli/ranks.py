"""Ranks of a command: which one is this process, and how are several of them started?"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from anychip.cli.exit_codes import CANNOT_RUN, FAILED, WRONG_USE

_REFUSALS = (WRONG_USE, CANNOT_RUN)


def this_rank() -> int | None:
    """This process's place in a job of several; None: it is alone."""
    from anychip.registry import environment

    place = environment.launched()
    return None if place is None else place.rank


def run_ranks(nproc: int, words: Sequence[str], logs: Path) -> int:
    """Runs ``anychip WORDS`` as several ranks; the exit code of all of them."""
    from anychip.train import interruption, launch

    try:
        launch.launch(nproc, [sys.executable, "-m", "anychip", *words], logs)
    except interruption.Interrupted as stop:
        if str(stop):  # else rank 0 has said what was saved
            click.echo(f"anychip: {stop}", err=True)
        return 128 + stop.signal
    except launch.RankFailedError as failure:
        # All ranks refuse what is wrong use; rank 0 has said why, unless it was ended before.
        if failure.exit_codes.get(0) not in _REFUSALS:
            click.echo(f"anychip: {failure}", err=True)
        return next((code for code in failure.exit_codes.values() if code in _REFUSALS), FAILED)
    return 0
