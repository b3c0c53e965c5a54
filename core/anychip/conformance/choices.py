"""Calls that nobody thought of: shapes, layouts, values and attributes chosen at random.

hypothesis chooses, and when a call fails it looks for a smaller one that fails too. Everything is
made of blocks of random bytes: into random numbers hypothesis would mix constants that it has found
in the source files at hand, and the calls would differ between machines. Nothing is stored on disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, strategies
from torch import Tensor

from anychip.conformance.calls import Draw

T = TypeVar("T")
ELEMENTS = 2048
"""About so many elements has a tensor at most, so that a thousand calls take seconds."""

_BLOCK = strategies.binary(min_size=24, max_size=24)
SIMPLER = 100
"""So many calls are tried to find a simpler one than a failing one."""

SIZES = (
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 96, 127, 128, 129, 200, 255,
    256, 257, 400, 511, 512, 513, 1000, 1024,
)  # fmt: skip
"""Sizes beside powers of two, which are those of vectors, warps, blocks and tiles; simplest first,
as every list of options is: that is where a failing call is led back to."""


class Choices:
    """Where a call's choices come from.

    Args:
        byte: the next random byte.
    """

    def __init__(self, byte: Callable[[], int]) -> None:
        self._byte = byte

    def of(self, *options: T) -> T:
        """One of the options, the simplest of which is the first."""
        return options[self._byte() * len(options) >> 8]

    def size(self, high: int = 1024) -> int:
        """A size of at least 1."""
        return self.of(*(size for size in SIZES if size <= max(high, 1)))

    def shape(self, rank: int, *, last: int | None = None, elements: int = ELEMENTS) -> list[int]:
        """Sizes of so many dims, of about so many elements together; one in 16 shapes is empty."""
        shape = [self.size(min(elements, 1024)) if last is None else last][:rank]
        while len(shape) < rank:
            shape.insert(0, self.size(elements // math.prod(shape)))
        if rank > 1 and self._byte() >= 240:
            shape[0] = 0
        return shape

    def values(self, draw: Draw, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Float values of one kind: normal, of many magnitudes, far from 0, mostly 0, whole ..."""
        normal = draw.normal(*shape, dtype=torch.float32)
        kind = self.of("normal", "whole", "wide", "shifted", "zeros", "large", "small", "equal")
        if kind == "whole":
            normal = normal.mul(2.0).round()
        elif kind == "wide":
            normal = normal.sign() * torch.exp2((4.0 * normal).clamp(-12.0, 12.0))
        elif kind == "shifted":
            normal = normal + 10.0
        elif kind == "zeros":
            normal = normal * (normal > 0.7)  # zeros of both signs
        elif kind in ("large", "small"):
            normal = normal * 2.0 ** (4 if kind == "large" else -6)
        elif kind == "equal":
            normal = torch.full_like(normal, 1.5)
        return normal.to(dtype or draw.dtype)


_SETTINGS = hypothesis.settings(
    database=None,
    deadline=None,
    derandomize=False,
    phases=[Phase.generate, Phase.shrink],
    print_blob=False,
    report_multiple_bugs=False,
    suppress_health_check=[
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
        HealthCheck.too_slow,
        HealthCheck.large_base_example,
        HealthCheck.differing_executors,
        HealthCheck.nested_given,
    ],
    verbosity=Verbosity.quiet,
)


class _Failure:
    """The simplest failing choices so far, and how many were tried since the first ones."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.error: Exception | None = None
        self.tried = 0

    def take(self, bytes: list[int], error: Exception) -> None:
        """Keeps failing choices that are simpler: fewer of them, or with an earlier option."""
        if self.error is None or (len(bytes), bytes) < (len(self.bytes), self.bytes):
            self.bytes, self.error = bytes, error


class _EnoughError(BaseException):
    """Ends a search; hypothesis lets no other way out of one."""


def search(check: Callable[[Choices], None], *, examples: int, seed: int) -> None:
    """Runs a check on random choices; what it raises for the simplest failing ones is raised.

    Args:
        check: raises when the answer is wrong; the same choices give the same answer.
        examples: so many at most; fewer when there are no more.
        seed: the same seed gives the same choices.
    """
    failure = _Failure()

    def run(data: strategies.DataObject) -> None:
        used: list[int] = []
        block: list[int] = []

        def byte() -> int:
            if not block:
                block.extend(reversed(data.draw(_BLOCK)))
            used.append(block.pop())
            return used[-1]

        failure.tried += failure.error is not None
        if failure.tried > SIMPLER:
            raise _EnoughError
        try:
            check(Choices(byte))
        except Exception as error:
            failure.take(used, error)
            raise

    searched = hypothesis.settings(_SETTINGS, max_examples=examples)(
        hypothesis.given(strategies.data())(run)
    )
    try:
        hypothesis.seed(seed)(searched)()
    except (Exception, _EnoughError):
        if failure.error is None:
            raise
        again = iter(failure.bytes)
        check(Choices(lambda: next(again)))
        raise failure.error from None  # it passed this time
