"""Schedules as data: their order against torch's, their text, and each rule of the validator."""

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from anychip.train.parallel import (
    Schedule,
    ScheduleError,
    add_communication,
    add_weights,
    dualpipev,
    gpipe,
    interleaved,
    looped_bfs,
    make_schedule,
    one_f_one_b,
    parse,
    validate,
    zbv,
    zero_bubble,
)
from anychip.train.parallel.actions import ActionKind

Generator = Callable[[int, int], Schedule]
MESSAGES: tuple[ActionKind, ...] = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
GENERATORS: dict[str, Generator] = {
    "gpipe": gpipe, "1f1b": one_f_one_b, "zb1p": zero_bubble, "zbv": zbv,
}  # fmt: skip
"""Those that take any sizes."""
# One stage, fewer microbatches than stages, as many, a multiple, and what divides nothing.
SHAPES = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 7), (4, 1), (4, 3), (4, 4), (4, 8), (5, 13), (8, 16)]


@pytest.fixture(params=GENERATORS.values(), ids=GENERATORS.keys())
def generator(request: pytest.FixtureRequest) -> Generator:
    found: Generator = request.param
    return found


def executed_by_torch(kind: Any, stages: int, microbatches: int) -> list[list[str]]:
    """What torch's own loop asks of a stage that only writes it down.

    Not its ``_get_pipeline_order``: the one of 1F1B in torch 2.13 numbers the last rank's forwards
    from 1 on.
    """
    rows = []
    for stage in range(stages):
        done: list[str] = []
        note: Any = SimpleNamespace(
            is_first=stage == 0, is_last=stage == stages - 1, has_backward=True, num_stages=stages,
            stage_index=stage, group_size=stages, group_rank=stage, submod=None, group=None,
            _configure_data_parallel_mode=lambda last: None, _stage_meta=None,
            _stage_forward_initialized=True,
            forward_one_chunk=lambda i, *a, d=done, s=stage, **k: d.append(f"{s}F{i}"),
            backward_one_chunk=lambda i, *a, d=done, s=stage, **k: d.append(f"{s}B{i}"),
            get_fwd_recv_ops=lambda i: [], get_fwd_send_ops=lambda i: [],
            get_bwd_recv_ops=lambda i: [], get_bwd_send_ops=lambda i: [],
            scale_grads=lambda count: None, perform_reduce_grad=lambda count: None,
            clear_runtime_states=lambda: None,
        )  # fmt: skip
        schedule = kind(note, microbatches, loss_fn=None)
        schedule._initialize_stage = lambda *a, **k: None
        schedule._initialized = schedule._stage_initialized = True
        schedule._stage_forward_initialized = schedule._stage_backward_initialized = True
        schedule._maybe_compute_loss = lambda *a, **k: None
        schedule._maybe_get_loss = lambda *a, **k: None
        schedule._update_losses = lambda *a, **k: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches, None, None)
        rows.append(done)
    return rows


@pytest.mark.parametrize(
    ("stages", "microbatches"), [(1, 2), (2, 2), (2, 7), (4, 4), (4, 11), (8, 9)]
)
@pytest.mark.parametrize(("generate", "kind"), [
    (gpipe, torchs.ScheduleGPipe), (one_f_one_b, torchs.Schedule1F1B),
], ids=["gpipe", "1f1b"])  # fmt: skip
def test_schedule_order_is_the_one_that_torch_executes(
    generate: Generator, kind: Any, stages: int, microbatches: int
) -> None:
    ours = [[str(action) for action in row] for row in generate(stages, microbatches).rows]
    assert ours == executed_by_torch(kind, stages, microbatches)


def written_by_torch(name: str, ranks: int, microbatches: int, virtual: int) -> str:
    """The text of torch's rows, made without stages that could run."""

    class Place(torchs._PipelineStageBase):
        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_size = index, ranks * virtual, ranks
            self.group_rank, self.group, self.submod, self.device = 0, None, None, None  # type: ignore[assignment]

        def _nothing(self, *args: Any, **kwargs: Any) -> Any: ...

        _create_grad_recv_info = _prepare_backward_infra = _prepare_forward_infra = _nothing

    made = torchs.get_schedule_class(name)(
        [Place(index) for index in range(virtual)], microbatches, loss_fn=lambda y, t: y
    )
    order = made.pipeline_order  # type: ignore[attr-defined]
    return "\n".join(",".join("" if a is None else str(a) for a in order[r]) for r in range(ranks))


INTERLEAVED_SHAPES = [(p, m, v) for p in range(2, 9) for m in (p, 2 * p, 5 * p) for v in (2, 3)]
V_SHAPES = [(p, m, 2) for p in range(2, 9) for m in (2 * p, 2 * p + 1, 5 * p)]
SAME = {
    "Interleaved1F1B":
        (interleaved, [*INTERLEAVED_SHAPES, (4, 6, 2), (4, 3, 2), (3, 8, 2), (4, 1, 3)]),
    "InterleavedZeroBubble": (
        zero_bubble,
        [*INTERLEAVED_SHAPES, (4, 6, 2), (4, 3, 2), *((p, m, 1) for p, m, _ in V_SHAPES)],
    ),
    "ZBVZeroBubble": (lambda p, m, v: zbv(p, m), [*V_SHAPES, (4, 1, 2), (4, 5, 2), (8, 3, 2)]),
    "DualPipeV": (lambda p, m, v: dualpipev(p, m), V_SHAPES),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_schedule_with_several_stages_per_rank_is_the_text_that_torch_writes(name: str) -> None:
    generate, shapes = SAME[name]
    for ranks, microbatches, virtual in shapes:
        if virtual == 1 and microbatches % max(1, microbatches // ranks):
            continue  # torch refuses what one stage per rank could do
        theirs = parse(written_by_torch(name, ranks, microbatches, virtual))
        assert str(generate(ranks, microbatches, virtual)) == str(theirs)


@pytest.mark.parametrize(("ranks", "microbatches", "virtual"), INTERLEAVED_SHAPES)
def test_looped_bfs_is_torchs_with_backwards_in_ascending_order(
    ranks: int, microbatches: int, virtual: int
) -> None:
    turned = [
        [a if a.kind == "F" else a._replace(microbatch=microbatches - 1 - a[2]) for a in row]
        for row in parse(written_by_torch("LoopedBFS", ranks, microbatches, virtual)).rows
    ]
    assert [list(row) for row in looped_bfs(ranks, microbatches, virtual).rows] == turned


@pytest.mark.parametrize(
    "name", ["interleaved", "looped-bfs", "interleaved-zb", "zbv", "dualpipev"]
)
def test_each_stage_has_its_microbatches_in_ascending_order(name: str) -> None:
    """Forward, and where gradients are added up: what makes the bits those of one rank."""
    for row in make_schedule(name, 4, 8, virtual=2).unpaired().rows:
        for stage in {action.stage for action in row}:
            for kinds in ("F", "BW"):
                found = [a.microbatch for a in row if a.stage == stage and a.kind in kinds]
                assert found == list(range(8))


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_schedule_text_is_torchs_and_reads_back(
    generator: Generator, stages: int, microbatches: int
) -> None:
    schedule = add_communication(generator(stages, microbatches))
    assert parse(str(schedule)) == schedule
    for row in schedule.rows:
        for action in row:
            theirs = torchs._Action.from_str(str(action))
            assert theirs is not None
            assert str(theirs) == str(action)
            assert (theirs.stage_index, theirs.microbatch_index) == action[:3:2]


def test_schedule_text_of_two_stages_is_this() -> None:
    assert str(one_f_one_b(2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert str(add_communication(gpipe(2, 1))) == (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )


def test_text_of_pairs_and_of_weights_is_torchs_and_reads_back() -> None:
    cells = ["(0F1;3B0)OVERLAP_F_B", "0UNSHARD", "12RESHARD", "3REDUCE_GRAD", "3I0", "3W0"]
    schedule = parse(",".join(cells))
    assert str(schedule) == ",".join(cells) + "\n"
    for action in schedule.rows[0]:
        theirs = torchs._Action.from_str(str(action))
        assert theirs is not None
        assert str(theirs) == str(action)
        number = -1 if theirs.microbatch_index is None else theirs.microbatch_index
        assert (theirs.stage_index, number) == (action.stage, action.microbatch)
    assert str(schedule.unpaired()).startswith("0F1,3B0,0UNSHARD")
    assert str(schedule.only("B", "W")) == "3B0,3W0\n"


def test_parse_leaves_out_empty_cells() -> None:
    assert parse("0F0,, 0F1 ,0B0,0B1,\r\n,1F0,1F1,1B0,,1B1\n").rows == gpipe(2, 2).rows


@pytest.mark.parametrize("cell", [
    "F0", "0F", "0X1", "-1F0", "0F0F1", "0SEND0", "0UNSHARD1", "0SEND_F", "(0F1;1F0)OVERLAP_F_B",
    "(0F1)OVERLAP_F_B", "0OVERLAP_F_B", "0W3 x",
])  # fmt: skip
def test_parse_of_no_action_names_row_and_column(cell: str) -> None:
    with pytest.raises(ScheduleError, match=f"row 1, column 2: .* got '{re.escape(cell)}'"):
        parse(f"0F0,0B0\n1F0,1B0,{cell}\n")


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-2, 4)])
def test_schedule_of_nothing_is_refused(
    generator: Generator, stages: int, microbatches: int
) -> None:
    with pytest.raises(ValueError, match="at least 1 stage and 1 microbatch"):
        generator(stages, microbatches)


NAMED = [
    *product(("gpipe", "1f1b", "zb1p"), (1,), SHAPES),
    *product(("interleaved", "looped-bfs", "interleaved-zb"), (2, 3), ((2, 2), (3, 6), (4, 8))),
    *product(("zbv",), (2,), SHAPES),
    *product(("dualpipev",), (2,), ((1, 2), (2, 4), (3, 7), (4, 16))),
]


@pytest.mark.parametrize(("name", "virtual", "shape"), NAMED)
def test_schedule_with_messages_is_valid_on_every_transport(
    name: str, virtual: int, shape: tuple[int, int]
) -> None:
    """Also on one that keeps the order in which a rank has posted, whatever that is."""
    plain = make_schedule(name, *shape, virtual=virtual)
    validate(plain)
    for count in (0, 1, 2, 3):
        with_weights = add_weights(plain, whole=count)
        validate(with_weights)
        assert add_weights(with_weights, whole=count) == with_weights
        assert add_weights(with_weights).only("F", "I", "W", "B") == plain.unpaired()
        assert add_communication(with_weights).only(*MESSAGES) == add_communication(plain).only(
            *MESSAGES
        )
        validate(add_communication(with_weights), in_order=True)
    for ahead in (0, 1, 3):
        schedule = add_communication(plain, ahead=ahead)
        validate(schedule, in_order=not ahead)
        assert add_communication(schedule) == schedule
        assert schedule.only("F", "I", "W", "B") == plain.unpaired()
        sends = [a for row in schedule.rows for a in row if a.kind.startswith("SEND")]
        receives = {a for row in schedule.rows for a in row if a.kind.startswith("RECV")}
        owners = plain.owners()
        boundaries = sum(owners[s] != owners[s + 1] for s in range(plain.num_stages - 1))
        assert len(sends) == 2 * boundaries * shape[1]
        assert {send.counterpart() for send in sends} == receives
        assert all(send.counterpart().counterpart() == send for send in sends)


def test_receives_at_their_use_can_deadlock_on_a_transport_that_keeps_order() -> None:
    """Two messages of two ranks that each posts in another order."""
    text = (
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1"
    )
    validate(parse(text))
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 waits at 0B0 for 0RECV_B0; rank 1"):
        validate(parse(text), in_order=True)


def test_receive_ahead_is_posted_before_the_computation_in_front() -> None:
    here, early = (add_communication(one_f_one_b(3, 3), ahead=n).rows[1] for n in (0, 1))
    assert ",".join(map(str, here)).startswith("1RECV_F0,1F0,1RECV_F1,1SEND_F0,1F1,1RECV_F2,1SEND")
    assert ",".join(map(str, early)).startswith(
        "1RECV_F0,1RECV_F1,1F0,1SEND_F0,1RECV_F2,1RECV_B0,1F1"
    )


def test_messages_between_stages_of_one_rank_are_left_out() -> None:
    both = Schedule((parse("0F0,1F0,1B0,0B0").rows[0],))
    assert add_communication(both) == both
    validate(both)


def test_weights_come_before_a_run_of_uses_and_go_after_it() -> None:
    """Ahead: while a W, which needs none, still runs; then gradients go, after the last W."""
    row = "0F0,1F0,1I0,1W0,0I0,0W0\n"
    reduced = "0F0,1F0,1I0,1W0,1REDUCE_GRAD,0I0,0W0,0REDUCE_GRAD\n"
    assert str(add_weights(parse(row))) == reduced
    assert str(add_weights(parse(reduced), whole=1)) == (
        "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1I0,1RESHARD,0UNSHARD,1W0,1REDUCE_GRAD,"
        "0I0,0RESHARD,0W0,0REDUCE_GRAD\n"
    )
    assert str(add_weights(parse(row), whole=2)) == (
        "0UNSHARD,1UNSHARD,0F0,1F0,1I0,1RESHARD,1W0,1REDUCE_GRAD,0I0,0RESHARD,0W0,0REDUCE_GRAD\n"
    )
    with pytest.raises(ValueError, match="whole must be at least 0, got -1"):
        add_weights(parse(row), whole=-1)


# Each rule, broken by one change of a valid schedule; the message names the action at fault.
BROKEN = {
    "missing-forward": ("0F0,0B0\n1F0,1B0,1B1,1F1", "rank 0: 0F1 is missing"),
    "missing-backward": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "rank 0: 0B1 is missing"),
    "missing-weights": ("0F0,0I0\n1F0,1B0", "rank 0: 0W0 is missing"),
    "missing-input": ("0F0,0W0\n1F0,1B0", "rank 0: 0I0 is missing"),
    "weights-first": ("0F0,0W0,0I0\n1F0,1B0", "rank 0: 0W0 comes before 0I0"),
    "whole-and-part": ("0F0,0B0,0W0\n1F0,1B0",
                       "rank 0: 0B0 is there, and 0W0, which is a part of it"),
    "twice": ("0F0,0F0,0B0\n1F0,1B0", "rank 0: 0F0 is there twice"),
    "backward-first": ("0B0,0F0\n1F0,1B0", "rank 0: 0B0 comes before 0F0"),
    "two-owners": ("0F0,0B0\n1F0,1B0,0F1,0B1", "stage 0 is on one rank"),
    "gap": ("0F0,0B0\n2F0,2B0", "no rank computes stage 1 of 3"),
    "nothing": ("\n\n", "at least one computation"),
    "no-send": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 is missing, next to 0F0"),
    "no-receive": ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0RECV_B0 is missing"),
    "send-too-early": ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                       "rank 0: 0SEND_F0 comes before 0F0"),
    "receive-too-late": ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
                         "rank 1: 1RECV_F0 comes after 1F0"),
    "deadlock-of-a-pair": ("(0F0;1B0)OVERLAP_F_B,0B0,1F0", "rank 0: 1B0 comes before 1F0"),
    "wrong-rank": ("0F0,0SEND_F0,0RECV_B0,1SEND_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
                   "rank 0: 1SEND_B0, and stage 1 is not here"),
    "to-nobody": ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0",
                  "rank 1: no other rank has 2RECV_F0 for 1SEND_F0"),
    "not-whole": ("0UNSHARD,0F0,0RESHARD,0I0,0W0\n1F0,1B0",
                  "rank 0: 0I0 uses weights that are not whole"),
    "whole-twice": ("0UNSHARD,0F0,0UNSHARD,0B0\n1F0,1B0",
                    "rank 0: 0UNSHARD, and stage 0 is whole then"),
    "gone-twice": ("0F0,0B0,0RESHARD\n1F0,1B0", "0RESHARD, and stage 0 is not whole then"),
    "stays-whole": ("0UNSHARD,0F0,0B0\n1F0,1B0", "rank 0: 0RESHARD is missing at the end"),
    "reduced-early": ("0F0,0I0,0REDUCE_GRAD,0W0\n1F0,1B0", "rank 0: 0W0 comes after 0REDUCE_GRAD"),
    "weights-elsewhere": ("0F0,0B0,1REDUCE_GRAD\n1F0,1B0", "and stage 1 is not here"),
    "deadlock": ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1",
                 "deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1"),
    "deadlock-of-receives": (
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
        "deadlock: rank 0 waits at 0B0 for 0RECV_B0; rank 1 waits at 1F1 for 1RECV_F1",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_validate_names_the_rule_that_is_broken(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(parse(text))


def test_validate_of_every_schedule_with_one_action_left_out_fails(generator: Generator) -> None:
    rows = add_communication(generator(3, 4)).rows
    for rank, row in enumerate(rows):
        for place in range(len(row)):
            damaged = (*row[:place], *row[place + 1 :])
            with pytest.raises(ScheduleError):
                validate(Schedule((*rows[:rank], damaged, *rows[rank + 1 :])))


def test_schedule_of_a_file_is_what_stands_there(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(str(zbv(2, 4)))
    assert make_schedule(str(file), 2, 4, virtual=2) == zbv(2, 4)
    with pytest.raises(ScheduleError, match=r"2 ranks, 4 stages and 5 microbatches expected, got"):
        make_schedule(str(file), 2, 5, virtual=2)


@pytest.mark.parametrize(("name", "virtual", "message"), [
    ("zb2p", 1, "schedule must be one of 1f1b, .*, dualpipev, or a .csv file, got 'zb2p'"),
    ("1f1b", 2, "schedule 1f1b has 1 stages per rank, got virtual = 2"),
    ("zbv", 1, "schedule zbv has 2 stages per rank, got virtual = 1"),
    ("interleaved", 1, "schedule interleaved has at least 2 stages per rank, got virtual = 1"),
])  # fmt: skip
def test_schedule_that_has_not_so_many_stages_per_rank_is_refused(
    name: str, virtual: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(name, 4, 8, virtual=virtual)


def test_schedules_that_cannot_have_so_many_microbatches_say_so() -> None:
    with pytest.raises(ValueError, match="its 9 microbatches in 2 rounds, which do not divide"):
        interleaved(4, 9, 2)
    with pytest.raises(ValueError, match="dualpipev needs as many microbatches as stages, 8, got"):
        dualpipev(4, 7)
