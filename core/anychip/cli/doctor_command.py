"""``anychip doctor``: what was looked at for each backend, what failed, and what fixes it."""

import sys

import click
from rich.console import Console
from rich.text import Text

from anychip import registry
from anychip.cli.backends_command import STYLES, WIDE
from anychip.cli.exit_codes import CANNOT_RUN, DONE, FAILED
from anychip.dispatch import native


@click.command("doctor")
@click.argument("name", required=False)
@click.option("--traceback", is_flag=True, help="Show where a broken plugin raised its exception.")
def command(name: str | None, traceback: bool) -> int:
    """Examine the backend NAME, or all of them: why it cannot run, and what fixes it.

    The last line says whether calls of operators are taken in C or in Python.

    Ends with exit code 3 if the backend NAME cannot run here, and with 1 if it can and a row of its
    tables fits no operator, or a kernel pack for it does not load.
    """
    console = Console(width=None if sys.stdout.isatty() else WIDE, highlight=False)
    diagnoses = registry.diagnose(name, examine="anychip.runtime:table_faults")
    for diagnosis in diagnoses:
        _print(console, diagnosis, traceback=traceback)
    problem = native.load()[1]
    text = f"in Python, some microseconds slower: {problem}" if problem else "in C"
    console.print(Text.assemble(("operators", "bold"), "  are called ", text))
    if name is None:
        return DONE
    if diagnoses[0].record.status != "ready":
        return CANNOT_RUN
    return FAILED if diagnoses[0].faults else DONE


def _print(console: Console, diagnosis: registry.Diagnosis, *, traceback: bool) -> None:
    record = diagnosis.record
    console.print(
        Text.assemble((record.name, "bold"), "  ", (record.status, STYLES[record.status]))
    )
    for finding in diagnosis.findings:
        mark = ("  ok  ", "green") if finding.ok else ("  no  ", "red")
        console.print(Text.assemble(mark, finding.text))
        if finding.fix and not finding.ok:
            console.print(Text(f"      to fix it: {finding.fix}"))
    if diagnosis.traceback and traceback:
        console.print(Text(diagnosis.traceback.rstrip(), style="dim"))
    elif diagnosis.traceback:
        console.print(Text(f"      where: anychip doctor {record.name} --traceback"))
