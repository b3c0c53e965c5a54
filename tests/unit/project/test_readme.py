"""Does everything exist that the README tells a newcomer to type, and is it run somewhere?

`.ci/run readme` runs every command of the README but those of ``make``, which have stages of their
own. Here is what can be seen without running: targets, options, links, and the two languages.
"""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from anychip.cli.group import group

ROOT = Path(__file__).parents[3]
RUNNER = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PAGES = ("README.md", "README.zh.md", "CONTRIBUTING.md", "docs/README.md")


def commands(page: str) -> list[str]:
    """The lines of the fenced bash blocks, without comments."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.split("#")[0].strip() for line in "".join(blocks).splitlines()]


def commands_starting_with(word: str) -> list[str]:
    return [command for command in commands("README.md") if command.startswith(f"{word} ")]


@pytest.mark.parametrize("command", commands_starting_with("make"))
def test_make_command_of_readme_is_a_target_and_a_stage(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE)
    assert re.search(rf"^ *(stage_{target}\(\) \{{ )?{command}\b", RUNNER, re.MULTILINE)


def test_runner_takes_from_the_readme_all_other_commands() -> None:
    (program,) = re.findall(r"awk '(.*)' README.md", RUNNER)
    done = subprocess.run(
        ["awk", program, str(ROOT / "README.md")], capture_output=True, text=True, check=True
    )
    taken = [line.split("#")[0].strip() for line in done.stdout.splitlines()]
    assert taken == [c for c in commands("README.md") if c not in commands_starting_with("make")]


@pytest.mark.parametrize("command", commands_starting_with("anychip"))
def test_anychip_command_of_readme_has_its_options(command: str) -> None:
    _, subcommand, *words = command.split()
    done = CliRunner().invoke(group, [subcommand, "--help"], catch_exceptions=False)
    assert done.exit_code == 0
    missing = {word for word in words if word.startswith("--") and word not in done.output}
    assert missing == set()


def test_readmes_in_both_languages_have_the_same_commands() -> None:
    assert commands("README.zh.md") == commands("README.md")


@pytest.mark.parametrize("page", PAGES)
def test_page_links_to_files_that_exist(page: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not ((ROOT / page).parent / link).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_readme_fits_on_a_page(page: str) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= 110


def test_tests_that_a_page_of_traps_names_exist() -> None:
    page = (ROOT / "docs" / "design" / "sharding-traps.md").read_text(encoding="utf-8")
    rows = [re.findall(r"`(test_\w+)`", row) for row in page.splitlines() if row[:3].strip("| ")]
    files = (ROOT / "tests" / "unit").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"def (test_\w+)", file.read_text())}
    assert [name for row in rows for name in row if name not in known] == []
    assert sum(bool(row) for row in rows) == 35
