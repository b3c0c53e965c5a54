"""Does perturbation find what a library ignores, and what a row does not pass on?"""

import enum
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anychip.conformance.perturbation import (
    Call,
    Reads,
    findings,
    forms,
    others,
    recorded,
    recording,
)
from anychip.contract import OperatorTable


class Rounding(enum.Enum):
    NEAREST = 0
    DOWN = 1


def norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5, *, out: torch.Tensor,
    rounding: Rounding = Rounding.NEAREST, workspace: torch.Tensor | None = None,
) -> int:  # fmt: skip
    """The made-up emulator, as its page says: it returns a status, and writes to ``out``."""
    if weight.shape != x.shape[-1:]:
        raise ValueError("161002")
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    out.copy_(y.floor() if rounding is Rounding.DOWN else y)
    if workspace is None or workspace.numel() < x.numel():
        return 1
    return 0


PAGE = {
    "x": Reads.VALUE, "weight": Reads.VALUE, "eps": Reads.VALUE, "rounding": Reads.VALUE,
    "workspace": Reads.FORM, "out": Reads.NOTHING,
}  # fmt: skip


def row(x: torch.Tensor, weight: torch.Tensor, eps: float, *, library: Any) -> torch.Tensor:
    """A row on it that is right."""
    out, workspace = torch.zeros_like(x), torch.zeros(x.numel())
    library.norm(x, weight, eps, out=out, rounding=Rounding.NEAREST, workspace=workspace)
    return out


def calls_of(function: Callable[..., Any], emulator: Callable[..., Any] = norm) -> list[Call]:
    """What a row calls of an emulator."""
    calls: list[Call] = []
    library = types.SimpleNamespace(norm=recorded(emulator, calls))
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((3, 4), (4,)))
    function(x, weight, 0.25, library=library)
    return calls


def ignoring(name: str, instead: Any) -> Callable[..., Any]:
    """The emulator, but one argument is always the same to it."""

    @functools.wraps(norm)
    def wrong(*args: Any, **named: Any) -> int:
        given = inspect.signature(norm).bind(*args, **named).arguments
        value = instead(given[name]) if callable(instead) else instead
        return norm(**{**given, name: value})

    return wrong


def test_emulator_that_reads_what_its_page_says_has_no_findings() -> None:
    calls = calls_of(row)
    assert [call.arguments.keys() for call in calls] == [PAGE.keys()]
    assert findings(calls, PAGE) == []


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("x", torch.ones_like), ("weight", torch.ones_like), ("eps", 0.25),
        ("rounding", Rounding.NEAREST), ("workspace", torch.zeros(99)),
    ],
)  # fmt: skip
def test_argument_that_the_emulator_ignores_is_found(name: str, instead: Any) -> None:
    (found,) = findings(calls_of(row, ignoring(name, instead)), PAGE)
    assert found.startswith(f"{name}: ignored")


@pytest.mark.parametrize("says", [Reads.NOTHING, Reads.FORM])
def test_argument_that_matters_against_its_page_is_found(says: Reads) -> None:
    (found,) = findings(calls_of(row), {**PAGE, "eps": says})
    assert found.startswith("eps: another value changes the outcome")


def test_argument_of_which_only_the_form_is_read_is_ignored_by_value() -> None:
    (found,) = findings(calls_of(row), {**PAGE, "workspace": Reads.VALUE})
    assert found.startswith("workspace: ignored")


def test_argument_on_the_page_that_no_call_passes_is_found() -> None:
    def lazy(x: torch.Tensor, weight: torch.Tensor, eps: float, *, library: Any) -> None:
        library.norm(x, weight, out=torch.zeros_like(x), workspace=None)

    found = findings(calls_of(lazy), PAGE)
    assert [text.split(":")[0] for text in found] == ["eps", "rounding", "workspace"]
    assert all(text.endswith("passed by no call, or as None") for text in found)


def test_page_without_any_call_is_found() -> None:
    assert [text.split(":")[0] for text in findings([], PAGE)] == [*PAGE, "no call was recorded"]
    assert findings([], {}) == ["no call was recorded"]


def test_argument_that_a_row_passes_and_no_page_has_is_found() -> None:
    page = {name: reads for name, reads in PAGE.items() if name != "rounding"}
    assert findings(calls_of(row), page) == ["rounding: passed, and not on the page"]


def own_findings(function: Callable[..., Any], emulator: Callable[..., Any] = norm) -> list[str]:
    """What the row does not pass on of what it is given itself."""
    library = types.SimpleNamespace(norm=emulator)
    given = {"x": torch.randn(3, 4), "weight": torch.randn(4), "eps": 0.25}
    call = Call(functools.partial(function, library=library), given)
    return findings([call], dict.fromkeys(given, Reads.VALUE))


def test_row_that_passes_on_all_that_it_is_given_has_no_findings() -> None:
    assert own_findings(row) == []


@pytest.mark.parametrize(("lost", "wrong"), [
    ("eps", lambda x, weight, eps, library: row(x, weight, 1e-5, library=library)),
    ("weight", lambda x, weight, eps, library: row(x, x[0], eps, library=library)),
])  # fmt: skip
def test_row_that_passes_a_wrong_argument_is_found(lost: str, wrong: Any) -> None:
    (found,) = own_findings(wrong)
    assert found.startswith(f"{lost}: ignored")


def test_wrong_argument_shows_in_values_only_of_an_emulator_that_reads_it() -> None:
    def wrong(x: Any, weight: Any, eps: Any, library: Any) -> Any:
        return row(x, weight, eps + 1, library=library)

    x, weight, deaf = torch.randn(3, 4), torch.randn(4), ignoring("eps", 0.25)
    right, read, unread = (
        function(x, weight, 0.25, library=types.SimpleNamespace(norm=emulator))
        for function, emulator in ((row, norm), (wrong, norm), (wrong, deaf))
    )
    assert not torch.equal(right, read)
    assert torch.equal(right, unread)
    assert own_findings(wrong) == []
    (found,) = findings(calls_of(wrong, deaf), PAGE)
    assert found.startswith("eps: ignored")


# What is no value


def one_call(function: Callable[..., Any], **given: Any) -> list[Call]:
    return [Call(function, given)]


def test_value_of_which_no_other_is_known_is_found_until_one_is_named() -> None:
    calls = one_call(lambda mode: {"none": 0, "mean": 1}[mode], mode="mean")
    (found,) = findings(calls, {"mode": Reads.VALUE})
    assert found.startswith("mode: no call can show it")
    assert findings(calls, {"mode": Reads.VALUE}, values={"mode": ("mean", "none")}) == []
    (found,) = findings(calls, {"mode": Reads.VALUE}, values={"mode": ("mean",)})
    assert found.startswith("mode: no call can show it")


def checked(n: int) -> int:
    """It ignores what a check in front of it lets pass, which is all above 0."""
    if n <= 0:
        raise RuntimeError("in front")
    return 0


def test_error_in_front_of_the_library_shows_nothing_where_another_value_passes() -> None:
    page = {"n": Reads.VALUE}
    assert findings(one_call(checked, n=1), page) == []
    (found,) = findings(one_call(checked, n=1), page, of_library=lambda error: False)
    assert found.startswith("n: ignored")


def test_error_in_front_of_the_library_shows_all_where_no_other_value_passes() -> None:
    def strict(n: int) -> int:
        return checked(1 if n == 7 else 0)

    assert findings(one_call(strict, n=7), {"n": Reads.VALUE}, of_library=lambda error: False) == []


def test_error_after_which_nothing_can_be_called_ends_the_search() -> None:
    def is_of_library(error: Exception) -> bool:
        raise error

    with pytest.raises(RuntimeError, match="in front"):
        findings(one_call(checked, n=1), {"n": Reads.VALUE}, of_library=is_of_library)


def test_what_differs_between_two_equal_calls_shows_nothing() -> None:
    count = iter(range(1000))
    (found,) = findings(one_call(lambda n: (0, next(count)), n=1), {"n": Reads.VALUE})
    assert found.startswith("n: ignored")


def test_memory_that_nobody_writes_and_keeps_what_was_there_shows_nothing() -> None:
    x = torch.ones(2)
    memory = x.clone()

    def deaf(x: torch.Tensor) -> torch.Tensor:
        unwritten = memory.clone()
        memory.copy_(x)
        return unwritten

    (found,) = findings(one_call(deaf, x=x), {"x": Reads.VALUE})
    assert found.startswith("x: ignored")


def test_fewer_results_are_another_outcome() -> None:
    assert findings(one_call(lambda n: [0] * n, n=2), {"n": Reads.VALUE}) == []


def test_argument_that_is_written_tells_of_itself() -> None:
    def add(x: torch.Tensor) -> None:
        x.add_(1)

    page = {"x": Reads.VALUE}
    assert findings(one_call(add, x=torch.ones(1)), page) == []
    (found,) = findings(one_call(lambda x: None, x=torch.ones(1)), page)
    assert found.startswith("x: ignored")


@pytest.mark.parametrize(
    "value",
    [
        True, 3, 0, 0.5, 0.0, Rounding.DOWN, torch.bfloat16, [1, 2], (0.5, True), [None, 1.0],
        torch.zeros(2), torch.tensor(1), torch.arange(3), torch.ones(1, dtype=torch.int32),
        torch.tensor([[2, 1]]), torch.tensor([[True, False]]), torch.tensor(True),
        torch.ones(2, dtype=torch.float8_e4m3fn),
    ],
    ids=str,
)  # fmt: skip
def test_others_of_a_value_are_of_its_kind_and_one_is_not_it(value: Any) -> None:
    found = list(others(value))
    assert {type(other) for other in found} == {list if isinstance(value, tuple) else type(value)}
    if isinstance(value, torch.Tensor):
        assert {other.dtype for other in found} == {value.dtype}
        # Of zeros, -0 is one whose sign alone is another.
        found, value = [other.tolist() for other in found], value.tolist()
    assert any(other != value for other in found)


@pytest.mark.parametrize("value", [None, "text", [], {1: 2}, torch.device("meta")], ids=str)
def test_others_of_what_only_its_author_knows_are_none(value: Any) -> None:
    assert list(others(value)) == []


def test_forms_leave_out_and_change_sizes_and_strides() -> None:
    nothing, *tensors = forms(torch.arange(6).view(2, 3))
    assert nothing is None
    assert [tuple(x.shape) for x in tensors] == [(1, 3), (2, 2), (1, 2, 3), (2, 3)]
    assert tensors[-1].stride() == (1, 2)
    assert torch.equal(tensors[-1], torch.arange(6).view(2, 3))


# Calls of torch's operators


def test_operators_that_rows_call_are_recorded_in_both_directions_and_threads() -> None:
    table = OperatorTable()
    table.pair(
        "made_up", forward=lambda x: torch.clamp(x, -1.0, 0.5),
        backward=lambda g: torch.add(g, g, alpha=2.0), num_residuals=0, fake_residuals=lambda x: (),
    )  # fmt: skip
    (made_up,) = table
    function, pair = made_up.function, made_up.paired
    x = torch.linspace(-3, 3, 5)
    with recording(table, ["aten::clamp", "aten::add.Tensor", "aten::mm"]) as calls:
        torch.clamp(x, -7.0)
        made_up.function(x)
        made_up.function(x + 1)
        assert made_up.paired is not None
        thread = threading.Thread(target=made_up.paired.backward, args=(x,))
        thread.start()
        thread.join()
    assert (made_up.function, made_up.paired) == (function, pair)
    assert calls["aten::mm"] == []
    (clamped,), (added,) = calls["aten::clamp"], calls["aten::add.Tensor"]
    assert torch.equal(clamped.arguments["self"], x)
    assert (clamped.arguments["min"], clamped.arguments["max"]) == (-1.0, 0.5)
    assert added.arguments.keys() == {"self", "other", "alpha"}

    for call in (clamped, added):
        assert findings([call], dict.fromkeys(call.arguments, Reads.VALUE)) == []


def test_calls_that_differ_in_more_than_tensors_are_kept_as_they_were_four_of_them() -> None:
    calls: list[Call] = []
    add = recorded(lambda x, n: x.add_(n), calls)
    x = torch.zeros(1)
    for n in (1, 1, 2, 3, 4, 5):
        add(x, n)
    assert [(c.arguments["x"].item(), c.arguments["n"]) for c in calls] == [
        (0, 1), (2, 2), (4, 3), (7, 4),
    ]  # fmt: skip
