"""``anychip config``: where a chip's C library finds the header that it is compiled with."""

import json

import click

from anychip.cabi.sources import cmake_directory, include_directory


@click.command("config")
@click.option("--cflags", is_flag=True, help="Print what a C compiler needs: -I and a folder.")
@click.option("--cmakedir", is_flag=True, help="Print anychip_DIR, for find_package(anychip).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; docs/cli.md has the schema.")
def command(cflags: bool, cmakedir: bool, as_json: bool) -> None:
    """Say where the C interface for chips is: cc $(anychip config --cflags) -shared chip.c"""
    if cflags + cmakedir + as_json > 1:
        raise click.UsageError("choose one of --cflags, --cmakedir and --json")
    include, cmake = str(include_directory()), str(cmake_directory())
    if cflags:
        click.echo(f"-I{include}")
    elif cmakedir:
        click.echo(cmake)
    elif as_json:
        click.echo(json.dumps({"schema": 1, "include": include, "cmake": cmake}, indent=2))
    else:
        click.echo(f"header  {include}/anychip/abi.h\ncmake   {cmake}")
