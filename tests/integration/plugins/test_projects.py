"""Whole plugin projects, built and installed by pip: the example, and what new-backend writes."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import anychip.registry  # noqa: F401 - says where bridges are kept
from anychip.cabi import bridge
from anychip.cli.new_backend_command import KINDS
from anychip.conformance import CHAPTERS
from tests.integration.plugins.environments import Environment

ROOT = Path(__file__).parents[3]
MAY_IMPORT = ("anychip.contract", "anychip.cabi")
NAMES = {"example": "toy", "python": "acme", "c-abi": "acme"}


def _copy_example(environment: Environment, target: Path) -> None:
    # A copy, because setuptools builds in the source tree.
    shutil.copytree(
        ROOT / "examples" / "third_party_backend", target,
        ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"),
    )  # fmt: skip


def _write(kind: str, environment: Environment, target: Path) -> None:
    words = ("new-backend", NAMES[kind], "--kind", kind, "--directory", str(target))
    done = environment.anychip(*words)
    assert done.returncode == 0, done.stderr


def _write_with_bridge(environment: Environment, target: Path) -> None:
    _write("c-abi", environment, target)
    environment.cache.mkdir(exist_ok=True)
    shutil.copy(bridge.extension().find(), environment.cache)  # not built anew for each environment


MAKE = {"example": _copy_example, "python": partial(_write, "python"), "c-abi": _write_with_bridge}


@pytest.fixture(scope="module", params=[
    "example", *(pytest.param(kind, marks=pytest.mark.grid) for kind in KINDS),
])  # fmt: skip
def project(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Environment]:
    """Name of the backend, folder of the project, and an environment where it is installed."""
    environment = Environment(tmp_path_factory.mktemp(request.param))
    source = environment.site.parent / "project"
    MAKE[request.param](environment, source)
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--target"]
    subprocess.run(
        [*install, *options, str(environment.site), str(source)], check=True, timeout=200
    )
    return NAMES[request.param], source, environment


@pytest.mark.grid
def test_project_installed_by_pip_is_ready(project: tuple[str, Path, Environment]) -> None:
    name, _, environment = project
    done = environment.anychip("backends", "--json")
    records = {record["name"]: record for record in json.loads(done.stdout)["backends"]}
    assert records[name]["status"] == "ready"
    assert records[name]["distribution"] == f"anychip-{name}"
    assert records[name]["version"] == "0.1.0"
    assert environment.anychip("doctor", name).returncode == 0


@pytest.mark.grid
@pytest.mark.parametrize("values", [True, False], ids=["values", "others"])
def test_project_passes_its_own_tests_the_conformance_suite_among_them(
    project: tuple[str, Path, Environment], tmp_path: Path, values: bool
) -> None:
    """Of values what its rows serve: the references' the suite of cpu asks, for two minutes."""
    name, source, environment = project
    tests = shutil.copytree(source / "tests", tmp_path / "tests")
    whole = 'level="quick"'
    (suite,) = (file for file in tests.glob("*.py") if whole in file.read_text())
    chapters = [
        chapter for chapter in CHAPTERS if (chapter in ("operators", "gradients")) == values
    ]
    part = f"{whole}, chapters={chapters}"
    if values:
        rows = (
            f"import anychip; print(*{{row.operator for row in anychip.use({name!r}).operators}})"
        )
        served = [f"/{operator}/" for operator in environment.run_code(rows).split()]
        # A C library has no rows: two operators made of many of torch's stand for all.
        part += f", select={' or '.join(served or ['/rms_norm/', '/adamw/'])!r}"
    suite.write_text(suite.read_text().replace(whole, part))
    pytest_options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = environment.run(
        "-m", "pytest", *pytest_options, "-c", str(source / "pyproject.toml"), str(tests)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


@pytest.mark.grid
def test_project_with_limits_and_its_examples_of_a_list_still_passes(
    project: tuple[str, Path, Environment], tmp_path: Path
) -> None:
    name, source, environment = project
    package = environment.site / f"anychip_{name}"
    listed = tmp_path / "list.toml"
    listed.write_text((package / "expectations.toml").read_text().replace("#   ", ""))
    done = environment.anychip(
        "conformance", "--backend", name, "--chapter", "streams", "--expectations", str(listed)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"unsupported: \d+ cases: the chip has one queue", done.stdout)
    operators = package / "operators.py"
    if 'kind="mapped", ' in (operators.read_text() if operators.exists() else ""):
        row = operators.read_text()
        limits = 'kind="mapped", limits={"hidden": range(64, 2048)}, '
        operators.write_text(row.replace('kind="mapped", ', limits))
        done = environment.run("-m", "pytest", "-q", str(source / "tests"), "-k", "rms_norm")
        operators.write_text(row)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("kind", NAMES)
def test_project_imports_from_the_contract_only(
    kind: str, environment: Environment, tmp_path: Path
) -> None:
    MAKE[kind](environment, tmp_path / "project")
    for file in (tmp_path / "project" / f"anychip_{NAMES[kind]}").glob("*.py"):
        for line in file.read_text().splitlines():
            if line.startswith(("from anychip", "import anychip")):
                module = line.split()[1]
                own = module.partition(".")[0] == f"anychip_{NAMES[kind]}"
                assert own or module in MAY_IMPORT, file
