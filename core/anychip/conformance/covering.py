"""Covering arrays: few rows in which all combinations of so many factors' levels occur.

Most failures need one or two conditions to meet (Kuhn, Wallace and Gallo 2004, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6)): an array of strength 2 has
every pair of levels of every two factors in some row, one of strength 3 every triple. Rows are made
one after the other, first the simplest one and those that differ from it in a few levels, then each
around a combination that is still missing, with the levels that bring the most other missing ones
(AETG: Cohen, Dalal, Fredman and Patton 1997, IEEE TSE 23(7)). It ends when nothing is missing,
which is the proof: what is missing is counted, not assumed.

What can meet need not be known before. Whoever makes a row says of each factor, when its turn has
come, which levels the row can still have. A combination that no row has when it was tried for, then
with all as simple as it can be until it is there, at last with all else so too, is left out. And a
level may hide what others do (NaN in all results, another implementation): such a row counts for
that level's own combinations only. Levels that the same implementation serves hide nothing of each
other: a row of several counts for all of theirs.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Places = int
"""A set of levels: a bit for each, at its place in the sequence of all levels of all factors."""
FIRST = 2
"""So often the simplest row comes before all: a third call of all, or an eighth, is a plain one."""
DRAWN = 8
"""A level that none of so many rows could have is one that nothing can have."""
IN_VAIN = 2
"""After so many rows that were to have a pair all else is simplest. One that two could not have,
and none could, is kept apart but for its own row."""
PERSISTENT = 4
"""So many rows are made for a combination of which any two levels have been seen to go together."""
FEW = 3
"""In so many levels the next rows differ from the simplest one: little else is the cause of what
they show, or hides it."""
SPARING = 3
"""A level to be had sparingly brings so many more combinations than the first, or is needed."""


class CoveringArray:
    """Rows that are made level by level; factors are known from when a row first asks for them.

    Attributes:
        factors: their levels' places in one sequence of all levels of all factors.
        row: levels of the one that is made now.
        places: of its levels, how many rows before have the same.
    """

    def __init__(self, strength: int, seed: int = 0) -> None:
        self.strength, self._random = strength, random.Random(seed)
        self.factors: dict[str, range] = {}
        self.row: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self._every: Places = 0
        self._missing: dict[tuple[int, ...], Places] = {}
        """By all places of a combination but one, in any order: the last ones of those missing."""
        self._had: list[Places] = []
        self._could: list[Places] = []
        self._once: list[Places] = []
        self._vain: list[Places] = []
        """Of any two levels: whether a row had both; whether one could have; whether one could not;
        and whether a second one could not."""
        self._hides: Places = 0
        self._kept: Places = 0
        """Of each level: whether it hides what others do; whether this row had better not have it,
        which would lose its start."""
        self._always = dict[int, str]()
        """Of the places of levels that hide in every row, what serves such a row."""
        self._drawn: list[float] = []
        """Of each level that none could have: how many rows that were not to be simple asked for
        its factor; of others minus infinity."""
        self._plain, self._alone = FIRST, list[int]()
        """How many rows more are the simplest one; and the levels, none of them its factor's first,
        that no row was made for yet."""
        self._start: tuple[int, ...] = ()
        """What the row is made around, as places."""
        self._is_first = True
        """Whether it is one of the simplest rows, or differs from them in a few levels."""
        self._simple, self._simple_throughout = True, True
        """Whether all else in it is simplest; and whether it is so once the start is there too."""
        self._tried: Counter[tuple[int, ...]] = Counter()
        """By start, the rows that were to have it and have not."""
        self._fixed: list[int] = []
        """The row's levels so far, as places; and all those that it cannot have."""
        self._cannot: Places = 0
        self._turns: Counter[tuple[str, int]] = Counter()
        """By factor and level, the rows that were asked."""

    def begin(self) -> bool:
        """Starts a row, unless nothing is missing any more."""
        self.row, self.places, self._fixed, self._cannot = {}, {}, [], 0
        self._is_first = bool(self._plain or self._alone)
        start = self._next_few() if self._is_first else self._some()
        while dead := [place for place in start or () if self._drawn[place] >= DRAWN]:
            self._leave_out(tuple(dead[:1]))
            start, self._is_first = self._some(), False
        if start is None:
            return False
        pairs = [(a, b) for a, b in itertools.combinations(start, 2) if self._apart(a) >> b & 1]
        self._simple = bool(self._is_first or pairs) or start in self._tried
        self._start = (*pairs, start)[0]
        self._simple_throughout = self._is_first or self._tried[self._start] >= IN_VAIN
        self._kept = 0
        for place in self._start:
            self._kept |= self._apart(place)
        return True

    def level(self, factor: str, can: Sequence[bool], *, sparing: bool = False) -> int:
        """The level that the row has of its next factor.

        Args:
            can: of each level, from the simplest on, whether the row can have it; one at least.
            sparing: all but the first cost much, or are without other factors.
        """
        if factor not in self.factors:
            self._add(factor, len(can))
        first = self.factors[factor].start
        fitting = [first + level for level, it in enumerate(can) if it]
        if len(fitting) < len(can):
            self._cannot |= _of(self.factors[factor]) & ~_set(fitting)
        mine = [place for place in self._start if place in fitting]
        place = mine[0] if mine else self._chosen(fitting, SPARING * sparing)
        self.row[factor] = level = place - first
        self.places[factor] = self._turns[factor, level]
        self._fixed.append(place)
        return level

    def end(self, refused: Collection[str] = (), hiding: Set[str] = frozenset()) -> bool:
        """Counts what the row has; False where that is nothing new, so that it need not be asked.

        Args:
            refused: factors whose level it has not, after all.
            hiding: factors whose level hides what others do.
        """
        self._learn()
        had = {f: self.factors[f].start + n for f, n in self.row.items() if f not in refused}
        hides = [place for f, place in had.items() if f in hiding or place in self._always]
        self._hides |= _set(hides)
        is_one = self._served(hides) is not None and not hiding & had.keys()
        seen = hides if len(hides) > 1 and not is_one else [*had.values()]
        for some, others in ((hides or seen, seen), (seen, hides or seen)):
            for place in some:
                self._had[place] |= _set(others)
        parts = [[place] for place in hides] if is_one else [hides]
        is_new = any([self._found(list(had.values()), part) for part in parts]) or not self._start
        start, lacks = self._start, not set(self._start) <= set(had.values())
        if len(start) == self.strength:
            lacks = bool(self._missing.get(start[:-1], 0) >> start[-1] & 1)
        for tried in self._in_vain({*had.values()}) if lacks and not self._is_first else ():
            self._tried[tried] += 1
            can_be = all(self._could[a] >> b & 1 for a, b in itertools.combinations(tried, 2))
            if self._simple and (not can_be or self._tried[tried] >= PERSISTENT):
                self._leave_out(tried)
        if is_new:
            self._turns.update(self.row.items())
        return is_new

    def hide(self, factor: str, served: str) -> None:
        """The row's level of it has turned out to hide what others do, in whatever row."""
        self._always[self.factors[factor].start + self.row[factor]] = served

    def asked(self) -> list[list[float]]:
        """(factors, factors) of the pairs of levels, or levels, that can be, the part in a row."""

        def meeting(a: range, b: range) -> int:
            return sum(bool(self._could[place] & _of(b)) for place in a)

        def part(a: range, b: range) -> float:
            found = sum((self._had[place] & _of(b)).bit_count() for place in a)
            return min(found / max(len(a) if a == b else meeting(a, b) * meeting(b, a), 1), 1.0)

        return [[part(a, b) for b in self.factors.values()] for a in self.factors.values()]

    def _add(self, factor: str, count: int) -> None:
        """Another factor, all of whose combinations are missing."""
        block = range(len(self._drawn), len(self._drawn) + count)
        self.factors[factor], self._every = block, self._every | _of(block)
        self._alone += block[1:]
        for known in self._had, self._could, self._once, self._vain:
            known += [0] * count
        self._drawn += [0] * count
        # Two levels of one factor never meet.
        for blocks in itertools.permutations(self.factors.values(), self.strength - 1):
            is_new = block in blocks
            more = self._every & ~sum(map(_of, blocks)) if is_new else _of(block)
            for places in itertools.product(*blocks):
                self._missing[places] = self._missing.get(places, 0) | more

    def _next_few(self) -> tuple[int, ...]:
        """The levels in which the next row differs from the simplest one."""
        if self._plain:
            self._plain -= 1
            return ()
        found, avoided = list[int](), 0
        for place in self._alone:
            if not found or (len(found) < FEW and not (avoided | self._hides) >> place & 1):
                found.append(place)
                avoided |= next(_of(f) for f in self.factors.values() if place in f)
                avoided |= self._every if self._hides >> place & 1 else self._apart(place)
        self._alone = [place for place in self._alone if place not in found]
        return tuple(found)

    def _some(self) -> tuple[int, ...] | None:
        """One of the missing combinations, as places."""
        if not self._missing:
            return None
        places = self._random.choice(list(self._missing))
        return tuple(sorted((*places, self._random.choice(_members(self._missing[places])))))

    def _leave_out(self, combination: tuple[int, ...]) -> None:
        """It, or whatever it is part of, is not missing any more."""
        self._found(range(len(self._drawn)), list(combination))

    def _apart(self, place: int) -> Places:
        """Levels that seem not to go together with one."""
        return self._vain[place] & ~self._could[place]

    def _chosen(self, fitting: list[int], less: int) -> int:
        """The level that brings the most, or the simplest, of those that leave the start what it
        needs.

        Args:
            less: so much less all but the first are worth.
        """
        kept = [place for place in fitting if not self._kept >> place & 1]
        if self._simple and (self._simple_throughout or not set(self._start) <= set(self._fixed)):
            return (kept or fitting)[0]
        own = list(dict.fromkeys((*self._fixed, *self._start)))
        hides, others = [place for place in own if self._hides >> place & 1], self.strength - 1
        served = self._served(hides)
        alike = [place for place in kept if served and self._always.get(place) == served]
        if len(hides) < self.strength or served:
            kept = [place for place in kept if not self._hides >> place & 1 or place in alike]
        axes = [[place] for place in hides] + [own] * (others - len(hides))
        axes = axes if len(hides) <= others else [hides] * others
        axes = [hides, *[own] * (others - 1)] if served and others else axes
        gain, of_alike = self._gain(axes), self._gain([own] * others)
        gains = [
            (of_alike if p in alike else gain)(p) + self._random.random() - less * (p > kept[0])
            for p in kept
        ]
        return kept[gains.index(max(gains))] if kept else fitting[0]

    def _served(self, hides: Sequence[int]) -> str | None:
        """What serves a row with levels that hide, if nothing but that is why they do."""
        served = {self._always.get(place) for place in hides}
        return served.pop() if len(served) == 1 else None

    def _gain(self, axes: list[list[int]]) -> Callable[[int], int]:
        """Missing combinations that a level makes with those of a row, one of each axis."""
        if not axes:
            return lambda place: self._missing.get((), 0) >> place & 1
        last, before = _set(axes[-1]), [*itertools.product(*axes[:-1])]
        found = self._missing.get
        return lambda place: sum((found((place, *b), 0) & last).bit_count() for b in before)

    def _learn(self) -> None:
        """Which levels the row could have beside those before."""
        before, later_can, later_cannot = _set(self._fixed), 0, self._every
        for factor in self.row:
            later_cannot &= ~_of(self.factors[factor])
        for each in _members(later_cannot):
            self._note_apart(each, before)
        for factor, place in reversed([*zip(self.row, self._fixed, strict=True)]):
            block, before = self.factors[factor], before & ~(1 << place)
            self._could[place] |= later_can
            self._note_apart(place, later_cannot)
            for each in block:
                if self._cannot >> each & 1:
                    self._drawn[each] += not self._simple
                    self._note_apart(each, before)
                else:
                    self._drawn[each] = -inf
                    self._could[each] |= before
            later_can |= _of(block) & ~self._cannot
            later_cannot |= _of(block) & self._cannot

    def _note_apart(self, place: int, others: Places) -> None:
        """One row more could not have others beside a level, or it beside them."""
        self._vain[place] |= self._once[place] & others
        self._once[place] |= others

    def _in_vain(self, had: Set[int]) -> list[tuple[int, ...]]:
        """What the row was tried for: its start, of which it lacks something; if it was simple and
        lacks one level only, the same with any other that it could not have in its place.
        """
        rest = tuple(place for place in self._start if place in had)
        if not self._simple or len(rest) < len(self._start) - 1:
            return [self._start]
        waiting, cannot = {*rest}, self._every
        for factor, place in zip(self.row, self._fixed, strict=True):
            cannot &= ~_of(self.factors[factor]) | (0 if waiting else self._cannot)
            waiting.discard(place)
        is_whole = len(self._start) == self.strength
        cannot &= self._missing.get(rest, 0) if is_whole else self._apart(rest[0])
        others = [tuple(sorted((*rest, place))) for place in _members(cannot)]
        return [self._start, *(some for some in others if some != self._start)]

    def _found(self, row: Sequence[int], hides: list[int]) -> bool:
        """Combinations of a row that count are not missing: those with all that hides, if any.

        Returns:
            whether one of them was.
        """
        is_new = False
        if len(hides) >= self.strength:
            row, hides = hides, []
        for axes in itertools.permutations(range(self.strength), len(hides)):
            where = [row] * self.strength
            for axis, place in zip(axes, hides, strict=True):
                where[axis] = [place]
            last = _set(where[-1])
            for places in itertools.product(*where[:-1]):
                missing = self._missing.get(places, 0)
                if missing & last:
                    is_new = True
                    self._missing[places] = missing & ~last
                    if not self._missing[places]:
                        del self._missing[places]
        return is_new


def _of(block: range) -> Places:
    """All levels of a factor."""
    return (1 << block.stop) - (1 << block.start)


def _set(places: Iterable[int]) -> Places:
    """Those at some places."""
    found = 0
    for place in places:
        found |= 1 << place
    return found


def _members(places: Places) -> list[int]:
    """The places of a set, ascending."""
    found = []
    while places:
        found.append((places & -places).bit_length() - 1)
        places &= places - 1
    return found


def covering_array(levels: Sequence[int], strength: int, seed: int = 0) -> Rows:
    """Rows that cover all combinations of factors that are independent of each other.

    Args:
        levels: number of levels of each factor, at least 1.
        strength: of how many factors all combinations occur; of fewer factors, all at once.
        seed: which of many such arrays. In each, the first row has level 0 throughout, and the
            next ones differ from it in one factor: no other level can hide what one does.

    Returns:
        (rows, factors) levels, from 0.
    """
    array = CoveringArray(min(strength, len(levels)), seed)
    order, rows = np.random.default_rng(seed), []
    while levels and array.begin():
        for factor in order.permutation(len(levels)).tolist():
            array.level(str(factor), [True] * levels[factor])
        if array.end():
            rows.append([array.row[str(factor)] for factor in range(len(levels))])
    return np.array(rows[FIRST - 1 :] or [[]], dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """Which combinations of options the calls of an operator had.

    Attributes:
        factors: names of what varies.
        levels: of each factor: how many values it has.
        rows: calls.
        strength: so many factors have every combination of their levels.
        asked: by two factors, symmetric: the part of their pairs of levels that some call has; on
            the diagonal, the part of the factor's own levels.

    Raises:
        ValueError: the numbers of factors differ, or a part is not within 0 and 1.
    """

    operator: str
    factors: tuple[str, ...]
    levels: tuple[int, ...]
    rows: int
    strength: int
    asked: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        count = len(self.factors)
        sizes = {len(self.levels), len(self.asked), *map(len, self.asked)}
        if sizes - {count}:
            raise ValueError(
                f"coverage of {self.operator}: {count} factors, and levels and parts asked of "
                f"{sorted(sizes)}"
            )
        if not all(0.0 <= part <= 1.0 for line in self.asked for part in line):
            raise ValueError(f"coverage of {self.operator}: a part asked is not within 0 and 1")

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Coverage:
        """The inverse of its part of the report."""
        asked = tuple(map(tuple, row["asked"]))
        tuples = {"factors": tuple(row["factors"]), "levels": tuple(row["levels"]), "asked": asked}
        return cls(**{**row, **tuples})

    def of_pairs(self) -> float:
        """The part of all pairs of levels, of two factors each, that some call has."""
        pairs = [(i, j) for i in range(len(self.levels)) for j in range(i)]
        sizes = [self.levels[i] * self.levels[j] for i, j in pairs]
        found = sum(self.asked[i][j] * n for (i, j), n in zip(pairs, sizes, strict=True))
        return found / sum(sizes) if sizes else 1.0
