"""docs/adding-an-operator.md: its files are written into an empty directory, its commands run."""

from pathlib import Path

import pytest

from tests.integration.docs.pages import ROOT, Place, files

PAGE = ROOT / "docs" / "adding-an-operator.md"


def place_of(directory: Path) -> Place:
    return Place(PAGE, directory, ANYCHIP_CACHE_DIR=str(directory / "cache"))


def test_page_has_one_operator_file_one_test_and_one_pack() -> None:
    names = ["relu_squared.py", "test_relu_squared.py", "relu_squared_cpu.py", "pyproject.toml"]
    assert list(files(PAGE)) == names


@pytest.mark.grid
def test_commands_of_the_page_print_what_it_says(tmp_path: Path) -> None:
    assert place_of(tmp_path).follow() >= 12


@pytest.mark.grid
def test_pack_of_the_page_with_a_wrong_row_fails_the_suite(tmp_path: Path) -> None:
    place = place_of(tmp_path)
    file = place.directory / "relu_squared_cpu.py"
    assert ".mul_(2.0)" in file.read_text()
    file.write_text(file.read_text().replace(".mul_(2.0)", ".mul_(2.00001)"))
    assert place.run("python -m pip install .").returncode == 0
    done = place.run("anychip conformance --backend cpu --chapter gradients -k relu_squared")
    assert done.returncode == 1, done.stdout
    assert "gradient of x: 14 of 35 elements are outside the bound" in done.stdout


def test_operator_of_the_page_runs_before_a_backend_was_chosen_and_has_one_name(
    tmp_path: Path,
) -> None:
    place = place_of(tmp_path)
    (place.directory / "twice.py").write_text(
        "import torch, anychip, relu_squared\n"
        "print(relu_squared.relu_squared(torch.tensor([-2.0, 3.0])).tolist())\n"
        "anychip.operator(relu_squared.SPEC)\n"
    )
    done = place.run("python twice.py")
    assert (done.returncode, done.stdout) == (1, "[0.0, 9.0]\n")
    assert "ContractError: operator 'relu_squared' exists already" in done.stderr
