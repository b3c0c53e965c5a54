"""The simulator against closed forms, in exact arithmetic, and its picture.

In the picture: every computation where it ran, text that fits, the numbers beside.
"""

import gc
import itertools
import re
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from anychip.train.parallel import (
    Action,
    Bytes,
    Costs,
    ScheduleError,
    Span,
    Timeline,
    add_communication,
    add_weights,
    draw,
    gpipe,
    make_schedule,
    one_f_one_b,
    parse,
    simulate,
)

SIZES = range(2, 17)
COSTS = {p: (Fraction(1, 3), Fraction(5, 7)) if p <= 5 else (7, 15) for p in SIZES}
"""Exact both; sums of integers are quicker."""


@pytest.fixture
def no_cycles() -> Iterator[None]:
    """Looking for them among millions of tuples takes longer than to make those."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.grid
@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("stages", SIZES)
def test_bubble_of_gpipe_and_1f1b_is_the_closed_form(stages: int) -> None:
    """(p - 1)(F + B) on every rank, whatever m is; Narayanan et al. 2021, section 2.2.1."""
    forward, backward = COSTS[stages]
    bubble = (stages - 1) * (forward + backward)
    for count in range(stages, 8 * stages + 1):
        for generate in (gpipe, one_f_one_b):
            found = simulate(generate(stages, count), Costs(forward=forward, backward=backward))
            assert found.idle == (bubble,) * stages
            assert found.makespan == count * (forward + backward) + bubble
            assert found.bubble_ratio == Fraction(stages - 1, count + stages - 1)
            kept = [count if generate is gpipe else min(count, stages - r) for r in range(stages)]
            assert list(found.peak_in_flight) == kept


IDLE = {
    "gpipe": (1, lambda p, m: (p - 1) * 3, lambda p, m, r: m),
    "1f1b": (1, lambda p, m: (p - 1) * 3, lambda p, m, r: p - r),
    "interleaved": (2, lambda p, m: Fraction((p - 1) * 3, 2),
                    lambda p, m, r: Fraction(2 * (p - 1 - r) + p + 1, 2)),
    "interleaved of 4": (4, lambda p, m: Fraction((p - 1) * 3, 4),
                         lambda p, m, r: Fraction(2 * (p - 1 - r) + 3 * p + 1, 4)),
    "looped-bfs": (2, lambda p, m: Fraction((p - 1) * 3, 2), lambda p, m, r: m),
    "zb1p": (1, lambda p, m: p - 1, lambda p, m, r: p),
    "interleaved-zb": (2, lambda p, m: Fraction(p - 1, 2), lambda p, m, r: p),
    "zbv": (2, lambda p, m: Fraction(p - 1, 2), lambda p, m, r: p),
    "dualpipev": (2, lambda p, m: Fraction(p - 1, 2), lambda p, m, r: p + Fraction(1, 2)),
}  # fmt: skip
"""Stages per rank; idle time of a rank where F, I and W of all its stages together take 1 each; and
activations it keeps, in those of all its stages. Sources: Narayanan et al. 2021, section 2.2; Qi et
al. 2023, tables 1 and 2; of dualpipev DeepSeek's table, (p - 1)(F&B + B - 3W), less what a pair
waits for there: its parts begin one after the other here."""


@pytest.mark.grid
@pytest.mark.usefixtures("no_cycles")
@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("name", IDLE)
def test_idle_time_and_activations_of_every_schedule_are_the_closed_forms(
    name: str, ranks: int
) -> None:
    virtual, idle, kept = IDLE[name]
    for count in (2 * ranks, 4 * ranks):
        schedule = make_schedule(name.split()[0], ranks, count, virtual=virtual)
        costs = Costs(forward=Fraction(1, virtual), backward=Fraction(2, virtual))
        found = simulate(schedule, costs)
        assert set(found.idle) == {idle(ranks, count)}
        peaks = [Fraction(peak, virtual) for peak in found.peak_in_flight]
        assert peaks == [kept(ranks, count, rank) for rank in range(ranks)]


def test_weights_cost_what_is_said_and_the_input_the_rest_of_the_backward() -> None:
    schedule = make_schedule("zb1p", 2, 2)
    found = simulate(schedule, Costs(forward=2, backward=7, weights=3))
    took = {str(span.action): span.end - span.start for row in found.rows for span in row}
    assert (took["0F0"], took["0I0"], took["1W1"]) == (2, 4, 3)
    assert simulate(schedule, Costs(backward=2.0)) == simulate(schedule, Costs(weights=1))


def test_pair_takes_the_time_of_both_its_parts() -> None:
    pair = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
    parts = pair.replace("(0F1;1B0)OVERLAP_F_B", "0F1,1B0")
    assert simulate(parse(pair)) == simulate(parse(parts))


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b], ids=["gpipe", "1f1b"])
def test_message_time_of_a_single_microbatch_is_paid_at_every_boundary(generate: object) -> None:
    for stages in (1, 2, 5):
        found = simulate(generate(stages, 1), Costs(forward=3, backward=5, message=2))  # type: ignore[operator]
        assert found.makespan == stages * 8 + 2 * (stages - 1) * 2


def test_message_time_of_gpipe_is_paid_while_filling_and_draining_only() -> None:
    for stages, count in ((2, 3), (4, 9)):
        free = simulate(gpipe(stages, count), Costs(forward=3, backward=5))
        found = simulate(gpipe(stages, count), Costs(forward=3, backward=5, message=2))
        assert found.makespan - free.makespan == 2 * (stages - 1) * 2


def test_slowest_stage_sets_the_pace() -> None:
    costs = Costs(forward=[1, 4, 2], backward=[2, 8, 4])
    for count in (3, 10):
        found = simulate(gpipe(3, count), costs)
        # Fill to the slow stage, all its work, and what follows its last microbatch each way.
        assert found.makespan == 1 + count * 4 + 2 + 4 + count * 8 + 2
        assert found.idle[1] == found.makespan - count * 12


def longest_path(text: str, costs: Costs) -> int:
    """The makespan as the longest path in the graph of dependencies, by relaxation."""
    rows = parse(text).rows
    edges = [(row[i], row[i + 1], 0) for row in rows for i in range(len(row) - 1)]
    owner = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    actions = [action for row in rows for action in row]
    for one, two in itertools.permutations(actions, 2):
        step = {"F": 1, "B": -1, "I": -1, "W": 0}[one.kind]
        same = one.kind == two.kind and one[2] == two[2]
        if step and same and two.stage - one.stage == step:
            edges.append((one, two, int(owner[one.stage] != owner[two.stage])))
    start = dict.fromkeys(actions, 0)
    for _ in actions:
        for one, two, far in edges:
            start[two] = max(start[two], start[one] + costs.of(one) + far * costs.message)  # type: ignore[type-var,operator]
    return max(start[action] + costs.of(action) for action in actions)  # type: ignore[type-var,operator,return-value]


@pytest.mark.parametrize("text", [
    str(one_f_one_b(3, 4)),
    str(gpipe(2, 5)),
    # Two stages per rank, interleaved; and stages that come back to the first rank.
    "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1",
    "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1",
    str(make_schedule("zbv", 2, 3, virtual=2)),
    str(make_schedule("interleaved-zb", 2, 2, virtual=2)),
    # Backwards in another order.
    "0F0,0F1,0F2,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0",
], ids=["1f1b", "gpipe", "interleaved", "v-shaped", "zbv", "zb", "reversed"])  # fmt: skip
def test_makespan_is_the_longest_path(text: str) -> None:
    costs = Costs(forward=[3, 1, 4, 1], backward=[5, 9, 2, 6], message=2)
    schedule = parse(text)
    stages = schedule.num_stages
    costs = Costs(forward=costs.forward[:stages], backward=costs.backward[:stages], message=2)  # type: ignore[index]
    assert simulate(schedule, costs).makespan == longest_path(text, costs)


def test_messages_in_the_schedule_change_nothing() -> None:
    plain = one_f_one_b(4, 6)
    costs = Costs(forward=2, backward=3, message=1)
    assert simulate(add_communication(plain), costs) == simulate(plain, costs)


def test_simulate_of_a_deadlock_names_it() -> None:
    with pytest.raises(ScheduleError, match="deadlock"):
        simulate(parse("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1"))


@pytest.mark.parametrize(("costs", "message"), [
    (Costs(forward=[1, 2, 3]), "forward costs of 2 stages expected, got 3"),
    (Costs(backward=-1), "backward costs of at least 0 expected, got -1"),
    (Costs(weights=[1, 2.5]), r"weights costs of at most backward's expected, got \[1, 2.5\]"),
    (Costs(message=-0.5), "message costs of at least 0 expected, got -0.5"),
], ids=["count", "negative", "weights", "message"])  # fmt: skip
def test_simulate_with_costs_that_do_not_fit_says_so(costs: Costs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(gpipe(2, 2), costs)


def test_grid_of_1f1b_is_this() -> None:
    assert simulate(one_f_one_b(2, 3)).grid() == (
        "rank 0 | F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\nrank 1 | .  F0 B0 -- F1 B1 -- F2 B2 -- .  ."
    )


def test_grid_of_fractions_has_a_column_per_common_unit() -> None:
    costs = Costs(forward=Fraction(1, 3), backward=Fraction(1, 2))
    assert simulate(gpipe(1, 1), costs).grid() == "rank 0 | F0 -- B0 -- --"


def test_grid_shows_stages_where_a_rank_has_several() -> None:
    schedule = parse("0F0,1F0,1B0,0B0")
    assert simulate(schedule, Costs(backward=1)).grid() == "rank 0 | 0F0 1F0 1B0 0B0"


def test_grid_of_measured_times_keeps_to_its_columns() -> None:
    row = (Span(Action(0, "F", 0), 0.01, 0.05), Span(Action(0, "B", 0), 0.05, 0.1))
    assert Timeline((row,)).grid(10) == "rank 0 | .  F0 -- -- -- B0 -- -- -- --"
    with pytest.raises(ValueError, match="at least 1 column expected, got 0"):
        Timeline((row,)).grid(0)


def test_grid_in_the_documentation_is_what_is_printed() -> None:
    text = (Path(__file__).parents[4] / "docs" / "pipeline.md").read_text(encoding="utf-8")
    assert str(simulate(one_f_one_b(4, 8), Costs(forward=1, backward=2))) in text


def test_timeline_text_ends_with_the_numbers() -> None:
    assert str(simulate(one_f_one_b(2, 2))).endswith(
        "makespan 9, idle per rank 3, 3, bubble 33.3%, at most 2, 1 microbatches in flight"
    )


LEFT, WIDTH, WIDE = 66, 1040, 1216
FONT = 0.65
"""Width of a character in sizes of its font, in the widest of the usual ones."""
SVG = "{http://www.w3.org/2000/svg}"


def timeline(name: str, ranks: int, count: int, virtual: int) -> tuple[Timeline, str]:
    schedule = add_weights(make_schedule(name, ranks, count, virtual=virtual), whole=1)
    found = simulate(schedule, Costs(forward=1.0, backward=2.5))
    memory = found.memory(schedule, Bytes(saved=3 << 30, kept=2 << 30, weights=1 << 28))
    return found, draw(found, memory, title="a < b & c")


CASES = [
    ("1f1b", 2, 1, 1), ("gpipe", 4, 8, 1), ("interleaved", 4, 8, 4), ("zbv", 8, 16, 2),
    ("dualpipev", 8, 128, 2), ("interleaved-zb", 16, 64, 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks", "count", "virtual"), CASES)
def test_picture_has_every_computation_where_it_ran(
    name: str, ranks: int, count: int, virtual: int
) -> None:
    found, text = timeline(name, ranks, count, virtual)
    root = ElementTree.fromstring(text)
    drawn = [
        (float(x) - LEFT, float(y), float(x) - LEFT + float(width))
        for path in root.iter(f"{SVG}path") if path.get("fill")
        for x, y, width in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d", ""))
    ]  # fmt: skip
    scale = WIDTH / float(found.makespan)
    for rank, row in enumerate(found.rows):
        y = 62 + 30 * rank
        boxes = sorted((start, end) for start, at, end in drawn if at == y)
        assert len(boxes) == len(row)
        for (start, end), span in zip(boxes, row, strict=True):
            assert start == pytest.approx(float(span.start) * scale, abs=0.02)
            assert start < end <= float(span.end) * scale + 0.02
            assert end >= float(span.end) * scale - 0.82
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[0] == "a < b & c"
    for idle in found.idle:
        assert f"{float(idle / found.makespan):.1%} idle" in texts
    assert sum(str(text).startswith("peak ") for text in texts) == ranks


@pytest.mark.parametrize(("name", "ranks", "count", "virtual"), CASES)
def test_text_of_a_picture_runs_into_nothing(
    name: str, ranks: int, count: int, virtual: int
) -> None:
    """Numbers stay within their computation's width, all else within the page and off its like."""
    found, text = timeline(name, ranks, count, virtual)
    root = ElementTree.fromstring(text)
    height = float(root.get("viewBox", "").split()[3])
    narrowest = min(float(s.end - s.start) for row in found.rows for s in row)
    lines: dict[float, list[tuple[float, float]]] = {}
    for element in root.iter(f"{SVG}text"):
        size = float(re.sub(r"\D", "", element.get("style", "")) or 12)
        long, x = FONT * size * len(element.text or ""), float(element.get("x", 0))
        kind = element.get("class")
        begin = x - {"n": long / 2, "r": long}.get(str(kind), 0.0)
        assert begin >= 0
        assert begin + long <= WIDE + 4
        assert float(element.get("y", 0)) <= height
        lines.setdefault(float(element.get("y", 0)), []).append((begin, begin + long))
    assert narrowest > 0
    for places in lines.values():
        for (_, end), (begin, _) in pairwise(sorted(places)):
            assert end <= begin + 6
