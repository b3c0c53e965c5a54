"""Do ranks that communicate get what they should, all of them the same, and an error in time?

World 1 in this process; 2, 3 and 4 ranks, and groups of the 4, as processes over the backend's own
transport (:mod:`anychip.conformance.ranks`): calls by dtype, reduction, size, cut, alignment,
asynchronous or not, in place or not, with each rank late; several groups at once; what one rank
does wrong alone; ranks that disagree, stay away or die.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from anychip.conformance import rank_questions, rank_rules
from anychip.conformance.case import Case, CheckFailedError, Context, check
from anychip.conformance.rank_failures import odd_one_out
from anychip.conformance.rank_questions import NAMES, PLANS, SPLITS
from anychip.conformance.ranks import Answer, Ranks
from anychip.contract import Communicator

QUICK = ("fp32", "bf16", "int64", "bool", "fp16")
WORLDS = (2, 3, 4)
SHARES = {"fp32": 1}
"""At level quick the worlds share the ways of a call's other types: each has every third."""
GROUPS = ("columns", "triple")
"""Splits of the largest world in which calls are asked in many ways."""
TIMEOUT_S = 2.0
"""Of the communicator where something goes wrong between ranks."""
SLACK_S = 8.0
"""What the error may take beyond it: to find out who is to blame, on a busy machine."""
LIMIT_S = TIMEOUT_S + SLACK_S + 5.0
"""After which a rank that says nothing at all is ended."""
DISAGREEMENTS = "shape dtype call reduction average order_of_dims type_to_receive".split()
NEEDED = {**{call: ("fp32",) for call in PLANS}, "all_gather": ("fp32", "int64", "uint8")}
"""What training cannot do without."""
NOT_CLAIMED = "the communicator does not claim this type, and refuses it"
_numbers = itertools.count()


class World(NamedTuple):
    """Processes, and how many of them are the job."""

    ranks: Ranks
    size: int


def cases(context: Context) -> Iterator[Case]:
    """Cases of one rank, then of each number of ranks; those that end processes come last."""
    for call, dtype in itertools.product(PLANS, NAMES):
        yield Case(
            id=f"collectives/1/{call}/{dtype}",
            run=partial(alone, call=call, dtype=dtype),
            full=dtype not in QUICK,
        )
    yield Case(id="collectives/1/mistakes", run=mistakes_alone)
    ranks = Ranks(context.backend)
    asked = {size: World(ranks, size) for size in WORLDS}
    for size, world in asked.items():
        named = _values() | (_grouped() if size == max(WORLDS) else {}) | RULES
        named |= {f"disagree/{w}": partial(disagreement, what=w) for w in DISAGREEMENTS}
        yield from _cases(world, named)
    for world in asked.values():
        yield from _cases(world, LOSSES)


def _cases(world: World, named: dict[str, Callable[..., None]]) -> Iterator[Case]:
    for name, run in named.items():
        dtype = name.rpartition("/")[2]
        yield Case(
            id=f"collectives/{world.size}/{name}",
            run=partial(run, world=world),
            full=world.size not in QUICK_WORLDS.get(name, WORLDS)
            or (dtype in NAMES and dtype not in QUICK),
            devices=1 if world.ranks.backend.ranks_share_devices else world.size,
            capability="streams" if name == "on_stream" else None,
            elsewhere=True,
            start=world.ranks.start,
        )


def _values() -> dict[str, Callable[..., None]]:
    return {
        f"{call}/{dtype}": partial(together, call=call, dtype=dtype)
        for call, dtype in itertools.product(PLANS, NAMES)
    }


def _grouped() -> dict[str, Callable[..., None]]:
    """Of each call in groups of the world; two splits share the ways, and types them again."""
    return {
        f"{split}/{call}": partial(in_groups, split=split, call=call)
        for split, call in itertools.product(GROUPS, PLANS)
    }


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
    rank_rules.mistakes(communicator(context), context.device)


# Several ranks


def ask(
    context: Context, world: World, question: str, shown: str, **arguments: Any
) -> list[Answer]:
    """The answers of all ranks."""
    context.call = f"{shown} on {world.size} ranks"
    return world.ranks.ask(question, world_size=world.size, **arguments)


def ask_in_time(
    context: Context, world: World, question: str, shown: str, **arguments: Any
) -> list[Answer]:
    """As :func:`ask`, of ranks that have met with the time limit of what goes wrong."""
    all_well(ask(context, world, "ask_ready", shown, timeout_s=TIMEOUT_S))
    return ask(
        context, world, question, shown, timeout_s=TIMEOUT_S, limit_s=LIMIT_S, **arguments
    )  # fmt: skip


def all_well(answers: Sequence[Answer]) -> list[Any]:
    """What the ranks returned; a failure when one did not.

    What a rank has found itself comes first. A CommunicationError, or no answer, follows from what
    another rank has found or done, if there is one that has.
    """
    wrong = [(rank, a) for rank, a in enumerate(answers) if a.kind]

    def follows(found: tuple[int, Answer]) -> tuple[int, float]:
        kinds = ("CommunicationError", "died")
        is_own = found[1].kind not in kinds or "SIG" in found[1].error
        return 0 if is_own else 1 + kinds.index(found[1].kind), found[1].seconds

    wrong.sort(key=follows)
    check(not wrong, "\n".join(f"rank {rank}: {answer.error}" for rank, answer in wrong))
    return [answer.value for answer in answers]


def same_everywhere(digests: Sequence[dict[str, str]]) -> None:
    """What several ranks have under one label has the same bits on all of them."""
    for label in dict.fromkeys(label for digest in digests for label in digest):
        found = [digest[label] for digest in digests if label in digest]
        check(len(set(found)) == 1, f"{label}: the ranks' bits differ: digests {found}")


def together(context: Context, *, world: World, call: str, dtype: str) -> None:
    """A call in many sizes and ways: values, guard elements, the same bits on all ranks."""
    step = SHARES.get(dtype, len(WORLDS)) if context.level == "quick" else 1
    told = ask(
        context, world, "ask_values", f"{call} of {NAMES[dtype]}",
        call=call, dtype=dtype, seed=context.seed, share=(world.size, step),
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


def in_groups(context: Context, *, world: World, split: str, call: str) -> None:
    """As :func:`together`, in the groups of a split, which are asked at the same time."""
    step = 2 if context.level == "quick" else 1
    for number, dtype in enumerate(QUICK):
        told = ask(
            context, world, "ask_values", f"{call} of {NAMES[dtype]} in groups {SPLITS[split]}",
            call=call, dtype=dtype, seed=context.seed, where=split,
            share=(GROUPS.index(split) + number, step * min(1 + 3 * number, 4)),
        )  # fmt: skip
        same_everywhere([answer["same"] for answer in all_well(told)])


def well(context: Context, *, world: World, question: str, shown: str, **more: Any) -> None:
    """What the question says, on all ranks; what they return has to be the same on all."""
    digests = all_well(ask(context, world, question, shown, **more))
    same_everywhere([found or {} for found in digests])


def numbered(context: Context, *, world: World, question: str, shown: str) -> None:
    """As :func:`well`, of a question in which ranks wait for words: each time others."""
    for where in ("world", *GROUPS) if world.size == max(WORLDS) else ("world", "whole"):
        well(context, world=world, question=question, shown=f"{shown} in {where}",
             number=next(_numbers), where=where)  # fmt: skip


def under_way(context: Context, *, world: World) -> None:
    """Calls that overlap: of one group, and of groups that overlap, the world among them."""
    many = [("world", *SPLITS)] if world.size == max(WORLDS) else []
    for where in [("world",), *many]:
        well(context, world=world, question="ask_under_way", shown=f"calls at once in {where}",
             where=where)  # fmt: skip


def disagreement(context: Context, *, world: World, what: str) -> None:
    """One rank makes another call: a CommunicationError on every rank, in time.

    Who has only something to give, or gets it as it expects it, need not hear of it.
    """
    answers = ask_in_time(
        context, world, "ask_disagreement", f"a call with another {what} on one rank",
        what=what,
    )  # fmt: skip
    only_one = what == "type_to_receive"
    for rank in [odd_one_out(world.size)] if only_one else range(world.size):
        check_told(rank, answers[rank])


def absence(context: Context, *, world: World, call: str) -> None:
    """One rank does not come: the others are told which, in time."""
    answers = ask_in_time(
        context, world, "ask_absence", f"{call} without one rank",
        call=call, number=next(_numbers),
    )  # fmt: skip
    odd = odd_one_out(world.size)
    for rank in others(world):
        check_told(rank, answers[rank], names=odd)
    check(not answers[odd].kind, f"rank {odd}, which stayed away: {answers[odd].error}")


def others(world: World) -> list[int]:
    """All ranks but the one that does something else."""
    return [rank for rank in range(world.size) if rank != odd_one_out(world.size)]


def abort(context: Context, *, world: World) -> None:
    """A rank that aborts ends the call in which the others wait, and they are told why."""
    answers = ask(
        context, world, "ask_abort", "abort()", number=next(_numbers), limit_s=LIMIT_S
    )  # fmt: skip
    for rank in others(world):
        check_told(rank, answers[rank])
        check(
            "on purpose" in answers[rank].error,
            f"rank {rank}: the reason given to abort() expected, got {answers[rank].error}",
        )
    odd = odd_one_out(world.size)
    check(not answers[odd].kind, f"rank {odd}, which aborted: {answers[odd].error}")


def death(context: Context, *, world: World) -> None:
    """One rank is killed: the others are told which, in time."""
    answers = ask_in_time(
        context, world, "ask_death", "all_reduce with one rank killed"
    )  # fmt: skip
    odd = odd_one_out(world.size)
    check("SIGKILL" in answers[odd].error, f"rank {odd} was to be killed: {answers[odd].error}")
    for rank in others(world):
        check_told(rank, answers[rank], names=odd)


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
    "order": partial(well, question="ask_order", shown="sends of several tags"),
    "under-way": under_way,
    "many": partial(well, question="ask_many", shown="hundreds of calls"),
    "claims": partial(well, question="ask_claims", shown="calls of every type that is claimed"),
    "large": partial(well, question="ask_large", shown="calls with millions of elements"),
    "early": partial(numbered, question="ask_early", shown="calls with async_op"),
    "barrier": partial(numbered, question="ask_barrier", shown="barrier()"),
    "groups": partial(well, question="ask_groups", shown="split() and calls"),
    "mistakes": partial(well, question="ask_mistakes", shown="calls with wrong arguments"),
    "shapes": partial(well, question="ask_shapes", shown="calls with tensors of 0 to 3 dims"),
    "again": partial(well, question="ask_again", shown="all_reduce in the same memory"),
    "on_stream": partial(well, question="ask_on_stream", shown="all_reduce on a stream"),
    "close": partial(well, question="ask_close", shown="close(), then all_reduce"),
}
LOSSES: dict[str, Callable[..., None]] = {
    **{f"absent/{call}": partial(absence, call=call) for call in ("all_reduce", "barrier", "recv")},
    "abort": abort,
    "killed": death,
}
QUICK_WORLDS: dict[str, tuple[int, ...]] = {
    **{"large": (2, 3), "shapes": (2, 3), "again": (2, 3), "mistakes": (3,), "close": (2, 4)},
    **{"many": (2,), "claims": (2,), "on_stream": (2,)},
    **{"disagree/shape": (2,), "disagree/dtype": (3,), "disagree/call": (3,)},
    **{"disagree/reduction": (2,), "absent/all_reduce": (3,), "abort": (2, 3), "killed": (3,)},
    **{"disagree/average": (3,), "disagree/order_of_dims": (2,)},
    "disagree/type_to_receive": (2,),
    **dict.fromkeys(("absent/barrier", "absent/recv"), ()),
    **{f"{call}/fp16": (WORLDS[number % 3],) for number, call in enumerate(PLANS)},
}
"""Worlds in which a rule is asked at level quick, if not in all: waiting for a timeout takes the
whole of it, processes that were killed are started again, and fp16 mostly goes as bf16 does."""
