"""``anychip report``: one page about one run or several."""

from pathlib import Path

import click

from anychip.cli.files import ResultFile
from anychip.cli.train_command import PATH


@click.command("report")
@click.argument("runs", type=PATH, nargs=-1, required=True)
@click.option(
    "-o", "--output", type=ResultFile(), help="The page.  [default: report.html in the first RUN]"
)
def command(runs: tuple[Path, ...], output: Path | None) -> None:
    """Show RUNs of anychip train on one page, also while they train.

    Loss, held-out loss, learning rate, speed, memory, time by part, what served the operators, what
    the models write, and in which settings runs differ. The page loads nothing from elsewhere.
    """
    from anychip.train import files, run_page

    page = run_page.to_html(run_page.read(runs))
    file = output or runs[0] / "report.html"
    files.write(file, page)
    click.echo(file)
