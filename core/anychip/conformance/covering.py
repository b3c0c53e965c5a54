"""Covering arrays: few rows in which all combinations of so many factors' levels occur.

Most failures need one or two conditions to meet (Kuhn, Wallace and Gallo 2004, "Software Fault
Interactions and Implications for Software Testing", IEEE TSE 30(6)): an array of strength 2 has
every pair of levels of every two factors in some row, one of strength 3 every triple. Rows are made
one after the other, first the simplest one and those that differ from it in one level, then each
around a combination that is still missing, with the levels that bring the most other missing ones
(AETG: Cohen, Dalal, Fredman and Patton 1997, IEEE TSE 23(7)). It ends when nothing is missing,
which is the proof: what is missing is counted, not assumed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
Without = Mapping[tuple[int, int], Collection[int]]
"""By factor and level: the factors that a row with it says nothing about."""
NONE = -1
"""In a row: it says nothing about this factor."""


class _Missing:
    """Combinations that no row has yet: a cube over all levels of all factors in one sequence.

    Each combination stands there once for every order of its factors.
    """

    def __init__(self, levels: Sequence[int], strength: int, without: Without) -> None:
        ends = list(itertools.accumulate(levels))
        self.blocks = [slice(end - n, end) for end, n in zip(ends, levels, strict=True)]
        total, self.strength = sum(levels), strength
        self.cube = np.ones((total,) * strength, dtype=np.bool_)
        for axes in itertools.combinations(range(strength), 2):
            for block in self.blocks:  # two levels of one factor never meet
                where: list[slice] = [slice(None)] * strength
                for axis in axes:
                    where[axis] = block
                self.cube[tuple(where)] = False
            for (factor, level), others in without.items():
                for first, second in itertools.permutations(axes):
                    for other in others:
                        where = [slice(None)] * strength
                        start = self.blocks[factor].start + level
                        where[first], where[second] = slice(start, start + 1), self.blocks[other]
                        self.cube[tuple(where)] = False

    def some(self, random: np.random.Generator) -> dict[int, int] | None:
        """One of the missing combinations, level by factor."""
        flat = self.cube.reshape(-1)
        begin = int(random.integers(flat.size))  # from there on, so that nothing is counted
        for part, offset in ((flat[begin:], begin), (flat[:begin], 0)):
            place = int(part.argmax()) if part.size else 0
            if part.size and part[place]:
                ends = [block.stop for block in self.blocks]
                found = np.unravel_index(offset + place, self.cube.shape)
                factors = [int(np.searchsorted(ends, at, side="right")) for at in found]
                return {f: int(at) - self.blocks[f].start
                        for f, at in zip(factors, found, strict=True)}  # fmt: skip
        return None

    def gains(self, factor: int, fixed: list[int]) -> NDArray[np.int64]:
        """Missing combinations that each level of a factor makes with levels that are fixed."""
        found = self.cube[self.blocks[factor]]
        for axis in range(1, self.strength):
            found = found.take(fixed, axis=axis)
        counts: NDArray[np.int64] = found.reshape(found.shape[0], -1).sum(1)
        return counts

    def take(self, row: Sequence[int]) -> None:
        """The combinations of a row, given as places in the sequence, are there now."""
        self.cube[np.ix_(*[list(row)] * self.strength)] = False


def covering_array(
    levels: Sequence[int], strength: int, seed: int = 0, without: Without | None = None
) -> Rows:
    """Rows that cover all combinations that can be.

    Args:
        levels: number of levels of each factor, at least 1.
        strength: of how many factors all combinations occur; of fewer factors, all at once.
        seed: which of many such arrays. In each, the first row has level 0 throughout, and the
            next ones differ from it in one factor: no other level can hide what one does.
        without: what cannot be combined.

    Returns:
        (rows, factors) levels, from 0; NONE where another factor's level rules a factor out.
    """
    strength = min(strength, len(levels))
    if not levels:
        return np.zeros((1, 0), dtype=np.int64)
    without = without or {}
    random = np.random.default_rng(seed)
    missing = _Missing(levels, strength, without)
    starts = [block.start for block in missing.blocks]

    def simple(kept: Mapping[int, int], factor: int, _: object) -> int:
        return next(n for n in range(levels[factor])
                    if kept.keys().isdisjoint(without.get((factor, n), ())))  # fmt: skip

    alone = [{factor: level} for factor, n in enumerate(levels) for level in range(1, n)]
    rows = [_completed(one, levels, without, partial(simple, one)) for one in ({}, *alone)]
    for row in rows:
        missing.take([starts[f] + level for f, level in row.items() if level != NONE])
    while (start := missing.some(random)) is not None:
        order = random.permutation(len(levels)).tolist()
        best = partial(_best, missing, without, frozenset(start), random)
        rows.append(_completed(start, levels, without, best, order))
        missing.take([starts[f] + level for f, level in rows[-1].items() if level != NONE])
    return np.array([[row[f] for f in range(len(levels))] for row in rows], dtype=np.int64)


def _best(
    missing: _Missing,
    without: Without,
    kept: frozenset[int],
    random: np.random.Generator,
    factor: int,
    row: Mapping[int, int],
) -> int:
    """The level that brings the most, of those that rule out none of the factors that are kept."""
    fixed = [missing.blocks[f].start + level for f, level in row.items() if level != NONE]
    gains = missing.gains(factor, fixed)
    for level in range(len(gains)):
        if not kept.isdisjoint(without.get((factor, level), ())):
            gains[level] = -1
    return int((gains + random.random(len(gains))).argmax())


def _completed(
    start: Mapping[int, int],
    levels: Sequence[int],
    without: Without,
    choose: Callable[[int, Mapping[int, int]], int],
    order: Sequence[int] | None = None,
) -> dict[int, int]:
    """A row from some levels of it: the others are chosen in this order, or ruled out."""
    row = dict(start)
    ruled_out = {other for level in start.items() for other in without.get(level, ())}
    for factor in range(len(levels)) if order is None else order:
        if factor in row:
            continue
        if factor in ruled_out:
            row[factor] = NONE
            continue
        row[factor] = choose(factor, row)
        out = without.get((factor, row[factor]), ())
        ruled_out.update(out)
        row.update({other: NONE for other in out if other in row and other not in start})
    return row


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
