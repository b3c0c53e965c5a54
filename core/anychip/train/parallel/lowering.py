"""What does a schedule of computations need beside them, and where in the rows does it stand?

Messages (:func:`add_communication`); weights that are gathered, gradients that are reduced
(:func:`add_weights`). A pass takes a schedule and gives one; done twice it changes nothing more.

Note: The order of messages
    Messages get one order, over all ranks: that in which they would be sent if every computation
    took as long as any other. In each row they stand in this order. So they cannot wait for each
    other in a circle, even on a transport that carries out a rank's messages one after the other:
    of all that are not through, the first one is the next on both of its ranks.
"""

from collections.abc import Iterator, Mapping, Sequence

from anychip.train.parallel.actions import COMPUTE, HANDS_ON, Action, Schedule


def add_communication(schedule: Schedule, *, ahead: int = 0) -> Schedule:
    """The schedule with its messages: a send right after what it sends, a receive before its use.

    Pairs become their parts. Between stages on one rank there is no message, and a schedule that
    has messages is given back as it is.

    Args:
        ahead: how many computations before the one that needs it a receive is posted, besides the
            one right before it; never before the forward whose gradient it is. 0 is right
            for every transport. With 1 a message can arrive while its receiver still computes; a
            transport that runs calls one after the other, in the order of posting, can then
            deadlock (:func:`~anychip.train.parallel.validation.validate` with ``in_order`` finds
            out).
    """
    if ahead < 0:
        raise ValueError(f"ahead must be at least 0, got {ahead}")
    if schedule.has_communication:
        return schedule
    plain, owners = schedule.unpaired(), schedule.owners()
    messages: list[list[Action]] = [[] for _ in plain.rows]
    for action in _in_order(plain.only(*COMPUTE).rows, owners):
        if action.kind in HANDS_ON and crosses(sent(action), owners):
            receive = sent(action).counterpart()
            messages[owners[action.stage]].append(sent(action))
            messages[owners[receive.stage]].append(receive)
    return Schedule(
        tuple(
            _with_messages(row, mine, ahead) for row, mine in zip(plain.rows, messages, strict=True)
        )
    )


def add_weights(schedule: Schedule, *, whole: int = 0) -> Schedule:
    """The schedule with what is done to weights and gradients that are shared out over replicas.

    REDUCE_GRAD follows the last gradient of a stage's weights. With ``whole``, UNSHARD comes before
    the first use of a stage's weights, RESHARD after the last of a run of uses: F, I and B are
    uses, W is none. Pairs become their parts; what the schedule has of either it keeps.

    Args:
        whole: so many of a rank's stages may be whole at once: the ones that it uses next. More
            take more memory, and are gathered less often: with all stages of a rank, once. 0: no
            UNSHARD; weights come and go unit by unit, with each use.
    """
    if whole < 0:
        raise ValueError(f"whole must be at least 0, got {whole}")
    rows = schedule.unpaired().rows
    kinds = {action.kind for row in rows for action in row}
    if "REDUCE_GRAD" not in kinds:
        rows = tuple(tuple(_with_reductions(row)) for row in rows)
    if whole and "UNSHARD" not in kinds:
        rows = tuple(tuple(_with_gathers(row, whole)) for row in rows)
    return Schedule(rows)


def _with_reductions(row: Sequence[Action]) -> Iterator[Action]:
    last = {action.stage: action for action in row if action.kind in ("W", "B")}
    for action in row:
        yield action
        if last.get(action.stage) == action:
            yield Action(action.stage, "REDUCE_GRAD")


def _with_gathers(row: Sequence[Action], whole: int) -> Iterator[Action]:
    uses = [action.stage for action in row if action.kind in HANDS_ON]
    held: list[int] = []
    for action in (None, *row):
        if action is not None:
            yield action
            if action.kind not in HANDS_ON:
                continue
            uses.pop(0)
        soon: list[int] = []
        for stage in uses:
            if len(soon) == whole:
                break
            soon += [stage] if stage not in soon else []
        yield from (Action(stage, "RESHARD") for stage in held if stage not in soon)
        yield from (Action(stage, "UNSHARD") for stage in soon if stage not in held)
        held = soon


def _with_messages(
    row: Sequence[Action], messages: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """A row with the messages of its rank: each as late as those that follow it allow."""
    place = {action: i for i, action in enumerate(row)}
    made_by, used_by = (
        {way(a): i for a, i in place.items() if a.kind in HANDS_ON} for way in (sent, received)
    )
    before: list[list[Action]] = [[] for _ in range(len(row) + 1)]
    latest = len(row)
    for message in reversed(messages):
        if message in made_by:
            at = made_by[message] + 1
        else:
            use = used_by.get(message, len(row))
            forward = Action(message.stage, "F", message.microbatch)
            earliest = 0 if message.kind == "RECV_F" else place.get(forward, use) + 1
            at = min(latest, use, max(earliest, use - ahead))
        latest = min(latest, at)
        before[at].insert(0, message)
    with_messages = [a for i, action in enumerate(row) for a in (*before[i], action)]
    return (*with_messages, *before[-1])


def _in_order(rows: Sequence[Sequence[Action]], owners: Mapping[int, int]) -> list[Action]:
    """All actions in an order in which they can be done; what deadlocks comes last.

    In each round every rank does its next action, if what that needs was made in a round before.
    """
    done: set[Action] = set()

    def is_ready(action: Action) -> bool:
        if action.kind not in HANDS_ON:
            return True
        before = received(action).counterpart()
        return before in done or before.stage not in owners

    place, order = [0] * len(rows), list[Action]()
    while True:
        found = [
            row[at]
            for row, at in zip(rows, place, strict=True)
            if at < len(row) and is_ready(row[at])
        ]
        if not found:
            return order + [a for row, at in zip(rows, place, strict=True) for a in row[at:]]
        for action in found:
            place[owners[action.stage]] += 1
            if action.kind in HANDS_ON:
                done.add(sent(action))
        order += found


def crosses(message: Action, owners: Mapping[int, int]) -> bool:
    """The other stage exists (the first receives no output, the last no gradient), elsewhere."""
    peer = owners.get(message.counterpart().stage)
    return peer is not None and peer != owners[message.stage]


def received(action: Action) -> Action:
    """The receive that brings an F, I or B its input, when that comes from another rank."""
    return Action(action.stage, "RECV_F" if action.kind == "F" else "RECV_B", action.microbatch)


def sent(action: Action) -> Action:
    """The send that hands on what an F, I or B made, when another rank needs it."""
    return Action(action.stage, "SEND_F" if action.kind == "F" else "SEND_B", action.microbatch)
