"""Pages that lead through something: their files are written, their commands run in their order.

Of docs/writing-a-backend.md the chip is the template's; docs/adding-an-operator.md begins in an
empty directory; of docs/tutorials every page does what it says.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.vendor_afternoon import TABLE, Vendor, blocks
from tests.integration.docs.pages import ROOT, Place, commands, files

LIMIT = 150
"""Lines of a whole chip: docs say that it is written in an afternoon."""


def written(vendor: Vendor) -> str:
    """The chip of the page, without a kernel."""
    for _, language, text in blocks():
        if language == "c":
            vendor.write(text)
            if TABLE in vendor.path.read_text():
                break
    return vendor.path.read_text()


def test_chip_of_the_page_is_the_one_of_the_template_and_the_example(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "minichip" / "minichip.c").read_text(encoding="utf-8")
    text = written(Vendor(tmp_path))
    assert text == example.replace("minichip", "acme").replace("Minichip", "Acme")
    assert len(text.splitlines()) <= LIMIT


@pytest.mark.grid
@pytest.mark.timeout(900)
def test_commands_of_the_page_run_in_order(tmp_path: Path) -> None:
    def shorter(command: str) -> str:
        if command.startswith("anychip conformance"):
            return f"{command} --chapter device --chapter memory"
        return command.replace("--steps 50", "--steps 3")

    vendor = Vendor(tmp_path, ANYCHIP_PROBE_TIMEOUT="120")  # other tests run beside it
    done = list(vendor.follow(shorter))
    printed = {step.command: step.printed for step in done}
    assert len(done) == len({step.command for step in done}) + 1  # cc, again after the kernel
    assert "Acme 0, by libacme.so" in printed["anychip doctor ./libacme.so"]
    (conformance,) = (text for command, text in printed.items() if "conformance" in command)
    assert re.search(r"^backend acme: passed$", conformance, re.MULTILINE)
    assert re.search(r"^torch's operators, native: 0 of [1-9]", conformance, re.MULTILINE)
    (bench,) = (text for command, text in printed.items() if "bench chip" in command)
    assert re.search(r"^write next, 1: \w", bench, re.MULTILINE)
    *_, train, new, _, _, doctor = done
    assert re.search(r"torch's operators, native: .*add\.Tensor", train.printed)
    assert new.command.startswith("anychip new-backend")
    assert "entry point acme = anychip_acme, from anychip-acme 0.1.0" in doctor.printed


@pytest.mark.timeout(900)  # it may be the first to build the bridge
def test_first_kernel_of_the_page_takes_additions_from_the_host(tmp_path: Path) -> None:
    vendor = Vendor(tmp_path)
    for _, language, text in blocks():
        if language == "c":
            vendor.write(text)
    compile_it = next(text for _, language, text in blocks() if language == "bash").splitlines()[0]
    vendor.run("", compile_it)
    (tmp_path / "count.py").write_text(
        "import anychip, torch\n"
        "chip = anychip.use('./libacme.so')\n"
        "x = torch.arange(6.0).to(chip.device())\n"
        "y = (x + x).add_(x, alpha=2) + 1\n"
        "rows = [(*row,) for row in anychip.provenance().torch_rows() if row.operator[0] == 'a']\n"
        "print(y.tolist(), dict(chip.host_calls()), rows)\n"
    )
    done = subprocess.run(
        [sys.executable, "count.py"],
        cwd=tmp_path, env=os.environ | {"ANYCHIP_PROBE_TIMEOUT": "120"}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == (
        "[1.0, 5.0, 9.0, 13.0, 17.0, 21.0] {'aten::add.Tensor': 1} "
        "[('add.Tensor', 'acme', 'native', 2), ('add.Tensor', 'acme', 'host', 1)]"
    ), done.stderr


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


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


@pytest.mark.grid
@pytest.mark.timeout(900)  # it may be the first to build the bridge
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_commands_of_the_tutorial_print_what_it_says(page: Path, tmp_path: Path) -> None:
    place = Place(page, tmp_path, ANYCHIP_PROBE_TIMEOUT="120", OMP_NUM_THREADS="1")
    assert place.follow() == sum(len(command.lines) for command in commands(page)) > 0


def test_each_subject_has_a_short_tutorial() -> None:
    assert {page.stem for page in TUTORIALS} == {
        "bring-a-chip", "fine-tune", "own-loop", "ranks", "read-a-report", "train", "write-a-kernel"
    }  # fmt: skip
    assert [page.stem for page in TUTORIALS if len(page.read_text().splitlines()) > 80] == []
