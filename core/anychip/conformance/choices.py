"""A point of a design: the level that each factor of a call has.

Who makes a call asks for the level of one factor after the other, by name, and says which of them
the call can have: the factors stand nowhere else. Sizes, values and options have classes: a level
is a class, and of the points with one level each takes another member of it, until all have been
taken.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from anychip.conformance.calls import Draw

T = TypeVar("T")
Classes = Mapping[str, tuple[tuple[int, ...], ...]]
"""Levels of a factor whose members are shapes, or lists of sizes."""

SIZES: Mapping[str, tuple[int, ...]] = {
    "few": (3, 2, 5, 6, 7, 9, 10, 11, 12, 13),
    "one": (1,),
    "beside a power of two": (15, 17, 31, 33, 63, 65, 127, 129, 255, 257, 513, 1025),
    "a power of two": (4, 8, 16, 32, 64, 128, 256, 512, 1024),
    "a multiple of 16": (48, 80, 96, 112, 192, 240, 320, 336, 384, 480, 672, 768, 960),
    "many": (21, 35, 44, 75, 100, 111, 141, 177, 203, 301, 420, 511, 630, 1001),
    "very many": (1500, 2048, 3001, 4096, 5000, 6720, 8191, 8192, 13440, 16384, 20000, 70000),
}
"""Where vectors, warps, blocks and tiles end, with and without a rest; widths that kernels are
written for. Simplest first, as all levels are: that is where a failing call is led back to."""
ROWS: Classes = {
    "few": ((3,), (2,), (4,), (5,), (6,), (7,), (9,), (11,)),
    "one": ((1,),),
    "no dim": ((),),
    "several dims": ((2, 3), (2, 1, 3), (3, 4), (1, 2, 1, 2), (4, 1), (1, 5), (6, 1), (3, 2, 1),
                     (2, 1, 3, 1, 2)),
    "none": ((0,), (2, 0), (0, 3)),
    "beside a power of two": ((17,), (31,), (33,), (63,), (65,), (15,), (127,), (129,)),
    "a power of two": ((8,), (16,), (32,), (64,), (128,), (2, 8), (4, 16), (16, 1)),
    "many": ((70,), (40,), (10, 13), (48,), (65, 2), (96,), (20,), (112,), (5, 25)),
    "very many": ((300,), (257,), (512,), (600,), (1024,), (1025,), (2000,), (40, 30), (300, 7)),
    "thousands": ((4096,), (6720,), (20000,), (8191,), (3, 1500), (66000,), (16384,)),
}  # fmt: skip
"""All dims but the last."""
SHAPES: Classes = {"of any sizes": ((),), "large": ((130, 512), (72, 256), (260, 253), (91, 203))}
"""Large: what is split over threads and blocks, and every second one more than 2^16 elements."""
FEW_ROWS, MOST_ROWS, LARGEST = 130, 66000, 70000
ELEMENTS = tuple(
    1 << bits for bits in (12, 13, 14, 12, 15, 13, 12, 17, 12, 13, 14, 12, 15, 13, 12, 12)
)
"""So many a call has, one row of a design another number than another: what is large in all dims
costs too much to be asked often."""
VALUES = ("normal", "wide", "on one side", "repeated")
ENDS = ("huge", "tiny")
FIT_FLOAT16 = 7
FEW_NUMBERS, LARGE_EPS, TINY_EPS = 7, 0.05, 1e-12
ON_ONE_SIDE: tuple[tuple[float, float], ...] = (
    (10.0, 1.0), (-10.0, 1.0), (0.0, 0.02), (0.0, -30.0), (0.5, 1.0), (0.0, 3.0), (0.0, -0.5),
    (300.0, 1.0), (-1000.0, 1.0), (0.0, 500.0), (0.0, -3000.0), (0.0, 1e-3),
)  # fmt: skip
"""How values come to one side of 0: normal ones moved by the first number; or where that is 0,
their sizes times the second. What is made of those behind the first 7 float16 may not hold."""
OPEN, _ABOVE = "nan, or infinite and open", (math.nan, math.inf)
NOT_FINITE = {"special": (*_ABOVE, -math.inf), OPEN: _ABOVE, "nan or infinite": _ABOVE}
"""Open: what the infinite number reaches may be anything, since formulas differ there."""


class Choices:
    """Where a call's choices come from.

    Args:
        levels: of the factors that are not at their first level.
        seed: which of a class's members are taken.
        places: of factors, how many points before have the same level: which of its members this
            one takes, in a turn in which none comes twice. Of other factors the seed says it.
        of_gradients: an infinite value leaves open what depends on it: formulas of a gradient may
            differ there.
        choose: ``choose(factor, can, sparing=...)`` sets a factor's level and place, one of those
            that it can have; None: the levels are given.
    """

    def __init__(
        self,
        levels: Mapping[str, int],
        seed: int = 0,
        places: Mapping[str, int] | None = None,
        *,
        of_gradients: bool = False,
        choose: Callable[..., object] | None = None,
    ) -> None:
        self.of_gradients, self._choose = of_gradients, choose
        self._levels, self.seed = levels, seed
        self._places = {} if places is None else places
        self.asked: dict[str, int] = {}
        """Factors in the order in which they were asked for, and the number of their levels."""
        self.chosen: dict[str, object] = {}
        """The levels, for people."""
        self.refused, self.hiding = set[str](), set[str]()
        """Factors whose level the call cannot have, for what others' are; and those whose level
        hides what others do: no elements, numbers that are not finite, all dropped or skipped."""
        self.has_channels = False
        """Whether the second dim of tensors with more is channels."""
        self.leaves_open = False
        """Whether what an infinite number reaches may be anything."""

    def hides(self, factor: str, it_does: bool) -> None:
        """Notes that nothing, or little, is seen in the results of what other factors do."""
        self.hiding |= {factor} if it_does else set()

    def of(
        self, factor: str, *options: T, can: Sequence[bool] | None = None, sparing: bool = False
    ) -> T:
        """The option that the factor's level stands for; the simplest is the first.

        Args:
            can: of each option, whether the call can have it; None: any. Where it cannot have what
                it is given, it has the simplest that it can, and this is noted.
            sparing: all but the simplest are in no more calls than they have to be.
        """
        known = self.asked.setdefault(factor, len(options))
        assert known == len(options), f"{factor} has {known} levels, and then {len(options)}"
        can = can or [True] * len(options)
        if self._choose is not None and factor not in self._levels:
            self._choose(factor, can, sparing=sparing)
        level = self._levels.get(factor, 0)
        if not can[level]:
            self.refused.add(factor)
            level = can.index(True)
        self.chosen[factor] = option = options[level]
        return option

    @property
    def is_random(self) -> bool:
        """Whether all values are normal, as the statistical limits suppose."""
        return not any(kind in (*VALUES[1:], *ENDS, *NOT_FINITE) for kind in self.chosen.values())

    def member(
        self,
        factor: str,
        classes: Mapping[str, Sequence[T]],
        fits: Callable[[T], bool] = lambda member: True,
        *,
        sparing: bool = False,
    ) -> T:
        """A member of the class that the factor's level stands for, of those that fit; one does."""
        can = [any(map(fits, members)) for members in classes.values()]
        members = classes[self.of(factor, *classes, can=can, sparing=sparing)]
        self.chosen[factor] = found = self._member(factor, members, "", fits)
        return found

    def number(self, factor: str, *classes: Sequence[T], hides: Sequence[T] = ()) -> T:
        """A number of one of some classes, which are called by their first.

        Args:
            hides: those with which the call does nothing.
        """
        found = self.member(factor, _named(classes))
        self.hides(factor, found in hides)
        return found

    def eps(self, numbers: int, *classes: Sequence[float], centred: bool = True) -> float:
        """What is added to a variance, or to a mean square.

        Args:
            numbers: so many it is of. Of few a variance may be nothing but rounding, of which a
                small eps makes much; and a square of tiny ones no normal number.
        """
        least = LARGE_EPS if centred else TINY_EPS if "tiny" in self.chosen.values() else 0.0
        return self.member(
            "eps", _named(classes), lambda eps: numbers > FEW_NUMBERS or eps >= least
        )

    def probability(self, draw: Draw) -> float:
        """Of dropping. In float16 a hundred times what is left of wide numbers would not fit."""
        low, half, high = (0.1, 0.2, 0.3, 0.01, 0.05, 0.25), (0.5, 0.4, 0.6), (0.9, 0.7, 0.8, 0.99)
        fit = 3 if draw.dtype == torch.float16 else 4
        return self.number("p", low, (0.0,), half, high[:fit], (1.0,), hides=(1.0,))

    def number_up_to(self, most: int, factor: str, *classes: Sequence[int]) -> int:
        """One of those up to a highest one."""
        return self._up_to(most, factor, _named(classes))

    def turn(self, factor: str) -> int:
        """Any number from 0 on, for choices that are no factor."""
        return _number(f"{factor} turned/{self.seed}")

    @property
    def is_finite(self) -> bool:
        """Whether all values are."""
        return not any(kind in NOT_FINITE for kind in self.chosen.values())

    def _member(
        self,
        factor: str,
        members: Sequence[T],
        what: str = "",
        fits: Callable[[T], bool] = lambda member: True,
    ) -> T:
        """The member whose turn it is, or if that does not fit, the next one that does.

        Args:
            what: tells several lists of members apart that a factor's level takes from.
        """
        place, name = self._places.get(factor), f"{factor}{what}"
        if place is None:
            place = _number(f"{name}/{self.seed}")
        turn, start = divmod(place, len(members))
        order = _order(name, len(members), turn)
        every = (members[at] for at in (*order[start:], *order[:start]))
        return next(member for member in every if fits(member))

    def size(self, factor: str, high: int = 320, *, none: bool = False) -> int:
        """A size up to a highest one; 0 too if ``none``."""
        return self._up_to(high, factor, {**SIZES, **({"none": (0,)} if none else {})})

    def _up_to(self, most: int, factor: str, classes: Mapping[str, Sequence[int]]) -> int:
        found = self.member(factor, classes, lambda size: size <= most)
        self.hides(factor, not found)
        return found

    def rows(self, *, high: int = FEW_ROWS) -> list[int]:
        """All dims of a shape but the last, of up to so many rows."""
        few = {name: [s for s in shapes if math.prod(s) <= high] for name, shapes in ROWS.items()}
        shape = self.member("rows", {name: shapes for name, shapes in few.items() if shapes})
        self.hides("rows", 0 in shape)
        return list(shape)

    def room(self, *sizes: int, elements: int | None = None) -> Room:
        """For a call's sizes beside those that it has already."""
        return Room(self, elements or ELEMENTS[self.turn("elements") % len(ELEMENTS)], *sizes)

    def shape(self) -> list[int]:
        """Rows, and a last dim, which is short where there are very many; or a large shape."""
        if large := self.member("shape", SHAPES, sparing=True):
            return list(large)
        rows = self.rows(high=MOST_ROWS)
        room = self.room(*rows)
        room.left *= 4 if math.prod(rows) < 5 else 1  # wide ones too
        return [*rows, room.size("width", none=True)]

    def values(
        self, factor: str, draw: Draw, *shape: int, dtype: torch.dtype | None = None,
        ends: tuple[float | str, float | str] | None = ("root-huge", "root-tiny"),
        more: tuple[str, ...] = (OPEN,), number: int = 0, added: bool = False,
    ) -> Tensor:  # fmt: skip
        """Float values of one kind.

        Args:
            added: to what comes of other arguments, which do not show beside a large one, nor a
                small one beside them.
            number: of a tensor of a list: of a kind the next one may be another member.
            ends: scales at both ends of what the operator can compute in float32; None: no such.
            more: of NOT_FINITE, some numbers are not finite; ``none`` is for who asks.
        """
        kinds = (*VALUES, *(ENDS if ends else ()), *more)
        if self.of_gradients:
            kinds = tuple(OPEN if kind in NOT_FINITE else kind for kind in kinds)
        kind = self.of(factor, *kinds)
        self.hides(factor, kind in NOT_FINITE or (added and kind in ENDS))
        if ends and kind in ENDS:
            return draw.normal(*shape, scale=ends[ENDS.index(kind)], dtype=dtype)
        normal = draw.normal(*shape, dtype=torch.float32)
        return self._changed(factor, kind, draw, normal, number).to(dtype or draw.dtype)

    def change(self, factor: str, draw: Draw) -> Callable[[Tensor], Tensor]:
        """Makes values of one kind of normal ones, in their own type."""
        # In float16 what a kernel stores in between would be subnormal, or infinite.
        can = [draw.dtype != torch.float16 or kind == "normal" for kind in VALUES]
        kind = self.of(factor, *VALUES, can=can)
        return lambda normal: self._changed(factor, kind, draw, normal.float()).to(normal.dtype)

    def _changed(
        self, factor: str, kind: str, draw: Draw, normal: Tensor, number: int = 0
    ) -> Tensor:
        if kind == "wide":
            return normal.sign() * torch.exp2((4.0 * normal).clamp(-12.0, 12.0))
        if kind == "on one side":
            known = ON_ONE_SIDE[: FIT_FLOAT16 if draw.dtype == torch.float16 else None]
            far, times = self._member(factor, known, " moved")
            return normal + far if far else normal.abs() * times
        if kind == "repeated":  # zeros of both signs, and equal numbers; or nothing else
            members = (None, 1.7, None, 1.0, None, -1.1)  # of which two need all their digits
            start = number % len(members)
            equal = self._member(factor, (*members[start:], *members[:start]), " equal")
            some = normal.mul(2.0).round() * (normal > 0.4)
            return some if equal is None else torch.full_like(normal, equal)
        if kind in NOT_FINITE and normal.numel():
            self._spoil(factor, normal, kind)
        return normal

    def spoil(self, **tensors: Tensor) -> None:
        """Puts what is not finite into each of them, or does not."""
        for name, tensor in tensors.items():
            factor = f"{name} has besides"
            if self.of(factor, "finite", OPEN) == OPEN and tensor.numel():
                self.hides(factor, True)
                self._spoil(factor, tensor, OPEN)

    def _spoil(self, factor: str, tensor: Tensor, kind: str) -> None:
        """One number, at one of its ends or between them, is not finite; or one of each kind, or
        all of a row.
        """
        values = NOT_FINITE[kind]
        # Not in an order of chance: few rows are of these, and each of them hides the others.
        flat, turn = tensor.view(-1), self._places.get(factor, self.turn(factor))
        places = (0, flat.numel() // 2, flat.numel() - 1)
        count = len(values) if turn % 4 == 3 and flat.numel() > 2 else 1
        for number in range(count):
            value = values[(turn + number) % len(values)]
            signed = -value if math.isnan(value) and turn // 2 % 2 else value  # as x86 makes it
            place = places[(turn + turn // 3 + number) % 3]
            flat[place] = signed
            if turn % 5 == 2 and tensor.dim() > 1:
                tensor.view(-1, tensor.shape[-1])[place // tensor.shape[-1]] = signed
        self.leaves_open |= kind == OPEN and bool(flat.isinf().any())

    def optional(self, factor: str, draw: Draw, *shape: int, **options: Any) -> Tensor | None:
        """Values, or None, which is a level like their kinds."""
        more = ("none", *options.pop("more", (OPEN,)))
        found = self.values(factor, draw, *shape, more=more, **options)
        return None if self.chosen[factor] == "none" else found


class Given(Choices):
    """A point where some factors are what is given; all others have their first level.

    What is given need not be of any level: a size is any size. That the operator has such a factor
    is checked once it has asked for all of them (:meth:`check`).
    """

    def __init__(self, given: Mapping[str, object]) -> None:
        super().__init__({})
        self.given = given

    def of(self, factor: str, *options: T, **_: Any) -> T:
        found = super().of(factor, *options)
        return self._given(factor, found)

    def member(self, factor: str, classes: Mapping[str, Sequence[T]], *_: Any, **__: Any) -> T:
        found = super().of(factor, *classes)
        return self._given(factor, classes[found][0])

    def _given(self, factor: str, first: T) -> T:
        self.chosen[factor] = found = self.given.get(factor, first)
        return cast("T", found)

    def _member(self, factor: str, members: Sequence[T], *_: Any) -> T:
        return members[0]

    def turn(self, factor: str) -> int:
        return 0

    def check(self) -> None:
        """Raises ValueError for what is given and was not asked for."""
        for factor in self.given.keys() - self.asked.keys():
            raise ValueError(f"no factor {factor!r}: there are {', '.join(self.asked)}")


class Room:
    """How large a call's sizes may be, one after the other: their product has a limit.

    Args:
        elements: the limit.
        sizes: those that there are.
    """

    def __init__(self, choose: Choices, elements: int, *sizes: int) -> None:
        self.choose, self.left = choose, elements // max(math.prod(sizes), 1)

    def size(self, factor: str, high: int = LARGEST, *, none: bool = False) -> int:
        """The next one."""
        found = self.choose.size(factor, max(min(high, self.left), 1), none=none)
        self.left //= max(found, 1)
        return found


def _named(classes: Iterable[Sequence[T]]) -> Mapping[str, Sequence[T]]:
    """By their first members."""
    return {str(members[0]): members for members in classes}


@lru_cache(maxsize=1 << 12)
def _order(factor: str, count: int, turn: int) -> tuple[int, ...]:
    return tuple(sorted(range(count), key=lambda level: _number(f"{factor}/{turn}/{level}")))


def _number(text: str) -> int:
    """Of a text: no two texts' numbers have to do with each other, as checksums' have."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
