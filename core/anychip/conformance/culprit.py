"""A training is off, and every row passed when it was called alone: which row is to blame?

The training is repeated with some of the backend's rows forbidden, so that the reference does their
part, and the set is halved: a row is to blame when its part, done by the reference, is enough to
make the training pass. Rows that are wrong only together, or two that are wrong, are found as the
smallest set that is enough (the algorithm ``dd`` of Zeller, "Yesterday, my program worked", 1999).
What no row explains is said as well: a fault that comes and goes, or one of the device.

Nothing here runs unless a training failed. The search repeats as much of the training as tells
right from wrong, about twice the logarithm of the number of rows times; its answer has to make the
whole training pass.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from anychip.dispatch import selection

TRIALS = 20
"""So many trainings are repeated at most."""
NAMED = 4
"""So many rows are named at most."""


class Part(NamedTuple):
    """The work of one operator in one direction, and the rows that a backend has for it."""

    operator: str
    direction: str
    labels: frozenset[str]

    def __str__(self) -> str:
        return f"{self.operator} {self.direction} ({', '.join(sorted(self.labels))})"


Passes = Callable[[Sequence[Part]], bool]
"""Does the training pass with these parts done by the reference?"""


class TooManyError(Exception):
    """The search has had all its trials."""


def parts_of(device_type: str, called: Iterable[tuple[str, str]]) -> list[Part]:
    """Of some operators and directions those that the device's tables have rows for."""
    labels: dict[tuple[str, str], set[str]] = {key: set() for key in called}
    for provider in selection.providers_for(device_type):
        for row in provider.table:
            if (row.operator, row.direction) in labels:
                labels[row.operator, row.direction].add(row.label)
    return [Part(*key, frozenset(found)) for key, found in labels.items() if found]


def forbidden(parts: Iterable[Part]) -> Mapping[str, frozenset[str]]:
    """What a policy forbids so that the reference does these parts."""
    found: dict[str, frozenset[str]] = {}
    for part in parts:
        found[part.operator] = found.get(part.operator, frozenset()) | part.labels
    return found


def accuse(parts: Sequence[Part], quick: Callable[[], bool], whole: Callable[[], bool]) -> str:
    """Which row makes a training fail, in a sentence.

    Args:
        parts: that the training called.
        quick: repeats its beginning under the policy in force, and says whether that is as it
            should be.
        whole: repeats all of it, and says whether it passes. What quick finds has to pass it.
    """
    trials = 0

    def asking(train: Callable[[], bool], by_reference: Sequence[Part]) -> bool:
        nonlocal trials
        if trials == TRIALS:
            raise TooManyError
        trials += 1
        with selection.policy(fallback="record", forbid=forbidden(by_reference)):
            try:
                return train()
            except Exception:  # whatever it is, it did not pass
                return False

    try:
        return told(found_by(parts, partial(asking, quick), partial(asking, whole)))
    except TooManyError:
        return f"which row is to blame was not found in {TRIALS} trainings: no small set of them is"


def found_by(parts: Sequence[Part], quick: Passes, whole: Passes) -> list[Part] | None:
    """The smallest set that is enough; an empty one if nothing need be done, None if all is not."""
    for passes in (quick, whole):
        found = None
        if passes([]):
            found = []
        elif parts and passes(parts):
            found = blamed(parts, [], passes)
        if found is not None and (passes is whole or whole(found)):
            return found
    return None


def told(found: Sequence[Part] | None) -> str:
    """What that means."""
    if found is None:
        return (
            "no row is to blame: with all operators computed by the reference it is off as well; "
            "the fault is in the device (copies, order of streams, storage) or in torch's own "
            "operators on it"
        )
    if not found:
        return (
            "the same training, repeated, is inside the limit: a fault that comes and goes, such "
            "as a race, and not of one row's arithmetic"
        )
    if len(found) == 1:
        return f"to blame: {found[0]}. With its part done by the reference alone, training passes"
    names = ", ".join(map(str, found[:NAMED]))
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return (
        f"no row alone is to blame: {len(found)} are wrong, or wrong together: {names}{more}. "
        "Training passes only with all of them done by the reference"
    )


def blamed(suspects: Sequence[Part], pinned: Sequence[Part], passes: Passes) -> list[Part]:
    """The smallest set among suspects that is enough, beside what is pinned already.

    Args:
        suspects: enough, all of them.
        pinned: not enough by themselves.
    """
    if len(suspects) == 1:
        return list(suspects)
    middle = len(suspects) // 2
    halves = suspects[:middle], suspects[middle:]
    for half in halves:
        if passes([*pinned, *half]):
            return blamed(half, pinned, passes)
    first, second = halves
    return [*blamed(first, [*pinned, *second], passes), *blamed(second, [*pinned, *first], passes)]
