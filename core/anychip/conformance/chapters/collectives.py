"""Do ranks that communicate get what they should, all of them the same, and an error in time?

World 1 in this process; 2 ranks, and 4 at level full, as processes over the backend's own
transport (:mod:`anychip.conformance.ranks`): calls by dtype, reduction, size, asynchronous or not,
in place or not; groups; what one rank does wrong alone; ranks that disagree, stay away or die.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from anychip.conformance import rank_questions
from anychip.conformance.case import Case, CheckFailedError, Context, check
from anychip.conformance.rank_questions import NAMES, VALUES
from anychip.conformance.ranks import Answer, Ranks
from anychip.contract import Communicator

QUICK = ("fp32", "bf16", "int64", "bool")
WORLDS = (2, 4)
TIMEOUT_S = 2.0
"""Of the communicator where something goes wrong between ranks."""
SLACK_S = 8.0
"""What the error may take beyond it: to start the communicator, and to find out who is to blame."""
LIMIT_S = TIMEOUT_S + SLACK_S + 5.0
"""After which a rank that says nothing at all is ended."""
DISAGREEMENTS = ("shape", "dtype", "call", "reduction")
NEEDED = {**{call: ("fp32",) for call in VALUES}, "all_gather": ("fp32", "int64", "uint8")}
"""What training cannot do without."""
NOT_CLAIMED = "the communicator does not claim this type, and refuses it"
_numbers = itertools.count()


def cases(context: Context) -> Iterator[Case]:
    """Cases of one rank, then of each number of ranks; those that end processes come last."""
    for call, dtype in itertools.product(VALUES, NAMES):
        yield Case(
            id=f"collectives/1/{call}/{dtype}",
            run=partial(alone, call=call, dtype=dtype),
            full=dtype not in QUICK,
        )
    yield Case(id="collectives/1/mistakes", run=mistakes_alone)
    for world in WORLDS:
        ranks = Ranks(context.backend, world)
        where = f"collectives/{world}"
        values = {
            f"{call}/{dtype}": partial(together, call=call, dtype=dtype)
            for call, dtype in itertools.product(VALUES, NAMES)
        }
        disagreements = {f"disagree/{w}": partial(disagreement, what=w) for w in DISAGREEMENTS}
        slow = {*SLOW, *(name for name in values if name.split("/")[1] not in QUICK)}
        for name, run in (values | RULES | disagreements | LOSSES).items():
            yield Case(
                id=f"{where}/{name}",
                run=partial(run, ranks=ranks),
                full=world > 2 or name in slow,
                elsewhere=True,
                start=ranks.start,
            )


# One rank


def communicator(context: Context) -> Communicator:
    """The backend's, of a process that is alone."""
    comm = context.backend.communicator()
    check(
        (comm.rank, comm.world_size, tuple(comm.ranks)) == (0, 1, (0,)),
        f"this process is no job's: one rank expected, got {comm!r}; the suite is run without a "
        "launcher",
    )
    return comm


def alone(context: Context, *, call: str, dtype: str) -> None:
    """With one rank, every call gives what went in."""
    comm = communicator(context)
    context.call = f"communicator().{call} with {NAMES[dtype]} on 1 rank"
    context.served_by = comm.description
    found = rank_questions.values(comm, context.device, call, NAMES[dtype], context.seed)
    context.note = NOT_CLAIMED if found["refused"] else ""


def mistakes_alone(context: Context) -> None:
    """What one rank can see alone is a ValueError; and one rank has the same mistakes."""
    rank_questions.mistakes(communicator(context), context.device)


# Several ranks


def ask(
    context: Context, ranks: Ranks, question: str, shown: str, **arguments: Any
) -> list[Answer]:
    """The answers of all ranks."""
    context.call = f"{shown} on {ranks.world_size} ranks"
    return ranks.ask(question, **arguments)


def all_well(answers: Sequence[Answer]) -> list[Any]:
    """What the ranks returned; a failure when one did not."""
    wrong = [f"rank {rank}: {a.error}" for rank, a in enumerate(answers) if a.kind]
    check(not wrong, "\n".join(wrong))
    return [answer.value for answer in answers]


def same_everywhere(digests: Sequence[dict[str, str]]) -> None:
    """What every rank has to have alike has the same bits on all of them."""
    shared = set(digests[0]).intersection(*digests[1:])
    for label in sorted(shared):
        found = [digest[label] for digest in digests]
        check(len(set(found)) == 1, f"{label}: the ranks' bits differ: digests {found}")


def together(context: Context, *, ranks: Ranks, call: str, dtype: str) -> None:
    """A call in all sizes and ways: values, guard elements, the same bits on all ranks."""
    told = ask(
        context, ranks, "ask_values", f"{call} of {NAMES[dtype]}",
        call=call, dtype=dtype, seed=context.seed,
    )  # fmt: skip
    answers = all_well(told)
    refusals = [answer["refused"] for answer in answers]
    check(len(set(refusals)) == 1, f"some ranks take {dtype} and some do not: {refusals}")
    check(
        not refusals[0] or dtype not in NEEDED[call],
        f"{call} of {NAMES[dtype]} is not claimed; training needs it",
    )
    context.note = NOT_CLAIMED if refusals[0] else ""
    same_everywhere([answer["same"] for answer in answers])


def well(context: Context, *, ranks: Ranks, question: str, shown: str) -> None:
    """What the question of :mod:`.rank_questions` says, on all ranks."""
    all_well(ask(context, ranks, question, shown))


def numbered(context: Context, *, ranks: Ranks, question: str, shown: str) -> None:
    """As :func:`well`, of a question in which ranks wait for words: each time others."""
    all_well(ask(context, ranks, question, shown, number=next(_numbers)))


def groups(context: Context, *, ranks: Ranks) -> None:
    """split(): members, names, values among members."""
    digests = all_well(ask(context, ranks, "ask_groups", "split() and all_reduce"))
    by_label: dict[str, set[str]] = {}
    for found in digests:
        for label, digest in found.items():
            by_label.setdefault(label, set()).add(digest)
    for label, bits in by_label.items():
        check(len(bits) == 1, f"{label}: the members' bits differ")


def disagreement(context: Context, *, ranks: Ranks, what: str) -> None:
    """The last rank makes another call: a CommunicationError on every rank, in time."""
    answers = ask(
        context, ranks, "ask_disagreement", f"all_reduce with another {what} on the last rank",
        what=what, timeout_s=TIMEOUT_S, limit_s=LIMIT_S,
    )  # fmt: skip
    for rank in range(ranks.world_size):
        check_told(rank, answers[rank])


def absence(context: Context, *, ranks: Ranks, call: str) -> None:
    """The last rank does not come: the others are told which, in time."""
    answers = ask(
        context, ranks, "ask_absence", f"{call} without the last rank",
        call=call, number=next(_numbers), timeout_s=TIMEOUT_S, limit_s=LIMIT_S,
    )  # fmt: skip
    last = ranks.world_size - 1
    for rank in range(last):
        check_told(rank, answers[rank], names=last)
    check(not answers[last].kind, f"rank {last}, which stayed away: {answers[last].error}")


def abort(context: Context, *, ranks: Ranks) -> None:
    """A rank that aborts ends the call in which the others wait, and they are told why."""
    answers = ask(
        context, ranks, "ask_abort", "abort()", number=next(_numbers), limit_s=LIMIT_S
    )  # fmt: skip
    for rank in range(ranks.world_size - 1):
        check_told(rank, answers[rank])
        check(
            "on purpose" in answers[rank].error,
            f"rank {rank}: the reason given to abort() expected, got {answers[rank].error}",
        )


def death(context: Context, *, ranks: Ranks) -> None:
    """The last rank is killed: the others are told which, in time."""
    answers = ask(
        context, ranks, "ask_death", "all_reduce with the last rank killed",
        timeout_s=TIMEOUT_S, limit_s=LIMIT_S,
    )  # fmt: skip
    last = ranks.world_size - 1
    check("SIGKILL" in answers[last].error, f"rank {last} was to be killed: {answers[last].error}")
    for rank in range(last):
        check_told(rank, answers[rank], names=last)


def check_told(rank: int, answer: Answer, *, names: int | None = None) -> None:
    """A rank got a CommunicationError in time, which names the rank at fault."""
    if answer.kind != "CommunicationError":
        got = answer.error or f"it returned {answer.value!r}"
        raise CheckFailedError(f"rank {rank}: CommunicationError expected, got: {got}")
    limit = TIMEOUT_S + SLACK_S
    check(
        answer.seconds <= limit,
        f"rank {rank}: the error came after {answer.seconds:.1f} s; the time limit is "
        f"{TIMEOUT_S:g} s, and {SLACK_S:g} s more are allowed",
    )
    if names is not None:
        check(
            names in answer.ranks and f"rank {names}" in answer.error,
            f"rank {rank}: the error has to name rank {names}, got ranks {answer.ranks}: "
            f"{answer.error}",
        )


RULES: dict[str, Callable[..., None]] = {
    "order": partial(well, question="ask_order", shown="two all_reduce(async_op=True)"),
    "large": partial(well, question="ask_large", shown="calls with 1,000,003 elements"),
    "not-finite": partial(well, question="ask_not_finite", shown="sums with Inf and NaN"),
    "early": partial(numbered, question="ask_early", shown="all_reduce(async_op=True)"),
    "barrier": partial(numbered, question="ask_barrier", shown="barrier()"),
    "groups": groups,
    "mistakes": partial(well, question="ask_mistakes", shown="calls with wrong arguments"),
    "shapes": partial(well, question="ask_shapes", shown="calls with tensors of 0 to 3 dims"),
    "traffic": partial(well, question="ask_traffic", shown="calls of every kind, counted"),
    "close": partial(well, question="ask_close", shown="close(), then all_reduce"),
}
LOSSES: dict[str, Callable[..., None]] = {
    **{f"absent/{call}": partial(absence, call=call) for call in ("all_reduce", "barrier", "recv")},
    "abort": abort,
    "killed": death,
}
SLOW = ("absent/barrier", "absent/recv")
"""Each absence takes the whole timeout; at level quick one of them says enough."""
