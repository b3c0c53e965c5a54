"""Is a device of seven functions right for every operator that torch itself tests? (OpInfo)

``op_info`` asks; here is the list of what misses, with the cause. A commit asks a slice of the
operators, ``ANYCHIP_SLICE=all`` every one, and then the shares of the whole.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from anychip.cabi import include_directory
from tests import slices

ROOT = Path(__file__).parents[3]
MINICHIP = ROOT / "examples" / "minichip" / "minichip.c"
CHOSEN = slices.chosen()
"""Asked here, since no test sees the variables of the person."""
FEWEST_SAMPLES, FEWEST_OPERATORS = 0.98, 0.95


class Miss(NamedTuple):
    samples: int
    says: str
    cause: str


SPARSE = "torch has no sparse layouts on a private-use device but those that it brings itself"
ROUNDING = "torch composes it of other operators on such a device: sums in another order"
MISSES = {
    "native_layer_norm": Miss(4, "not close", ROUNDING),
    "nn.functional.layer_norm": Miss(1, "not close", ROUNDING),
    "nn.functional.scaled_dot_product_attention": Miss(4, "not close", ROUNDING),
    "sparse.mm.reduce": Miss(16, "SparseCsr", SPARSE),
    "sparse.sampled_addmm": Miss(8, "SparseCsr", SPARSE),
    "tensor_split": Miss(4, "to be on cpu", "sections are the host's; the test moves them"),
    "to_sparse": Miss(2, "'Sparse", SPARSE),
}


def asked(library: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """All names, and what each operator of the slice gave.

    A process that dies leaves the rest to another one.
    """
    found: list[dict[str, Any]] = []
    words = [sys.executable, "-m", "tests.integration.cabi.op_info", str(library)]
    part = "all" if CHOSEN.number is None else str(CHOSEN.number)
    while True:
        last = [line["operator"] for line in found[-1:]]
        done = subprocess.run(
            [*words, *last], cwd=ROOT, env={**os.environ, slices.VARIABLE: part},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines() if line[:2] == '{"']
        assert lines, done.stderr[-2000:]
        found += [line for line in lines if "operator" in line]
        if done.returncode == 0:
            return lines[0]["known"], found
        assert "begin" in lines[-1], done.stderr[-2000:]
        died = {"misses": [f"the process ended with {done.returncode}"], "samples": 1}
        found.append({"operator": lines[-1]["begin"], **died})


def test_operators_of_torchs_database_are_right_but_for_the_list(tmp_path: Path) -> None:
    library = tmp_path / "libminichip.so"
    flags = ["-shared", "-fPIC", "-pthread", f"-I{include_directory()}"]
    subprocess.run(["gcc", *flags, str(MINICHIP), "-o", str(library)], check=True)
    known, found = asked(library)
    assert len(known) > 600
    assert set(MISSES) <= set(known), "an entry names no operator"
    wrong = {line["operator"]: line["misses"] for line in found if line["misses"]}
    assert {name: misses for name, misses in wrong.items() if name not in MISSES} == {}
    for line in found:
        if miss := MISSES.get(line["operator"]):
            assert len(line["misses"]) == miss.samples, f"{line['operator']}: change or drop it"
            assert all(miss.says in text for text in line["misses"]), line
    if len(found) == len(known):
        with_samples = [line for line in found if line["samples"]]
        samples = sum(line["samples"] for line in found)
        missed = sum(len(misses) for misses in wrong.values())
        assert 1 - missed / samples >= FEWEST_SAMPLES
        assert 1 - len(wrong) / len(with_samples) >= FEWEST_OPERATORS
        print(f"{samples - missed} of {samples} samples, of {len(with_samples)} operators "
              f"{len(with_samples) - len(wrong)} with every sample")  # fmt: skip
