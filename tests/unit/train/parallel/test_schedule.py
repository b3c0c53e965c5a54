"""Schedules as data: their order against torch's, their text, and each rule of the validator."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from anychip.train.parallel import (
    Action,
    Schedule,
    ScheduleError,
    add_communication,
    gpipe,
    one_f_one_b,
    parse,
    validate,
)
from anychip.train.parallel.schedule import exchanges

Generator = Callable[[int, int], Schedule]
GENERATORS = {"gpipe": gpipe, "1f1b": one_f_one_b}
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
@pytest.mark.parametrize(
    ("generate", "kind"),
    [(gpipe, torchs.ScheduleGPipe), (one_f_one_b, torchs.Schedule1F1B)],
    ids=GENERATORS,
)
def test_schedule_order_is_the_one_that_torch_executes(
    generate: Generator, kind: Any, stages: int, microbatches: int
) -> None:
    ours = [[str(action) for action in row] for row in generate(stages, microbatches).rows]
    assert ours == executed_by_torch(kind, stages, microbatches)


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
            assert (theirs.stage_index, theirs.microbatch_index) == action[::2]


def test_schedule_text_of_two_stages_is_this() -> None:
    assert str(one_f_one_b(2, 3)) == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert str(add_communication(gpipe(2, 1))) == (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )


def test_parse_leaves_out_empty_cells() -> None:
    assert parse("0F0,, 0F1 ,0B0,0B1,\r\n,1F0,1F1,1B0,,1B1\n").rows == gpipe(2, 2).rows


@pytest.mark.parametrize("cell", ["F0", "0F", "0X1", "-1F0", "0F0F1", "0SEND0"])
def test_parse_of_no_action_names_row_and_column(cell: str) -> None:
    with pytest.raises(ScheduleError, match=f"row 1, column 2: .* got '{cell}'"):
        parse(f"0F0,0B0\n1F0,1B0,{cell}\n")


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 1), (1, 0), (-2, 4)])
def test_schedule_of_nothing_is_refused(
    generator: Generator, stages: int, microbatches: int
) -> None:
    with pytest.raises(ValueError, match="at least 1 stage and 1 microbatch"):
        generator(stages, microbatches)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_schedule_with_messages_is_valid(
    generator: Generator, stages: int, microbatches: int, ahead: int
) -> None:
    plain = generator(stages, microbatches)
    validate(plain)
    schedule = add_communication(plain, ahead=ahead)
    validate(schedule)
    assert schedule.only("F", "B") == plain
    sends = [a for row in schedule.rows for a in row if a.kind.startswith("SEND")]
    receives = {a for row in schedule.rows for a in row if a.kind.startswith("RECV")}
    assert len(sends) == 2 * (stages - 1) * microbatches
    assert {send.counterpart() for send in sends} == receives
    assert all(send.counterpart().counterpart() == send for send in sends)


@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_messages_at_their_use_are_safe_on_a_transport_that_keeps_order(
    generator: Generator, stages: int, microbatches: int
) -> None:
    validate(add_communication(generator(stages, microbatches)), in_order=True)


def test_receives_posted_early_can_deadlock_on_a_transport_that_keeps_order() -> None:
    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 waits at 0B0 for 0RECV_B0; rank 1"):
        validate(add_communication(one_f_one_b(2, 2), ahead=1), in_order=True)


def test_receive_ahead_is_posted_before_the_computation_in_front() -> None:
    schedule = add_communication(one_f_one_b(3, 3), ahead=1)
    assert ",".join(map(str, schedule.rows[1])).startswith(
        "1RECV_F0,1RECV_F1,1F0,1SEND_F0,1RECV_B0,1F1,1SEND_F1,1RECV_F2,1B0,1SEND_B0,1RECV_B1,1F2"
    )


def test_exchanges_join_a_send_with_the_receive_from_the_same_stage_only() -> None:
    row = add_communication(one_f_one_b(3, 3)).rows[1]
    groups = [item for item in exchanges(row) if not isinstance(item, Action)]
    assert [[str(action) for action in group] for group in groups] == [
        ["1RECV_F0"],
        ["1SEND_F0"],
        ["1RECV_F1"],
        ["1SEND_F1", "1RECV_B0"],
        ["1SEND_B0", "1RECV_F2"],
        ["1SEND_F2", "1RECV_B1"],
        ["1SEND_B1"],
        ["1RECV_B2"],
        ["1SEND_B2"],
    ]
    assert tuple(a for i in exchanges(row) for a in ([i] if isinstance(i, Action) else i)) == row


def test_receive_for_later_is_an_exchange_of_its_own() -> None:
    """Joined with the send, it would make the computation wait for what a later one needs."""
    row = add_communication(one_f_one_b(2, 3), ahead=1).rows[0]
    groups = [item for item in exchanges(row) if not isinstance(item, Action)]
    assert [[str(action) for action in group] for group in groups] == [
        ["0SEND_F0"],
        ["0RECV_B0"],
        ["0SEND_F1"],
        ["0RECV_B1"],
        ["0SEND_F2"],
        ["0RECV_B2"],
    ]


def test_messages_between_stages_of_one_rank_are_left_out() -> None:
    both = Schedule((parse("0F0,1F0,1B0,0B0").rows[0],))
    assert add_communication(both) == both
    validate(both)


# Each rule, broken by one change of a valid schedule; the message names the action at fault.
BROKEN = {
    "missing-forward": ("0F0,0B0\n1F0,1B0,1B1,1F1", "rank 0: 0F1 is missing"),
    "missing-backward": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "rank 0: 0B1 is missing"),
    "twice": ("0F0,0F0,0B0\n1F0,1B0", "rank 0: 0F0 is there twice"),
    "backward-first": ("0B0,0F0\n1F0,1B0", "rank 0: 0B0 comes before 0F0"),
    "two-owners": ("0F0,0B0\n1F0,1B0,0F1,0B1", "stage 0 is on one rank"),
    "gap": ("0F0,0B0\n2F0,2B0", "no rank computes stage 1 of 3"),
    "nothing": ("\n\n", "at least one computation"),
    "no-send": ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0SEND_F0 is missing, next to 0F0"),
    "no-receive": ("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", "0RECV_B0 is missing"),
    "send-too-early": (
        "0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 0: 0SEND_F0 comes before 0F0",
    ),
    "receive-too-late": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
        "rank 1: 1RECV_F0 comes after 1F0",
    ),
    "wrong-rank": (
        "0F0,0SEND_F0,0RECV_B0,1SEND_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0",
        "rank 0: 1SEND_B0, and stage 1 is not here",
    ),
    "to-nobody": (
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0",
        "rank 1: no other rank has 2RECV_F0 for 1SEND_F0",
    ),
    "deadlock": (
        "0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1",
        "deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1",
    ),
    "deadlock-of-receives": (
        "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
        "deadlock: rank 0 waits at 0B0 for 0RECV_B0; rank 1 waits at 1F1 for 1RECV_F1",
    ),
}


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


def test_add_communication_twice_is_refused() -> None:
    with pytest.raises(ScheduleError, match="has messages already"):
        add_communication(add_communication(gpipe(2, 2)))
