"""Covering arrays: few rows in which all combinations of so many factors' levels occur.

Most failures need one or two conditions to meet (Kuhn, Wallace and Gallo 2004, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6)): an array of strength 2 has
every pair of levels of every two factors in some row, one of strength 3 every triple. Rows are made
one after the other, first the simplest one and those that differ from it in one level, then each
around a combination that is still missing, with the levels that bring the most other missing ones
(AETG: Cohen, Dalal, Fredman and Patton 1997, IEEE TSE 23(7)). It ends when nothing is missing,
which is the proof: what is missing is counted, not assumed.

What can meet need not be known before. Whoever makes a row says of each factor, when its turn has
come, which levels the row can still have. A combination that no row has when it was tried for, then
with all as simple as it can be until it is there, at last with all else so too, is left out. And a
level may hide what others do (NaN in all results, another implementation): such a row counts for
that level's own combinations only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Bools = NDArray[np.bool_]
FIRST = 2
"""So often the simplest row comes before all: a third call of all, or an eighth, is a plain one."""
DRAWN = 8
"""A level that none of so many rows could have is one that nothing can have."""
IN_VAIN = 2
"""A pair that so many rows could not have, and none could, is kept apart but for its own row."""
PERSISTENT = 4
"""So many rows are made for a combination of which any two levels have been seen to go together."""


class CoveringArray:
    """Rows that are made level by level; factors are known from when a row first asks for them.

    Attributes:
        factors: their levels' places in one sequence of all levels of all factors.
        row: levels of the one that is made now.
        places: of its levels, how many rows before have the same.
    """

    def __init__(self, strength: int, seed: int = 0) -> None:
        self.strength, self._random = strength, np.random.default_rng(seed)
        self.factors: dict[str, slice] = {}
        self.row: dict[str, int] = {}
        self.places: dict[str, int] = {}
        self._missing: Bools = np.zeros((0,) * strength, np.bool_)
        """A cube: each combination stands there once for every order of its factors."""
        nothing: Bools = np.zeros((0, 0), np.bool_)
        self._had, self._could, self._in_vain = nothing, nothing, nothing.astype(np.int64)
        """Of any two levels: whether a row had both; whether one could have; how many could not."""
        self._hides: Bools = nothing.reshape(0)
        self._feasible, self._kept = self._hides, self._hides
        """Of each level: whether it hides what others do; whether any row could have it; whether
        this row had better not, which would lose its start."""
        self._always = set[int]()
        """Places of levels that hide in every row."""
        self._drawn = self._in_vain.reshape(0)
        """Of each level: how many rows that were not to be simple asked for its factor."""
        self._alone: list[tuple[int, ...]] = [()] * FIRST
        """The starts of the first rows: nothing, and each level that is not its factor's first."""
        self._start: tuple[int, ...] = ()
        """What the row is made around, as places."""
        self._simple, self._simple_throughout = True, True
        """Whether all else in it is simplest; and whether it is so once the start is there too."""
        self._tried: Counter[tuple[int, ...]] = Counter()
        """By start, the rows that were to have it and have not."""
        self._fixed: list[int] = []
        """The row's levels so far, as places; and all those that it cannot have."""
        self._cannot: list[int] = []
        self._turns: Counter[tuple[str, int]] = Counter()
        """By factor and level, the rows that were asked."""

    def begin(self) -> bool:
        """Starts a row, unless nothing is missing any more."""
        self.row, self.places, self._fixed, self._cannot = {}, {}, [], []
        dead = ~self._feasible & (self._drawn >= DRAWN)
        start = self._alone[0] if self._alone else self._some()
        while start is not None and dead[list(start)].any():
            self._leave_out(tuple(place for place in start if dead[place])[:1])
            start = self._some()
        if start is None:
            return False
        pairs = [pair for pair in itertools.combinations(start, 2) if self._apart(*pair)]
        self._simple = bool(self._alone or pairs) or start in self._tried
        self._start = (*pairs, start)[0]
        self._simple_throughout = bool(self._alone) or self._tried[self._start] >= IN_VAIN
        self._alone = self._alone[1:]
        self._kept = self._apart(list(self._start), slice(None))
        return True

    def level(self, factor: str, can: Sequence[bool]) -> int:
        """The level that the row has of its next factor.

        Args:
            can: of each level, from the simplest on, whether the row can have it; one at least.
        """
        if factor not in self.factors:
            self._add(factor, len(can))
        block = self.factors[factor]
        self._cannot += [block.start + level for level, it in enumerate(can) if not it]
        mine = [level for level, it in enumerate(can) if it and block.start + level in self._start]
        level = mine[0] if mine else self._chosen(block, can)
        self.row[factor], self.places[factor] = level, self._turns[factor, level]
        self._fixed.append(block.start + level)
        return level

    def end(self, refused: Collection[str] = (), hiding: Collection[str] = ()) -> bool:
        """Counts what the row has; False where that is nothing new, so that it need not be asked.

        Args:
            refused: factors whose level it has not, after all.
            hiding: factors whose level hides what others do.
        """
        self._learn()
        had = {f: self.factors[f].start + n for f, n in self.row.items() if f not in refused}
        hides = [place for f, place in had.items() if f in hiding or place in self._always]
        self._hides[hides] = True
        _mark(self._had, list(had.values()), hides, to=True)
        is_new = _mark(self._missing, list(had.values()), hides, to=False) or not self._start
        start, lacks = self._start, not set(self._start) <= set(had.values())
        lacks = bool(self._missing[start]) if len(start) == self.strength else lacks
        if lacks and len(start) >= min(self.strength, 2):
            self._tried[start] += 1
            can_be = all(self._could[pair] for pair in itertools.combinations(start, 2))
            if self._simple and (not can_be or self._tried[start] == PERSISTENT):
                self._leave_out(start)
        if is_new:
            self._turns.update(self.row.items())
        return is_new

    def hide(self, factor: str) -> None:
        """The row's level of it has turned out to hide what others do, in whatever row."""
        self._always.add(self.factors[factor].start + self.row[factor])

    def asked(self) -> NDArray[np.float64]:
        """(factors, factors) of the pairs of levels, or levels, that can be, the part in a row."""
        blocks = list(self.factors.values())
        meet = np.stack([self._could[:, b].any(1) for b in blocks], 1)  # levels with factors
        found = np.ones((len(blocks), len(blocks)))
        for (i, a), (j, b) in itertools.product(enumerate(blocks), repeat=2):
            can = a.stop - a.start if i == j else meet[a, j].sum() * meet[b, i].sum()
            found[i, j] = self._had[a, b].sum() / max(can, 1)
        return found.clip(max=1.0)

    def _add(self, factor: str, count: int) -> None:
        """Another factor, all of whose combinations are missing."""
        first = len(self._hides)
        self.factors[factor] = slice(first, first + count)
        self._alone += [(first + level,) for level in range(1, count)]
        cube = np.ones((first + count,) * self.strength, np.bool_)
        for block in self.factors.values():  # two levels of one factor never meet
            for axes in itertools.combinations(range(self.strength), 2):
                cube[tuple(block if axis in axes else slice(None) for axis in range(cube.ndim))] = 0
        cube[(slice(first),) * self.strength] = self._missing
        self._missing = cube
        for name in ("had", "could", "in_vain", "hides", "feasible", "drawn", "kept"):
            setattr(self, f"_{name}", np.pad(getattr(self, f"_{name}"), (0, count)))

    def _some(self) -> tuple[int, ...] | None:
        """One of the missing combinations, as places."""
        flat = self._missing.reshape(-1)
        begin = int(self._random.integers(flat.size))
        place = begin + int(flat[begin:].argmax())  # from there on: nothing is counted
        place = place if flat[place] else int(flat.argmax())
        found = np.unravel_index(place, self._missing.shape)
        return tuple(sorted(int(at) for at in found)) if flat[place] else None

    def _leave_out(self, combination: tuple[int, ...]) -> None:
        """It, or whatever it is part of, is not missing any more."""
        _mark(self._missing, list(range(len(self._hides))), list(combination), to=False)

    def _apart(self, some: int | list[int], others: int | slice) -> Bools:
        """Whether levels seem not to go together with one of some."""
        vain, could = self._in_vain[some, others], self._could[some, others]
        return np.asarray(((vain >= IN_VAIN) & ~could).any(0))

    def _chosen(self, block: slice, can: Sequence[bool]) -> int:
        """The level that brings the most, or the simplest, of those that leave the start what it
        needs.
        """
        if self._simple and (self._simple_throughout or not set(self._start) <= set(self._fixed)):
            kept = self._kept[block].tolist()
            fitting = (level for level, it in enumerate(can) if it and not kept[level])
            return next(fitting, list(can).index(True))
        own = list(dict.fromkeys((*self._fixed, *self._start)))
        hides = [place for place in own if self._hides[place]]
        gains = self._gains(block, own, hides) + self._random.random(len(can))
        unwanted = self._kept[block] | (self._hides[block] & (len(hides) < self.strength))
        gains[unwanted] = -1.0
        gains[[level for level, it in enumerate(can) if not it]] = -2.0
        return int(gains.argmax())

    def _gains(self, block: slice, row: list[int], hides: list[int]) -> NDArray[np.float64]:
        """Missing combinations that each level makes with a row's."""
        others = self.strength - 1
        axes = [[place] for place in hides] + [row] * (others - len(hides))
        found = self._missing[block]
        for axis, places in enumerate(axes if len(hides) <= others else [hides] * others):
            found = found.take(places, axis=axis + 1)
        return np.asarray(found.sum(tuple(range(1, found.ndim))), np.float64)

    def _learn(self) -> None:
        """Which levels the row could have beside those before."""
        fixed = np.array(self._fixed, np.int64)
        could = np.zeros(len(self._hides), np.bool_)
        turn = np.full(len(self._hides), len(fixed))
        for number, factor in enumerate(self.row):
            could[self.factors[factor]], turn[self.factors[factor]] = True, number
        self._drawn[could] += not self._simple
        could[self._cannot] = False
        self._feasible |= could
        beside = np.arange(len(fixed)) < turn[:, None]
        self._could[:, fixed] |= beside & could[:, None]
        self._could[fixed] |= (beside & could[:, None]).T
        self._in_vain[:, fixed] += beside & ~could[:, None]
        self._in_vain[fixed] += (beside & ~could[:, None]).T


def _mark(cube: Bools, row: list[int], hides: list[int], *, to: bool) -> bool:
    """Sets the combinations of a row that count: those with all that hides, or of nothing else.

    Returns:
        whether one of them was not so before.
    """
    is_new = False
    if len(hides) >= cube.ndim:
        row, hides = hides, []
    for axes in itertools.permutations(range(cube.ndim), len(hides)):
        where = [row] * cube.ndim
        for axis, place in zip(axes, hides, strict=True):
            where[axis] = [place]
        is_new |= bool((cube[np.ix_(*where)] != to).any())
        cube[np.ix_(*where)] = to
    return is_new


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
