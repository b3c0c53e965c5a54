"""What a case is, what it may use, and how it says that something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from anychip.conformance.arithmetic import Rounded
from anychip.conformance.bounds import NOTHING, Known, Measurement, measure
from anychip.conformance.covering import Coverage
from anychip.conformance.formats import FORMATS
from anychip.contract import Backend, OperatorSpec, UnsupportedError

Level = Literal["quick", "full"]
LEVELS: tuple[Level, ...] = ("quick", "full")


class CheckFailedError(AssertionError):
    """The backend does not do what the contract says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One question to a backend.

    Attributes:
        id: ``chapter/subject/...``; letters, digits and ``_ . : + - /`` only, so that it can be a
            word of a ``-k`` expression.
        run: asks it; raises CheckFailedError, or any other exception, when the answer is wrong.
        capability: without this capability of the backend the case does not apply.
        devices: so many have to be there.
        full: only at level full.
        elsewhere: other processes do the work: it may be asked by a thread, next to other cases.
        start: called once when a run begins, for what takes long to start and costs little to have.
    """

    id: str
    run: Callable[[Context], None]
    capability: str | None = None
    devices: int = 1
    full: bool = False
    elsewhere: bool = False
    start: Callable[[], None] | None = None

    @property
    def chapter(self) -> str:
        """The first part of the id."""
        return self.id.partition("/")[0]


class Curve(NamedTuple):
    """A training's losses next to what they are compared with; one number per step but for two.

    Attributes:
        losses: the candidate's.
        exact: float64's.
        spread: of float32 runs around it, in the losses' unit.
        deviation: of the candidate, in units of the spread.
        limit: of the deviation.
    """

    losses: tuple[float, ...]
    exact: tuple[float, ...]
    spread: tuple[float, ...]
    deviation: float
    limit: float


Told = str | Callable[[], str | None] | None
"""A sentence, or what makes it, where few of many are ever read."""


@dataclass
class Context:
    """What a case is given, and what it leaves for the report.

    Attributes:
        backend: the backend under test.
        level: quick or full.
        seed: of all random inputs; 0 unless the run names another.
        call: the operator call at hand, in one line, or what tells it; shown when the case fails.
        served_by: which implementation served the call, or what tells it.
        measurements: distributions of errors.
        known: of errors that are no larger than these nobody asks how they are distributed.
        note: what a passed case found that a reader would want to know.
        curve: of a training.
        coverage: of a design.
    """

    backend: Backend
    level: Level = "quick"
    seed: int = 0
    call: Told = None
    served_by: Told = None
    measurements: list[Measurement] = field(default_factory=list)
    known: Known = field(default_factory=lambda: NOTHING)
    note: str = ""
    curve: Curve | None = None
    coverage: Coverage | None = None

    @staticmethod
    def told(sentence: Told) -> str | None:
        """``call`` or ``served_by`` as a sentence."""
        return sentence() if callable(sentence) else sentence

    @cached_property
    def device(self) -> torch.device:
        """The current device."""
        return self.backend.device()

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Float types that the backend says it computes in, of those that operators take."""
        claimed = self.backend.properties().dtypes
        return tuple(dtype for dtype in FORMATS if dtype in claimed)

    def dtypes_of(self, spec: OperatorSpec) -> dict[torch.dtype, bool]:
        """Those of them that an operator takes, and whether bfloat16 stands for one.

        It does for float16, of the same width, if both are there: at level quick, for all that does
        not depend on what numbers a type has.
        """
        taken = [d for d in self.dtypes if str(d).removeprefix("torch.") in spec.free_dtypes]
        return {d: d == torch.float16 and torch.bfloat16 in taken for d in taken}

    def compare(
        self, name: str, got: torch.Tensor, want: Rounded, *, statistical: bool = True
    ) -> None:
        """Measures a result against the oracle's, for the report.

        Raises:
            CheckFailedError: it is outside the bound.
        """
        with np.errstate(all="ignore"):
            measurement = measure(name, got, want, statistical=statistical, known=self.known)
        self.measurements.append(measurement)
        check(measurement.failure is None, f"{name}: {measurement.failure}")


def check(condition: object, message: str) -> None:
    """Raises CheckFailedError unless the condition holds."""
    if not condition:
        raise CheckFailedError(message)


def check_equal_bits(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Checks that two tensors have one shape, one dtype and the same bits, also in NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:  # words take longer than to look
        check(got.dtype == want.dtype, f"{name}: {want.dtype} expected, got {got.dtype}")
        check(False, f"{name}: shape {tuple(want.shape)}, got {tuple(got.shape)}")
    # A bool has more than two bytes, of which torch makes 1 or 0 at some copies, and not at others.
    left, right = (bits_of(t.clone() if t.dtype == torch.bool else t) for t in (got, want))
    if not torch.equal(left, right):
        place = (left != right).nonzero()[0, : got.dim()].tolist()
        here, there = (tensor.detach().cpu()[tuple(place)].item() for tensor in (got, want))
        raise CheckFailedError(
            f"{name}: the bits differ, first at {place}: {here:.9g} and {there:.9g}"
        )


def check_same_bits(
    names: Sequence[str], got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], note: str = ""
) -> None:
    """Checks that tensors, by name, have the same bits."""
    for name, left, right in zip(names, got, want, strict=True):
        check_equal_bits(f"{name}{note}", left, right)


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Whole numbers with a tensor's bits, on the host: its own memory where it is there."""
    host = tensor.detach().cpu()
    host = torch.view_as_real(host) if host.is_complex() else host
    return host.view(_BITS[host.dtype.itemsize])


def expect_error(
    types: type[BaseException] | tuple[type[BaseException], ...],
    what: str,
    call: Callable[..., Any],
    *args: Any,
    mentions: tuple[str, ...] = (),
    **named: Any,
) -> BaseException:
    """Checks that ``call(*args, **named)`` raises one of the types.

    Args:
        what: names the call in the failure's text.
        mentions: words that the error's message has to have.
    """
    listed = types if isinstance(types, tuple) else (types,)
    names = " or ".join(kind.__name__ for kind in listed)
    try:
        result = call(*args, **named)
    except listed as error:
        missing = [word for word in mentions if word not in str(error)]
        check(
            not missing, f"{what}: the message of {type(error).__name__} lacks {missing}: {error}"
        )
        return error
    except Exception as error:
        raise CheckFailedError(
            f"{what}: {names} expected, got {type(error).__name__}: {error}"
        ) from error
    raise CheckFailedError(f"{what}: {names} expected, but it returned {result!r}")


def undeclared_capability(error: UnsupportedError, backend: Backend) -> str | None:
    """The capability that an UnsupportedError names, if the backend does not declare it."""
    for name in Backend.capabilities:
        if f"'{name}'" in str(error) and name not in backend.capabilities:
            return name
    return None


Cases = Callable[[Context], Iterator[Case]]
"""A chapter: gives its cases for a backend; asks nothing yet."""
