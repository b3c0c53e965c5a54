"""Do all ranks make the same call, and if not, who does what?

Each rank keeps its last calls in memory. ``always``: of the ranks that make call number n of a
group, the first writes into the store what it calls; the others find that and compare, before
anything is sent, at the price of one round trip. ``step``: a call's tag is a digest of it, so that
calls that differ exchange no byte (but for one pair in 524,288, whose digests are alike); a rank
that has waited for long asks the others for their last calls, and compares. ``off``: nobody does.

Nobody waits for a rank that does not come, but for its answer when it is asked: that comes from a
thread, whatever the rank does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from zlib import crc32

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from anychip.contract import Membership

Check = Literal["always", "step", "off"]
CHECKS: tuple[Check, ...] = ("always", "step", "off")

SLOTS = 64
"""Calls that a rank can be ahead of another before they are not compared any more."""
LAST = 2**62
"""The question that a rank answers unasked when it closes."""
MESSAGE_TAGS = 2**16
"""Tags of messages are below it."""
STEP_TAGS = MESSAGE_TAGS * 8
"""Tags that a transport must take for ``step``: of a message, its own tag and its number mod 8."""
_PART = -1
"""The tag, in what ranks tell each other, of a part of all_to_all."""
_NOTES = 256
_RECENT_TAGS = 1024
_ANSWER_S = 1.0
"""How long a rank is given to answer."""
_GRACE_S = 5.0
"""How long the others of a call that went wrong are given to come, so that the odd one shows."""
_TIE_S = 60.0
"""How long they are given while as many say one thing as another, so that nobody is the odd one."""

Ends = tuple[int, ...]
"""Source, destination and tag of a message; empty: a call of the whole group."""


class Failure(NamedTuple):
    """Why a job cannot go on: the ranks at fault, counted in the world, and what they did."""

    ranks: tuple[int, ...]
    reason: str


class Note:
    """A call of this rank: number ``number`` of the group, or of a pair of ranks and a tag.

    Attributes:
        parts: of all_to_all, elements to and from each rank.
        begun, waited, ended: seconds of the monotonic clock; 0: not yet.
    """

    __slots__ = ("begun", "call", "ended", "number", "pair", "parts", "waited")

    def __init__(self, pair: Ends, number: int, call: str) -> None:
        self.pair, self.number, self.call = pair, number, call
        self.parts: tuple[Sequence[int], Sequence[int]] = ((), ())
        self.begun, self.waited, self.ended = time.monotonic(), 0.0, 0.0


class Ledger:
    """The calls of one group, as one of its ranks makes and sees them.

    Args:
        store: shared by the ranks of the group; messages name these as in the world.
        ask: puts a numbered question to all ranks, which :meth:`answer` it.
    """

    def __init__(
        self, store: Store, group: Membership, *, check: Check, ask: Callable[[int], object]
    ) -> None:
        self._store, self._group = store, group
        self._rank, self._ranks = group.rank, group.ranks
        self.check, self._ask = check, ask
        self._agreed: dict[tuple[Ends, int], str] = {}
        self._count: dict[Ends, int] = {}
        self._notes: deque[Note] = deque(maxlen=_NOTES)
        self._recent: dict[int, None] = {}
        self._answered = 0.0

    def enter(self, call: str) -> tuple[Note, Failure | None]:
        """Notes the next call of the whole group; and who is known to call something else."""
        note = self._note((), call)
        if self._agrees(note):
            return note, None
        return note, self._disagreement(note.number)

    def message(self, pair: Ends, what: str) -> tuple[Note, Failure | None]:
        """Notes the next message of a pair; and that the other end takes it for something else."""
        note = self._note(pair, what)
        if self._agrees(note):
            return note, None
        other = self._agreed[pair, note.number % SLOTS].partition(" ")[2]
        return note, self._mistaken(pair, what, other)

    def tag(self, note: Note, num_tags: int) -> int:
        """The tag of a call's messages, on all ranks that make it as this one does.

        No two calls of the last thousand have one, nor any two messages under way that are alike.
        """
        if self.check != "step":
            return note.pair[2] if note.pair else note.number % num_tags
        if note.pair:
            place = note.pair[2] * 8 + note.number % 8
            return (place + crc32(note.call.encode())) % num_tags
        tag = crc32(f"{note.number} {note.call}".encode()) % num_tags
        while tag in self._recent:
            tag = (tag + 1) % num_tags
        self._recent[tag] = None
        if len(self._recent) > _RECENT_TAGS:
            del self._recent[next(iter(self._recent))]
        return tag

    def judge(self, limit_s: float) -> Failure | None:
        """Who calls something else, if a call of this rank has been waited for longer than so."""
        now = time.monotonic()
        waiting = [n for n in list(self._notes) if n.waited and not n.ended]
        if all(now - note.waited < limit_s for note in waiting):
            return None
        said = self._said(ask=now - self._answered > limit_s / 2)
        numbers = sorted({number for calls in said.values() for pair, number in calls if not pair})
        for number in numbers:
            if len({calls[(), number] for calls in said.values() if ((), number) in calls}) > 1:
                return self._disagreement(number)
        for pair, number, call in (entry for note in waiting for entry in self._entries(note)):
            for rank in pair[:2]:
                other = said.get(rank, {}).get((pair, number), call)
                if other != call:
                    return self._mistaken(pair, call, other)
        return None

    def missing(self, number: int, *, ask: bool = True) -> tuple[int, ...]:
        """Ranks, counted in the world, that have not made call ``number`` yet.

        Args:
            ask: False: as far as they have said.
        """
        said = self._said(ask=ask)
        return tuple(
            world
            for rank, world in enumerate(self._ranks)
            if all(pair or n < number for pair, n in said.get(rank, {}))
        )

    def last_call(self, rank: int) -> str:
        """What a rank, counted in the world, did last in this group, for messages."""
        calls = self._said(ask=False).get(self._ranks.index(rank))
        if calls is None:
            return "it does not say what it does"
        made = [(number, call) for (pair, number), call in calls.items() if not pair]
        if not made:
            return "it has made no call in this group"
        number, call = max(made)
        return f"its last call in this group is #{number}, {call}"

    def peers(self, messages: Sequence[Note]) -> tuple[int, ...]:
        """The ranks at the other ends of messages, counted in the world; none of a whole call."""
        ends = {rank for note in messages for rank in note.pair[:2]} - {self._rank}
        return tuple(sorted(self._ranks[rank] for rank in ends))

    def answer(self, question: int) -> None:
        """Tells the others the last calls of this rank."""
        calls = [entry for note in list(self._notes) for entry in self._entries(note)]
        with contextlib.suppress(RuntimeError):  # the store went with its host
            self._store.set(f"said/{self._rank}", json.dumps([question, calls]))
        self._answered = time.monotonic()

    def record(self) -> Iterator[tuple[float, dict[str, Any]]]:
        """When each of the last calls was begun, and what became of it, for a flight record."""
        now, clock = time.monotonic(), time.time()
        for note in list(self._notes):
            fields: dict[str, Any] = {"group": self._group.name, "ranks": self._ranks}
            fields |= {"number": note.number, "call": note.call}
            if note.pair:
                source, destination, tag = note.pair
                fields |= {"source": self._ranks[source], "destination": self._ranks[destination]}
                fields["tag"] = tag
            fields["state"] = "done" if note.ended else "waited for" if note.waited else "begun"
            for name in ("begun", "waited", "ended"):
                at = getattr(note, name)
                fields[name] = round(clock - now + at, 6) if at else None
            yield note.begun, fields

    def _note(self, pair: Ends, call: str) -> Note:
        number = self._count[pair] = self._count.get(pair, 0) + 1
        note = Note(pair, number, call)
        self._notes.append(note)
        return note

    def _agrees(self, note: Note) -> bool:
        if self.check != "always":
            return True
        slot = (note.pair, note.number % SLOTS)
        mine = f"{note.number} {note.call}"
        # What this slot held before was agreed upon: only the first to come finds it still there.
        before = self._agreed.get(slot, "")
        key = f"call/{'/'.join(map(str, note.pair))}/{slot[1]}"
        found = self._store.compare_set(key, before, mine).decode()
        ahead = int(found.partition(" ")[0]) > note.number
        # The others are ahead by more than all slots: there is no telling, now or next time.
        self._agreed[slot] = "" if ahead else found
        return ahead or found == mine

    def _entries(self, note: Note) -> Iterator[tuple[Ends, int, str]]:
        """A call as others compare it; of all_to_all, its parts as if they were messages."""
        yield note.pair, note.number, note.call
        for is_sent, numels in zip((True, False), note.parts, strict=True):
            for peer, numel in enumerate(numels):
                pair = (self._rank, peer, _PART) if is_sent else (peer, self._rank, _PART)
                yield pair, note.number, f"{numel} elements"

    def _mistaken(self, pair: Ends, mine: str, other: str) -> Failure:
        source, destination, tag = pair
        sent, expected = (mine, other) if source == self._rank else (other, mine)
        first, second = self._ranks[source], self._ranks[destination]
        how = f"has room for {expected}" if tag == _PART else f"expects {expected} (tag {tag})"
        text = f"the ranks disagree: rank {first} sends {sent} to rank {second}, which {how}"
        return Failure((first,), text)

    def _disagreement(self, number: int) -> Failure:
        begun = time.monotonic()
        while self.missing(number):
            waited_s = time.monotonic() - begun
            if waited_s > _TIE_S or (waited_s > _GRACE_S and not is_tie(self._texts(number))):
                break
            time.sleep(0.05)
        return disagreement(number, self._texts(number))

    def _texts(self, number: int) -> dict[int, str]:
        """What the ranks that made call ``number`` say that it is, as far as they have said."""
        said = sorted(self._said(ask=False).items())
        texts = {self._ranks[rank]: calls.get(((), number)) for rank, calls in said}
        return {rank: text for rank, text in texts.items() if text}

    def _said(self, *, ask: bool) -> dict[int, dict[tuple[Ends, int], str]]:
        """The last calls of each rank of the group that has said them."""
        question, deadline = 0, time.monotonic() + _ANSWER_S
        if ask:
            question = self._store.add("asked", 1)
            self._ask(question)
        entries = (entry for note in list(self._notes) for entry in self._entries(note))
        mine = {(pair, number): call for pair, number, call in entries}
        found, silent = {self._rank: mine}, set(range(len(self._ranks))) - {self._rank}
        while silent:
            for rank in sorted(silent):
                key = f"said/{rank}"
                if not self._store.check([key]):
                    continue
                answered, calls = json.loads(self._store.get(key).decode())
                found[rank] = {(tuple(pair), number): call for pair, number, call in calls}
                if answered >= question:
                    silent.remove(rank)
            if not ask or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return found


def disagreement(number: int, calls: Mapping[int, str]) -> Failure:
    """What to say of ranks that call different things; see :func:`compared`."""
    odd, told = compared(calls)
    return Failure(odd, f"the ranks disagree in call #{number}: {told}")


def compared(texts: Mapping[int, str]) -> tuple[tuple[int, ...], str]:
    """Who says something else than most, and who says what; when half say each, the first is right.

    Args:
        texts: rank in the world to what it says.
    """
    said = list(texts.values())
    usual = max(said, key=lambda text: (said.count(text), -said.index(text)))
    who = {text: [rank for rank in texts if texts[rank] == text] for text in said}
    told = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in who.items())
    return tuple(rank for rank in texts if texts[rank] != usual), told


def is_tie(texts: Mapping[int, str]) -> bool:
    """Whether no text is what most say: then nothing tells who is the odd one."""
    counts = sorted(Counter(texts.values()).values(), reverse=True)
    return len(counts) > 1 and counts[0] == counts[1]


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
