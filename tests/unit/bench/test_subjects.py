"""The subjects run on the cpu backend and report what they say. No figure is asserted."""

import json
import logging
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import anychip
from anychip.bench import channels, dispatch, operators, updates
from anychip.bench.compiled import Compiler
from anychip.bench.timing import Samples
from anychip.cli.bench_command import command
from anychip.contract import OperatorTable, SampleMaker
from anychip.dispatch.operator import registered
from anychip.operators import all_specs
from anychip.operators.squares import root
from tests.unit.dispatch.tables import installation

RANDOM = {spec.name for spec in all_specs() if spec.random}
"""torch draws another mask."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes and rounds at which a subject takes a second."""
    anychip.use("cpu")
    for name, size in (("_TOKENS", 64), ("_HIDDEN", 128), ("_VOCABULARY", 64)):
        monkeypatch.setattr(operators, name, size)
    monkeypatch.setattr(operators, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(updates, "_SHAPE", (32, 64))
    monkeypatch.setattr(updates, "_NUMEL", 1 << 15)
    monkeypatch.setattr(channels, "_LENGTH", 64)
    monkeypatch.setattr(channels, "_SIDE", 7)
    for module in (dispatch, operators):
        real = module.interleave
        monkeypatch.setattr(
            module, "interleave", lambda calls, real=real, **k: real(calls, **{**k, "window": 1e-3})
        )


def test_bench_dispatch_reports_both_doors_and_their_peers(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    result = CliRunner().invoke(
        command, ["dispatch", "--backend", "cpu", "--rounds", "3", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert report["schema"] == 1
    assert (report["backend"], report["threads"]) == ("cpu", 1)
    peers = {"torch.library.custom_op", "pluggy hook, one plugin", "torch.add", "direct call"}
    assert peers <= rows.keys()
    assert all(0 < row["best_microseconds"] <= row["microseconds"] for row in rows.values())
    assert rows["ops, no gradient"]["facts"]["over"] == "direct call"
    assert rows["ops, no gradient"]["facts"]["goal us"] == 1.0
    assert rows["results examined"]["facts"]["over us"] > 0
    assert "ops, gradient" in result.output


def test_bench_dispatch_leaves_threads_and_policy_as_they_were() -> None:
    threads = torch.get_num_threads()
    dispatch.run(anychip.backend(), rounds=3, progress=lambda _: None)
    assert torch.get_num_threads() == threads
    assert "anychip_bench" not in str(anychip.provenance().fallbacks())


@pytest.mark.grid
@pytest.mark.parametrize("name", operators._cases())
def test_bench_ops_has_a_row_per_direction(name: str) -> None:
    report = operators.run(
        anychip.backend(), rounds=3, progress=lambda _: None, names=(name,), dtype=torch.bfloat16,
        compiled=False,
    )  # fmt: skip
    directions = 1 if registered()[name].gradient is None else 2
    assert [row.name.split()[0] for row in report.rows] == [name] * directions
    ours = r"cpu \((native|mapped)\)"
    for row in report.rows:
        assert {"GB/s", "x bound", "x reference", "x torch"} <= row.facts.keys()
        assert "displaced" not in row.facts
        # With gradients by two rows, of which one may be torch's.
        assert re.fullmatch(rf"({ours}( \+ {ours})?|reference)", row.facts["served by"])


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(operators._cases().keys() - RANDOM))
def test_bench_ops_compares_with_the_same_computation(name: str) -> None:
    # A peer that computes something else would make the ratio worthless.
    case = operators._cases()[name](SampleMaker(torch.device("cpu"), torch.float32))
    assert case.eager is not None
    if registered()[name].signature.written:
        copy = operators._cases()[name](SampleMaker(torch.device("cpu"), torch.float32))
        case.eager(*case.args, **case.attrs)
        registered()[name](*copy.args, **copy.attrs)
        ours, theirs = copy.args[0], case.args[0]
    else:
        ours = operators._listed(registered()[name](*case.args, **case.attrs))
        if name.endswith("sums_of_squares"):  # digits of what the peer has as numbers
            ours = tuple(root(rows).square() for rows in ours)
        theirs = operators._listed(case.eager(*case.args, **case.attrs))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_bench_ops_names_the_row_that_a_pack_displaced_and_how_much_faster_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table, forward = OperatorTable(), registered()["gelu"].spec.forward
    table.forward("gelu", kind="mapped")(lambda x, **attrs: forward(x, **attrs))
    seconds = {"ours": (7.0,)}
    monkeypatch.setattr(operators, "interleave", lambda calls, **_: {
        n: Samples(name=n, seconds=seconds.get(n, (1.0,))) for n in calls
    })  # fmt: skip
    with installation() as install:
        install(table)
        report = operators.run(
            anychip.backend(), rounds=3, progress=lambda _: None, names=("gelu", "swiglu"),
            compiled=False,
        )  # fmt: skip
    alone, both, *others = report.rows
    own = str(alone.facts["displaced"])
    assert own in ("cpu (native)", "cpu (mapped)")
    assert alone.facts["served by"] == "pack0 (mapped)"
    assert alone.facts["x displaced"] == 1 / 7
    assert (both.facts["served by"], both.facts["displaced"]) == (f"pack0 (mapped) + {own}", own)
    assert [note for note in report.notes if note.startswith("gelu forward:")] == [
        f"gelu forward: pack0 (mapped) takes 7 times as long as {own}, which it displaces; "
        "policy(forbid=...) leaves it out"
    ]
    assert not [row for row in others if "x displaced" in row.facts]


def test_bench_ops_has_a_case_for_every_operator() -> None:
    assert set(operators._cases()) == set(anychip.ops.__all__)


def test_bench_ops_with_a_compiler_has_a_column_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real compiler takes seconds per operator: torch's own tracer goes the same way.
    monkeypatch.setattr(type(anychip.backend()), "compile_backend", "eager")
    report = operators.run(
        anychip.backend(), rounds=3, progress=lambda _: None, names=("rms_norm", "swiglu")
    )
    assert [("x compiled" in row.facts) for row in report.rows] == [True] * 4
    assert not [note for note in report.notes if "left out" in note]


def test_bench_ops_without_a_compiler_says_why_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(anychip.backend()), "compile_backend", "no_such_compiler")
    report = operators.run(
        anychip.backend(), rounds=3, progress=lambda _: None, names=("rms_norm",)
    )
    assert [("x compiled" in row.facts) for row in report.rows] == [False] * 2
    (note,) = [note for note in report.notes if "left out" in note]
    assert note.startswith("torch.compile (no_such_compiler) is left out for everything: Invalid")


def test_compiler_that_fails_for_one_function_names_it() -> None:
    chip = SimpleNamespace(compile_backend="eager", device=lambda: torch.device("cpu"))
    compiler = Compiler(chip)  # type: ignore[arg-type]
    assert not logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.ERROR)
    x = torch.ones(2)

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today")

    assert compiler.compile("broken one", lambda compile: partial(compile(broken), x)) is None
    made = compiler.compile("double", lambda compile: partial(compile(lambda x: x + x), x))
    assert made is not None
    assert torch.equal(made(), x + x)  # type: ignore[arg-type]
    (note,) = compiler.notes
    assert "left out for broken one: " in note
    assert "not today" in note


def test_bench_ops_for_an_operator_without_a_case_is_refused() -> None:
    with pytest.raises(ValueError, match="no benchmark for mish; there are rms_norm"):
        operators.run(anychip.backend(), rounds=3, progress=lambda _: None, names=("mish",))
