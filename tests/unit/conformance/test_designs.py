"""Does a design ask every pair, does its seed turn it, and does a failure say what it takes?"""

import itertools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from anychip.conformance import designs
from anychip.conformance.calls import Draw, place_call, with_equal_numbers
from anychip.conformance.case import CheckFailedError, Context
from anychip.conformance.choices import ROWS, Choices
from anychip.conformance.covering import FEW, CoveringArray, Rows, covering_array
from anychip.conformance.oracles.drawn import DRAWN
from anychip.conformance.trial import Subject, Trial
from anychip.dispatch.operator import registered
from anychip.operators import all_specs
from tests.meta.honest import HonestBackend

LEVELS = [(3,), (2, 2), (4, 3, 5, 2), (7, 7, 6, 5, 2, 2, 2), (8, 1, 4, 4, 3, 2)]


@pytest.mark.parametrize("strength", [1, 2, 3])
@pytest.mark.parametrize("levels", LEVELS)
def test_array_has_every_combination_in_few_rows(levels: tuple[int, ...], strength: int) -> None:
    rows = covering_array(levels, strength, seed=5)
    assert uncovered(rows, levels, strength) == 0
    assert ((rows >= 0) & (rows < levels)).all()
    least = math.prod(sorted(levels)[-strength:])
    alone = sum(levels) - len(levels)
    assert least <= len(rows) <= 2 * least + 8 + alone
    assert not rows[0].any()
    few = rows[np.count_nonzero(rows, axis=1) <= FEW]
    for factor, count in enumerate(levels):  # each level beside few others
        assert set(few[:, factor]) == set(range(count))


def test_array_is_turned_by_the_seed_and_by_nothing_else() -> None:
    one, again, other = (covering_array((5, 4, 3, 3), 2, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def uncovered(rows: Rows, levels: Sequence[int], strength: int) -> int:
    """How many combinations of levels no row has, counted anew."""
    strength = min(strength, len(levels))
    count = 0
    for chosen_factors in itertools.combinations(range(len(levels)), strength):
        found = {tuple(row) for row in rows[:, chosen_factors].tolist()}
        count += math.prod(levels[factor] for factor in chosen_factors) - len(found)
    return count


def test_uncovered_combinations_are_counted() -> None:
    rows = covering_array((4, 3, 2), 2)
    pairs = [tuple(row) for row in rows[:, :2].tolist()]
    alone = next(index for index, pair in enumerate(pairs) if pairs.count(pair) == 1)
    assert uncovered(np.delete(rows, alone, 0), (4, 3, 2), 2) >= 1


@pytest.mark.parametrize("strength", [2, 3])
def test_all_is_asked_that_a_row_can_have_and_by_no_row_that_brings_nothing(strength: int) -> None:
    levels = {"a": 3, "b": 4, "c": 4, "d": 5}

    def can_be(row: dict[str, int]) -> bool:
        apart = row.get("b") == 3 and "d" in row  # d is not asked for then
        never = row.get("c") == row.get("a") == 2  # this is found out late
        return not (apart or never or (row.get("a") == 1 and row.get("d", 0) >= 3))

    array, rows = CoveringArray(strength, 1), []
    while array.begin():
        for factor, count in levels.items():
            if factor != "d" or array.row["b"] != 3:
                can = [factor != "d" or array.row["a"] != 1 or n < 3 for n in range(count)]
                array.level(factor, can)
        refused = {"c"} if array.row["c"] == array.row["a"] == 2 else set()
        if array.end(refused):
            rows.append({f: n for f, n in array.row.items() if f not in refused})
    for factors in itertools.combinations(levels, strength):
        for numbers in itertools.product(*(range(levels[factor]) for factor in factors)):
            wanted = dict(zip(factors, numbers, strict=True))
            assert any(wanted.items() <= row.items() for row in rows) == can_be(wanted), wanted
    assert len(rows) < math.prod(levels.values()) / (2 if strength == 2 else 1)


@pytest.mark.parametrize("strength", [2, 3])
def test_what_cannot_be_is_found_out_in_few_rows(strength: int) -> None:
    array, in_vain = CoveringArray(strength, 1), 0
    while array.begin():
        array.level("a", [True] * 2)
        for factor in "bcd":
            array.level(factor, [True, *[array.row["a"] == 0] * 9])
        in_vain += not array.end()
    # A row of each factor and a level beside its only one; not a row of each of 27 pairs.
    assert in_vain < 27 / 2, in_vain


def test_level_that_is_to_be_spared_is_in_few_rows() -> None:
    counts = []
    for sparing in (False, True):
        array, rows = CoveringArray(2, 1), []
        while array.begin():
            array.level("size", [True, True], sparing=sparing)
            for factor in "abcd":
                array.level(factor, [True] * 6)
            rows += [array.row["size"]] if array.end() else []
        counts.append(sum(rows))
    assert 6 <= counts[1] < counts[0] / 2, counts


def test_pairs_are_asked_beside_no_level_that_hides_them() -> None:
    levels, array, rows = (3, 4, 4, 3), CoveringArray(2, 3), []
    hiding = {("1", 3), ("2", 2)}
    while array.begin():
        for factor, count in enumerate(levels):
            array.level(str(factor), [True] * count)
        hides = {factor for factor, level in array.row.items() if (factor, level) in hiding}
        if array.end((), hides):
            rows.append(set(array.row.items()))
    for (i, m), (j, n) in itertools.combinations(enumerate(levels), 2):
        for pair in itertools.product(range(m), range(n)):
            wanted = {(str(i), pair[0]), (str(j), pair[1])}
            assert any(wanted <= row and not row & hiding - wanted for row in rows), wanted


@pytest.mark.parametrize("names", ["one", "two", "own"])
def test_levels_that_one_implementation_serves_are_asked_beside_each_other(names: str) -> None:
    """And beside no level that another one serves; with a name for each, beside none that hides."""
    levels, array, rows = (5, 4, 4, 4), CoveringArray(2, 3), list[dict[str, int]]()
    served = {"one": "aaa", "two": "aab", "own": "abc"}[names]

    def by(row: dict[str, int]) -> set[str]:
        """What serves a row, of factors whose levels but the first two go elsewhere."""
        return {served[int(f) - 1] for f, level in row.items() if f != "0" and level > 1}

    while array.begin():
        for factor, count in enumerate(levels):
            array.level(str(factor), [True] * count)
        apart = {factor: level for factor, level in array.row.items() if level}
        for factor, level in apart.items() if len(apart) <= FEW else ():
            for other in by({factor: level}):
                array.hide(factor, other)
        if array.end():
            rows.append(array.row)
    for (i, m), (j, n) in itertools.combinations(enumerate(levels), 2):
        for pair in itertools.product(range(m), range(n)):
            wanted = {str(i): pair[0], str(j): pair[1]}
            showing = [row for row in rows if row.items() >= wanted.items()]
            assert any(by(row) == by(wanted) or len(by(wanted)) > 1 for row in showing), wanted
    assert len(rows) <= {"one": 30, "two": 44, "own": 50}[names]


def test_pairs_are_asked_of_the_implementation_that_serves_plain_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in calls only that go to another one for how a tensor lies, and not for its size."""
    every, plain = set[frozenset[tuple[str, int]]](), set[frozenset[tuple[str, int]]]()
    levels, hidden = dict[str, int](), set[int]()

    def is_copied(layout: Any) -> bool:
        return layout != "contiguous" and layout["tensors"] in ("strided", "padded", "transposed")

    served = {True: "copies", False: "none"}
    monkeypatch.setattr(Trial, "served_by", lambda trial, _: served[is_copied(trial.call.layout)])

    class Watched(designs.Asked):
        def rows(self, array: CoveringArray, *about: Any) -> Any:
            for point in super().rows(array, *about):
                levels.clear()
                levels.update(point[0].levels)
                yield point
            hidden.update(place - array.factors["tensors lies"].start for place in array._always)

    def check(context: Context, of: Subject, row: designs.DesignedCall) -> None:
        hiding = {("shapes", 6), ("tensors' values", 6)}  # all empty; NaN
        items = [item for item in levels.items() if item not in hiding]
        ordinary = [item for item in items if not item[0].endswith(designs.LIES)]
        found = set(map(frozenset, itertools.combinations(ordinary, 2)))
        every.update(found)
        plain.update(set() if is_copied(row.call.layout) else found)

    designs.ask(
        Context(HonestBackend()),
        Watched(registered()["clip"], (torch.float32,), "operators", check),
    )
    assert len(every) > 200
    assert every - plain == set()
    assert hidden == {2, 4, 5}  # strided, in another order, with gaps


def test_level_takes_each_of_its_members_before_one_comes_again() -> None:
    asked = designs.Asked(registered()["relu"], (torch.float32,), "operators", _wrong)
    seen: dict[tuple[str, int], list[int]] = {}
    for row, _, _ in asked.rows(CoveringArray(2), 0):
        for factor, place in row.places.items():
            seen.setdefault((factor, row.levels[factor]), []).append(place)
    assert all(places == list(range(len(places))) for places in seen.values())
    members = "abcdefg"
    for start in (0, len(members)):
        taken = [Choices({}, 5, {"x": start + n}).member("x", {"all": members}) for n in range(7)]
        assert sorted(taken) == list(members)


def test_every_operator_of_ours_has_a_design_of_all_pairs() -> None:
    assert set(DRAWN) == {spec.name for spec in all_specs()}
    for name in ("linear", "adamw", "permute"):
        asked = designs.Asked(registered()[name], (torch.float32,), "operators", _wrong)
        array = CoveringArray(2)
        assert len(list(asked.rows(array, 0))) > 50
        found = array.asked()[list(array.factors).index("called from")]
        by_factor = dict(zip(array.factors, found, strict=True))
        by_factor.pop(designs.TWO, None)  # of linear by chance: where sizes are the same
        assert min(by_factor.values()) > 0.97
        assert sum(part < 1.0 for part in by_factor.values()) <= 1


@pytest.mark.parametrize("streams", [False, True])
def test_report_counts_what_calls_have_had(streams: bool) -> None:
    check, backend = lambda *_: None, HonestBackend()
    asked = designs.Asked(registered()["relu"], (torch.float32,), "operators", check, streams)
    context = Context(backend)
    designs.ask(context, asked)
    found = context.coverage
    assert found is not None
    rows, lies, called = map(found.factors.index, ("rows", "x lies", "called from"))
    assert found.levels[called] == len(designs.CALLERS) - (0 if streams else 2)
    assert found.asked[called][called] == found.asked[lies][called] == 1.0
    # No elements lie in no other way than densely: of 7 levels two are left.
    assert found.asked[rows][lies] <= 1.0 - 5 / (len(ROWS) * len(designs.PLACES))


def _wrong(context: Context, of: Subject, row: designs.DesignedCall) -> None:
    (x, _, bias), _ = row.call.arguments("linear", row.dtype)
    if bias is None and row.call.layout["weight"] in ("strided", "padded", "gapped"):  # type: ignore[index]
        raise CheckFailedError(f"wrong for {len(x)} rows")


def test_failure_of_two_conditions_names_both_and_nothing_else() -> None:
    asked = designs.Asked(registered()["linear"], (torch.float32,), "operators", _wrong)
    with pytest.raises(CheckFailedError) as raised:
        designs.ask(Context(HonestBackend()), asked)
    lines = str(raised.value).splitlines()
    assert lines[0] in {f"wrong for {rows} rows" for (rows,) in ROWS["few"]}
    assert lines[1].endswith("calls of a design of strength 2 failed")
    assert lines[2].startswith("  it takes: bias none, weight lies ")
    assert lines[2].count(",") == 1


def test_a_callers_level_changes_who_calls() -> None:
    threads, inference, backward, elsewhere = set(), set(), set(), set()

    def check(context: Context, of: Subject, row: designs.DesignedCall) -> None:
        threads.add(threading.get_ident())
        inference.add(torch.is_inference_mode_enabled())
        backward.add(torch._C._current_graph_task_id() >= 0)
        elsewhere.add(row.again(threading.get_ident) != threading.get_ident())

    asked = designs.Asked(registered()["relu"], (torch.float32,), "operators", check)
    designs.ask(Context(HonestBackend()), asked)
    assert len(threads) > 1
    assert inference == backward == elsewhere == {False, True}


def test_other_numbers_are_in_the_same_memory_for_a_while_and_then_the_own_ones() -> None:
    seen: list[tuple[str, tuple[int, float], tuple[int, float], float]] = []

    def check(context: Context, of: Subject, row: designs.DesignedCall) -> None:
        trial = of.trial(row.call, context)
        placed = trial.place(context)
        other = designs.with_other_numbers(trial, context, row)
        if other is None or not placed.args[0].numel() or placed.args[0].isnan().any():
            return

        def first(placed: Any) -> tuple[int, float]:
            return placed.args[0].data_ptr(), float(placed.args[0].flatten()[0])

        own = first(placed)
        beside = designs.between(first, placed, other, context, row)
        seen.append((row.between, own, beside.run(), first(placed)[1]))
        beside.check()
        writing = designs.between(lambda p: p.args[0].fill_(7.0), placed, other, context, row)
        writing.run()
        with pytest.raises(CheckFailedError, match=r"written.* of a call with other numbers"):
            writing.check()

    asked = designs.Asked(registered()["relu"], (torch.float32,), "operators", check)
    designs.ask(Context(HonestBackend()), asked)
    assert {between for between, *_ in seen} == {"elsewhere", "in the same memory"}
    assert all(after == own for _, (_, own), _, after in seen)
    assert all(there[1] != own[1] for _, own, there, _ in seen if own[1] > 0.0)
    shared = [own[0] == there[0] for between, own, there, _ in seen if between != "elsewhere"]
    assert any(shared)
    assert not any(own[0] == there[0] for between, own, there, _ in seen if between == "elsewhere")


@pytest.mark.parametrize("layout", ["shared", "shared-backwards"])
def test_list_in_one_storage_has_gaps_that_are_guarded(layout: Any) -> None:
    tensors = [torch.arange(6.0).view(2, 3), torch.zeros(0), torch.ones(5)]
    placed = place_call(("xs",), ((tensors,), {}), torch.device("cpu"), {"xs": layout})
    (found,) = placed.args
    assert len({t.untyped_storage().data_ptr() for t in found}) == 1
    assert all(map(torch.equal, found, tensors))
    assert (found[0].data_ptr() < found[2].data_ptr()) == (layout == "shared")
    found[2][1] = 7.0
    assert placed.touched((0,)) is None
    assert placed.touched(()) is not None
    found[2].as_strided((1,), (1,), found[2].storage_offset() + 5)[0] = 7.0
    assert placed.touched((0,)) is not None


@pytest.mark.parametrize("layout", ["offset", "strided", "transposed", "padded"])
def test_placed_tensor_has_its_layout_and_its_numbers(layout: Any) -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    y = torch.ones(5)
    placed = place_call(("x", "y"), ((x, y), {}), torch.device("cpu"), {"x": layout})
    assert torch.equal(placed.args[0], x)
    assert placed.args[0].is_contiguous() == (layout == "offset")
    assert (placed.args[0].data_ptr() % 16 == 0) == (layout != "offset")
    assert placed.args[0].stride(-1) == {"strided": 2, "transposed": 6}.get(layout, 1)
    assert placed.args[1].is_contiguous()
    assert placed.touched(()) is None


@pytest.mark.parametrize(("layout", "dim"), [("expanded", 0), ("repeated", -1)])
def test_expanded_tensor_has_one_place_per_number(layout: Any, dim: int) -> None:
    x = torch.arange(6.0).view(2, 3)
    (equal,) = with_equal_numbers(("x",), ((x,), {}), {"x": layout})
    placed = place_call(("x",), ((equal,), {}), torch.device("cpu"), {"x": layout})
    assert placed.args[0].stride(dim) == 0
    assert torch.equal(placed.args[0], x.narrow(dim, 0, 1).expand(2, 3))
    placed.args[0].view_as(x)[0, 0] = 7.0
    assert placed.touched(()) is not None


def test_packed_tensors_are_parts_of_one_and_guarded_together() -> None:
    gate, up = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(2, 4)
    layout: Any = {"gate": "packed", "up": "packed"}
    placed = place_call(("gate", "up"), ((gate, up), {}), torch.device("cpu"), layout)
    assert [t.stride() for t in placed.args] == [(7, 1), (7, 1)]
    assert torch.equal(placed.args[0], gate)
    assert torch.equal(placed.args[1], up)
    assert placed.touched(()) is None
    placed.args[1][1, 0] = 9.0
    assert placed.touched(()) is not None


def test_tensor_that_is_given_twice_is_placed_once() -> None:
    x = torch.ones(3)
    placed = place_call(("x", "y"), ((x, x), {}), torch.device("cpu"))
    assert placed.args[0].data_ptr() == placed.args[1].data_ptr()


def test_draw_with_seed_zero_is_the_plain_one_and_with_another_differs() -> None:
    plain = Draw(torch.float32, "a").normal(9)
    assert torch.equal(plain, Draw(torch.float32, "a", 0).normal(9))
    assert not torch.equal(plain, Draw(torch.float32, "a", 1).normal(9))
    assert not torch.equal(plain, Draw(torch.float32, "b").normal(9))
