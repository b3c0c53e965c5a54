"""Do the programs for a day with a GPU run, and would they notice what they look for?

Each stage runs here on the host with tiny sizes, so that none rots; what it measures says nothing.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import torch
from torch import Tensor

import anychip
from anychip import operators, ops
from anychip.conformance.case import Context
from anychip.conformance.chapters import all_cases
from anychip.conformance.expression import parse
from anychip.contract import Backend
from anychip_cuda import operators as rows_of_cuda  # noqa: F401 - declares the rows
from anychip_cuda.table import make_table
from benchmarks.cuda import __main__ as everything
from benchmarks.cuda import (
    agreement,
    bandwidth,
    determinism,
    edges,
    host_cost,
    optimizer,
    rates,
    suite,
    training,
)
from benchmarks.cuda.calls import Call, apart, different, every_call
from benchmarks.cuda.cases import MAKES
from benchmarks.cuda.stage import Stage
from benchmarks.cuda.stage import stage as stage_of

STAGES = {
    module.__name__.rpartition(".")[2]: module
    for module in (
        *(agreement, bandwidth, determinism, edges, host_cost, optimizer, rates, suite, training),
    )
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    anychip.use("cpu")


@pytest.mark.grid
@pytest.mark.parametrize("name", list(STAGES))
def test_stage_on_the_host_runs_and_its_checks_hold(name: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    more = {"agreement": ["--against", "cpu"], "bandwidth": ["--only", "rms_norm"]}.get(name, [])
    command: click.Command = STAGES[name].command
    given = ["--backend", "cpu", "--tiny", "--json", str(file), *more]
    assert command.main(given, standalone_mode=False) == 0
    found = json.loads(file.read_text())
    assert found["passed"]
    assert found["checks"] or found["reports"]
    assert all(row["microseconds"] > 0 for report in found["reports"] for row in report["rows"])


def test_every_stage_that_is_planned_is_a_program_of_the_folder() -> None:
    planned = {
        work.command[2].rpartition(".")[2] for work in everything.stages("cuda", "cuda-emulated")
        if work.own and work.command[0] == sys.executable
    }  # fmt: skip
    assert planned == set(STAGES)


def test_parts_of_the_suite_are_all_its_cases_once() -> None:
    every = [case.id for case in all_cases(Context(anychip.use("cpu"))) if not case.full]
    found: list[str] = []
    for words in suite.parts(3):
        chapters = {word for before, word in itertools.pairwise(words) if before == "--chapter"}
        holds = parse(words[-1]) if words[-2] == "-k" else lambda _: True
        found += [id for id in every if id.partition("/")[0] in chapters and holds(id)]
    assert sorted(found) == sorted(every)


# The cases of bandwidth

ELSEWHERE = {
    "adamw": "stage optimizer", "linear": "stage training; products bound it, not memory",
    "linear_cross_entropy": "stage training; products bound it, not memory",
}  # fmt: skip
"""Native rows that bandwidth leaves to others."""


def tiny_cases() -> dict[str, Any]:
    return bandwidth.cases(Stage(anychip.use("cpu"), tiny=True, deadline=0.0))


def test_every_native_row_has_a_case_of_bandwidth() -> None:
    kernels: Any = SimpleNamespace()
    native = {row.operator for row in make_table(kernels, mapped=False) if row.kind == "native"}
    measured = {name.partition(" ")[0] for name in tiny_cases()}
    assert native == measured | set(ELSEWHERE)
    assert not measured & set(ELSEWHERE)


COMPARABLE = [name for kind in MAKES.values() for name in kind if "dropout" not in name]
"""Torch's masks are others."""


@pytest.mark.parametrize("name", COMPARABLE)
def test_torchs_way_of_a_case_gives_what_the_operator_gives(name: str, cpu: Backend) -> None:
    (make,) = (make for label, make in tiny_cases().items() if label.startswith(f"{name} "))
    torch.manual_seed(1)
    case = make(bandwidth.OnDevice(torch.device("cpu"), torch.float32))
    ours, theirs = (
        listed(way(*case.args, **case.attrs)) for way in (getattr(ops, name), case.eager)
    )
    # Of further outputs (statistics, counts) torch has none, or others.
    assert 1 <= len(theirs) <= len(ours)
    for got, want in zip(ours, theirs, strict=False):
        bound = 1e-5 if want.is_floating_point() else 0.0
        torch.testing.assert_close(got, want.to(got.dtype), rtol=bound, atol=bound)


def listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


# The comparisons


def test_different_sees_one_bit_and_the_sign_of_zero() -> None:
    x = torch.tensor([1.0, 0.0, 3.0])
    assert different([x, x], [x.clone(), x]) == ""
    assert "tensor 1: 1 of 3" in different([x, torch.tensor([1.0, -0.0, 3.0])], [x, x])
    assert different([x], [x.double()])
    assert different([x], [x, x])
    nan = torch.full((2,), torch.nan)
    assert different([nan], [nan.clone()]) == ""


@pytest.mark.parametrize(
    ("got", "holds"),
    [
        (torch.tensor([1.0, 2.0**-8, 0.0], dtype=torch.bfloat16), True),
        (torch.tensor([1.0078125, 2.0**-8, 0.0], dtype=torch.bfloat16), True),  # one unit
        (torch.tensor([1.0234375, 2.0**-8, 0.0], dtype=torch.bfloat16), False),  # three
        (torch.tensor([1.0, 2.0**-8, 0.01], dtype=torch.bfloat16), False),
        (torch.tensor([1.0, torch.nan, 0.0], dtype=torch.bfloat16), False),
        (torch.tensor([1.0, torch.inf, 0.0], dtype=torch.bfloat16), False),
        (torch.tensor([1.0, 2.0**-8, 0.0]), False),
    ],
)
def test_apart_allows_roundings_and_no_more(got: Tensor, holds: bool) -> None:
    want = torch.tensor([1.0, 2.0**-8, 0.0], dtype=torch.bfloat16)
    assert (apart([got], [want]) == "") is holds


def test_apart_compares_integers_exactly() -> None:
    want = torch.tensor([1, 2])
    assert apart([want.clone()], [want]) == ""
    assert apart([torch.tensor([1, 3])], [want])


@pytest.fixture
def cpu() -> Backend:
    return anychip.use("cpu")


def a_call(cpu: Backend, name: str) -> Call:
    return next(c for c in every_call(cpu, tiny=True) if c.spec.name == name)


def test_every_call_covers_every_operator_and_its_gradients(cpu: Backend) -> None:
    found = {call.spec.name: call() for call in every_call(cpu, tiny=True)}
    assert set(found) == {spec.name for spec in operators.all_specs()}
    assert len(found["rms_norm"]) == 3  # y, dx, dweight
    assert len(found["adamw"]) > 3  # what it writes


@pytest.mark.parametrize("name", ["rms_norm", "adamw"])
def test_determinism_notices_a_kernel_that_changes_its_mind(
    name: str, cpu: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = a_call(cpu, name)
    assert determinism.repeated(call) == ""
    count = iter(range(100))
    inner = Call.on

    def unsteady(self: Call, args: Any, leaves: Any) -> list[Tensor]:
        found = inner(self, args, leaves)
        return [t * (1 + 1e-6) if next(count) == 7 and t.is_floating_point() else t for t in found]

    monkeypatch.setattr(Call, "on", unsteady)
    assert "other bits" in determinism.repeated(call)


def test_edges_notice_a_row_that_forgets_its_tail(cpu: Backend) -> None:
    right = edges.ROWS["gelu"]

    def wrong(*given: Tensor) -> Tensor:
        y = right(*given)
        keep = torch.arange(y.shape[-1]) < y.shape[-1] // 8 * 8
        return torch.where(keep, y, 0.0) if anychip_serves("gelu") else y

    def anychip_serves(name: str) -> bool:
        from anychip.dispatch import selection

        return name not in selection.current.policy.pin

    device = torch.device("cpu")
    assert edges.like_the_reference("gelu", right, 513, 1, device) == ""
    assert edges.like_the_reference("gelu", wrong, 512, 1, device) == ""
    assert "apart" in edges.like_the_reference("gelu", wrong, 513, 1, device)


def test_edges_notice_an_index_that_wraps(cpu: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert edges.LARGE["gelu"](1 << 16, device) == ""
    assert edges.large_dropout(1 << 14, device) == ""
    right = ops.gelu

    def wrapped(x: Tensor, **attrs: Any) -> Tensor:
        y: Tensor = right(x, **attrs)
        return torch.cat([y[:-1], y[:1]]) if x.numel() > 1 << 15 else y

    monkeypatch.setattr(ops, "gelu", wrapped)
    assert "other bits" in edges.LARGE["gelu"](1 << 16, device)


class FakeChip:
    """Streams that are the host's order, and graphs that run their work again.

    Args:
        forgets: its graphs replay nothing.
    """

    def __init__(self, forgets: bool) -> None:
        self.forgets, self.log = forgets, list[str]()

    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: self.log.append("waits"))

    current_stream = stream

    @contextmanager
    def use_stream(self, stream: Any) -> Iterator[None]:
        self.log.append("enters")
        yield

    def capture(self, work: Callable[[], list[Tensor]]) -> Any:
        result = [t.clone() for t in work()]

        def replay() -> None:
            for old, new in zip(result, work(), strict=True):
                old.copy_(old if self.forgets else new)

        return SimpleNamespace(result=result, replay=replay)


def test_streams_and_graphs_are_compared_with_a_plain_call(cpu: Backend) -> None:
    call = a_call(cpu, "rms_norm")
    good: Any = SimpleNamespace(chip=FakeChip(forgets=False))
    bad: Any = SimpleNamespace(chip=FakeChip(forgets=True))
    assert edges.on_stream(good, call) == ""
    assert good.chip.log == ["waits", "enters", "waits"]
    assert edges.in_graph(good, call) == ""
    assert "other bits" in edges.in_graph(bad, call)
    assert edges.from_thread(call) == ""


# The plain decoders, and the rest of the training stage


def test_flops_of_a_step_are_those_of_the_formula() -> None:
    setting = training.Setting(
        config=training.GPTConfig(vocab_size=8, context=4, layers=2, heads=1, width=3), batch=5
    )
    assert setting.tokens == 20
    assert setting.flops(100) == 20 * (6 * 100 + 6 * 2 * 4 * 3)


# The whole run


def test_a_stage_without_any_answer_has_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    @stage_of(seconds=1.0)
    def nothing(stage: Stage) -> None:
        """Asks nothing."""

    @stage_of(seconds=1.0)
    def wrong(stage: Stage) -> None:
        """Asks two questions."""
        stage.attempt("first", lambda: "it is wrong")
        stage.attempt("second", lambda: 1 / 0)  # type: ignore[arg-type, return-value]

    assert nothing.main(["--backend", "cpu"], standalone_mode=False) == 1
    assert wrong.main(["--backend", "cpu"], standalone_mode=False) == 1
    said = capsys.readouterr().out
    assert "FAILED first: it is wrong" in said
    assert "FAILED second: ZeroDivisionError: division by zero" in said


def work(name: str, program: str, seconds: float = 100.0, **more: Any) -> everything.Work:
    return everything.Work(name, [sys.executable, "-c", program], seconds, own=False, **more)


def test_a_run_goes_on_after_failures_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = [
        work("good", "import os; print(os.environ['ASKED'])", env={"ASKED": "yes"}),
        work("bad", "raise SystemExit(3)"),
        work("slow", "import time; time.sleep(300)", seconds=1.0),
        everything.Work("absent", ["/nowhere/tool"], 100.0, own=False),
        work("tool", "raise SystemExit(4)", missing="no tool on PATH"),
    ]
    monkeypatch.setattr(everything, "stages", lambda *given: listed)
    monkeypatch.setattr(everything, "GRACE_S", 0.0)
    given = ["--folder", str(tmp_path), "--seconds", "401"]
    assert everything.command.main(given, standalone_mode=False) == 1
    statuses = [line.split(None, 3)[-1] for line in capsys.readouterr().out.splitlines()[:5]]
    assert statuses[:2] == ["passed", "failed (3)"]
    assert statuses[2].startswith("ended after 1 s")
    assert statuses[3].startswith("could not be started")
    assert statuses[4] == "left out: no tool on PATH"
    assert (tmp_path / "good.txt").read_text() == "yes\n"
    given += ["--only", "good", "--only", "tool"]
    assert everything.command.main(given, standalone_mode=False) == 0


def test_the_page_has_tables_failures_and_notes(tmp_path: Path) -> None:
    row = {"name": "gelu 8 x 8 forward", "microseconds": 12.345678, "facts": {"GB/s": 4100.4}}
    report = {"subject": "operators, bfloat16", "rows": [row]}
    checks = [{"what": "a", "holds": True, "text": ""}, {"what": "b", "holds": False, "text": "no"}]
    found = {
        "device": "NVIDIA H200 (9.0), driver 580", "checks": checks,
        "reports": [report, report], "notes": ["Liger is left out"],
    }  # fmt: skip
    outcome = {"stage": "bandwidth", "status": "failed (1)", "seconds": 3.2, "found": found}
    page = everything.write(tmp_path, [outcome])
    assert page.name.startswith("cuda_nvidia-h200-9-0_")
    text = page.read_text()
    assert "| bandwidth | 3 | failed (1), 1 of 2 checks hold |" in text
    assert "- b: no\n- note: Liger is left out\n" in text
    assert text.count("| gelu 8 x 8 forward | 12.35 | 4100 |") == 2
    assert json.loads(page.with_suffix(".json").read_text()) == [outcome]


def test_script_plans_the_run_and_stops_when_nothing_can_be_installed(tmp_path: Path) -> None:
    script = str(everything.ROOT / "benchmarks" / "h200.sh")
    given = [script, "--installed", "--python", sys.executable, "--dry-run"]
    planned = subprocess.run(given, capture_output=True, text=True)
    assert planned.returncode == 0, planned.stderr
    assert planned.stdout.count("benchmarks.cuda.") >= len(STAGES)
    given = [script, "--wheel", "/nowhere/anychip.whl", "--python", sys.executable]
    refused = subprocess.run(given, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "could not be installed" in refused.stdout
