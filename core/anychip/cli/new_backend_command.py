"""``anychip new-backend``: writes a plugin project that works, to be filled with a chip."""

import keyword
import re
from pathlib import Path

import click

import anychip
from anychip import templates
from anychip.cabi.sources import header
from anychip.contract import API_VERSION
from anychip.registry.discovery import backend_plugins

KINDS = ("python", "c-abi")


@click.command("new-backend")
@click.argument("name")
@click.option(
    "--kind", type=click.Choice(KINDS), default="python", show_default=True,
    help="python: for a chip that torch knows; c-abi: a C library makes it one.",
)  # fmt: skip
@click.option(
    "--directory", type=click.Path(path_type=Path, file_okay=False),
    help="Where to write the project.  [default: anychip-NAME]",
)  # fmt: skip
def command(name: str, kind: str, directory: Path | None) -> None:
    """Write a plugin project for the backend NAME: source, tests, conformance, CI script.

    It installs, and passes its tests, before a line of it is changed.
    """
    _check_name(name)
    values = {
        "name": name, "title": name.capitalize(), "package": f"anychip_{name}",
        "distribution": f"anychip-{name.replace('_', '-')}",
        "class_name": "".join(part.capitalize() for part in name.split("_")) + "Backend",
        "api": repr(API_VERSION), "anychip_version": anychip.__version__,
    }  # fmt: skip
    target = directory or Path(values["distribution"])
    files = templates.render(kind, values)
    if kind == "c-abi":
        files[Path("include", "anychip", "abi.h")] = header().read_text(encoding="utf-8")
    _write(target, files)
    click.echo(f"wrote {target}: a backend {name!r} that works on the host")
    click.echo(f"  next: cd {target} && pip install -e '.[test]' && python -m pytest")
    click.echo(f"        anychip conformance --backend {name}")


def _check_name(name: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name.endswith("_") or keyword.iskeyword(name):
        raise ValueError(
            f"NAME must be lower-case letters, digits and underscores, like acme; got {name!r}"
        )
    if name in backend_plugins():
        raise ValueError(f"a backend named {name!r} is installed already; take another name")


def _write(target: Path, files: dict[Path, str]) -> None:
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} exists and is not empty; nothing was written")
    for path, text in files.items():
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".sh":
            file.chmod(0o755)
