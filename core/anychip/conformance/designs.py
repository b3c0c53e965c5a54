"""Designs: which calls of an operator are made, so that any two of its factors meet at all levels.

The factors are those of the operator's arguments (:mod:`.oracles.drawn`), and those of every call:
where each argument lies, whether two arguments share memory, from where the call comes; of
gradients, where that of the output lies, and which are asked for. At level quick any two levels of
two factors meet in some call, at level full any three of three.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from anychip.conformance.bounds import Measurement
from anychip.conformance.calling_rules import alike, can_lie, fill_free_blocks
from anychip.conformance.calls import (
    READ_ONLY_LAYOUTS,
    Call,
    Draw,
    Layout,
    PlacedCall,
    stream,
    tensors_of,
)
from anychip.conformance.case import Case, CheckFailedError, Context
from anychip.conformance.choices import Choices, Masks, factors
from anychip.conformance.covering import NONE, Coverage, covering_array
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import oracle_of
from anychip.conformance.oracles.drawn import drawn_of
from anychip.conformance.surroundings import in_backward, in_thread
from anychip.conformance.trial import AnyOperator, Subject, Trial
from anychip.contract import UnsupportedError
from anychip.dispatch.operator import registered

T = TypeVar("T")
AnyTrial = TypeVar("AnyTrial", bound=Trial)
LevelPair = tuple[tuple[str, int], tuple[str, int]]
"""Two factors, each with a level."""
STRENGTH = {"quick": 2, "full": 3}
FIRST = 2
"""So often the simplest row comes before all: a third call of all, or an eighth, is a plain one."""
FAILURES = 8
"""So many calls that fail are enough to see what they have in common."""
PLACES: Mapping[str, tuple[Layout, ...]] = {
    "contiguous": ("contiguous", "first"),
    "misaligned": ("offset",),
    "strided": ("strided",),
    "with gaps": ("padded", "gapped"),
    "in another order": ("transposed", "swapped"),
    "with equal numbers": ("expanded",),
    "with equal numbers in a row": ("repeated",),
}
"""Where a tensor may lie; what its dims do not allow is contiguous."""
OF_LISTS: Mapping[str, tuple[Layout, ...]] = {
    **{name: PLACES[name] for name in ("contiguous", "misaligned", "strided", "in another order")},
    "with gaps": ("padded",),
    "in one storage": ("shared",),
    "in one storage, backwards": ("shared-backwards",),
}
FREE = {"NaN": 0xFF, "large numbers": 0x7B}
"""What lies in free memory: in every format a number that a result must not be made of."""
INFERENCE, IN_BACKWARD = "inference mode", "a backward pass, as of a checkpoint"
TWO = "two arguments are"
SIDE_STREAM, AND_THREAD = "a side stream", "a side stream in a second thread"
CALLERS = (
    "here", *(f"here, with {what} in free memory" for what in FREE), "a second thread", INFERENCE,
    SIDE_STREAM, AND_THREAD, IN_BACKWARD,
)  # fmt: skip
Between = Literal["nothing", "elsewhere", "in the same memory"]
BETWEEN: tuple[Between, ...] = "nothing", "elsewhere", "nothing", "in the same memory"
"""What comes between a call and the same one again: one with other numbers, and where they lie."""


class DesignRow(NamedTuple):
    """A point that is asked: arguments of :class:`.choices.Choices`, where they are explained."""

    levels: Mapping[str, int]
    seed: int
    places: Mapping[str, int]


class Design(NamedTuple):
    """Rows over factors.

    Attributes:
        factors: with their numbers of levels.
        rows: levels by factor; a factor that is not there is one the others rule out.
        strength: of how many factors all combinations of levels occur that can.
        without: by factor and level, the factors that it rules out.
    """

    factors: Mapping[str, int]
    rows: tuple[Mapping[str, int], ...]
    strength: int
    without: Masks

    def asked_rows(self) -> Iterator[DesignRow]:
        """Every row that is asked, the simplest one some times more."""
        seen: Counter[tuple[str, int]] = Counter()
        for number, row in enumerate((*self.rows[:1] * FIRST, *self.rows)):
            levels = [(factor, row.get(factor, 0)) for factor in self.factors]
            yield DesignRow(row, number, {factor: seen[factor, level] for factor, level in levels})
            seen.update(levels)

    def lost_rows(self, had: Sequence[Mapping[str, int]], sizes: Set[str]) -> Iterator[DesignRow]:
        """After the planned rows, a row for each pair of levels that none of them could have.

        All else in it is simplest. Left out are sizes, which are large one at a time, and of one
        tensor what it holds and where it lies: most of these rule each other out.

        Args:
            had: the levels that each call had; whoever makes a call adds its own.
            sizes: factors.
        """
        met = set().union(*map(_pairs, had))
        known = {level for pair in met for level in pair if level[0] not in sizes}
        every = set().union(*map(_pairs, self.rows))
        lost = sorted(pair for pair in every - met if known.issuperset(pair))
        for pair in lost:
            if pair not in met and pair[1][0] != f"{pair[0][0]} lies":
                yield DesignRow(self._completed(dict(pair)), len(had), {})
                met |= _pairs(had[-1])

    def _completed(self, row: Mapping[str, int]) -> Mapping[str, int]:
        """With the simplest levels of other factors that rule none of the row's out."""
        rest = {}
        for factor, count in self.factors.items():
            ruled_out = (self.without.get((factor, level), ()) for level in range(count))
            rest[factor] = [row.keys().isdisjoint(out) for out in ruled_out].index(True)
        return {**rest, **row}

    def asked(self) -> NDArray[np.float64]:
        """(factors, factors) of the pairs of levels, or levels, that can be, the part in a row."""
        names = list(self.factors)
        rows = np.array([[row.get(name, NONE) for name in names] for row in self.rows])
        found = np.ones((len(names), len(names)))
        for i, j in itertools.product(range(len(names)), repeat=2):
            both = rows[:, [i, j]]
            pairs = {tuple(pair) for pair in both[(both != NONE).all(1)].tolist()}
            found[i, j] = len(pairs) / max(self._possible(names[i], names[j]), 1)
        return found.clip(max=1.0)  # a call can have what no point that was tried had

    def _possible(self, first: str, second: str) -> int:
        """How many pairs of levels of two factors can be, or levels of one."""
        if first == second:
            return self.factors[first]
        levels = [
            sum(b not in self.without.get((a, level), ()) for level in range(self.factors[a]))
            for a, b in ((first, second), (second, first))
        ]
        return math.prod(levels)


def _pairs(row: Mapping[str, int]) -> set[LevelPair]:
    return set(itertools.combinations(sorted(row.items()), 2))


class DesignedCall(NamedTuple):
    """A call of a design.

    Attributes:
        caller: from where it is made; one of CALLERS.
        change: makes the outputs' gradients of normal numbers.
        gradient: how they lie.
        asked: which gradients are asked for, of the names of all that there are.
        between: what comes before the call is made again.
    """

    dtype: torch.dtype
    call: Call
    caller: str
    change: Callable[[Tensor], Tensor] = torch.clone
    gradient: Layout = "contiguous"
    asked: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple
    between: Between = "elsewhere"


class Asked(NamedTuple):
    """An operator, and what a chapter asks about it.

    Attributes:
        dtypes: in which it is called.
        check: ``check(context, of, row)`` raises when the answer is wrong.
    """

    operator: AnyOperator
    dtypes: tuple[torch.dtype, ...]
    chapter: str
    check: Callable[[Context, Subject, DesignedCall], None]

    @property
    def of_gradients(self) -> bool:
        return self.chapter == "gradients"

    def of(self, row: DesignedCall) -> Subject:
        """What a row asks about."""
        return Subject(self.operator, oracle_of(self.operator.spec), row.dtype)

    def choices(self, point: DesignRow) -> Choices:
        """Of a row."""
        return Choices(*point, of_gradients=self.of_gradients)

    def row(self, choose: Choices, seed: int) -> DesignedCall:
        """Asks for every factor of a call, and makes its arguments."""
        name, signature = self.operator.spec.name, self.operator.signature
        dtype = choose.of("dtype", *self.dtypes)
        draw = Draw(dtype, f"{self.chapter}/{name}/{choose.seed}", seed)
        args, attrs = signature.bind(*drawn_of(self.operator.spec)(choose, draw))
        layout: Mapping[str, Layout] = {
            n: _place(choose, n, arg, written=index in signature.written)
            for index, (n, arg) in enumerate(zip(signature.positional, args, strict=True))
            if (isinstance(arg, Tensor) and arg.dim()) or (isinstance(arg, list) and arg)
        }
        if self.of_gradients:
            change = choose.change("the outputs' gradients are", draw)
        args, layout = _together(choose, self.operator, args, layout)
        is_random = choose.is_random and not set(layout.values()) & set(READ_ONLY_LAYOUTS)
        is_random = is_random and oracle_of(self.operator.spec).independent
        is_random = is_random and choose.chosen.get(TWO) != "one tensor"
        call = Call(
            "design",
            lambda _: (args, dict(attrs)),
            layout=layout,
            statistical=is_random,
            gradient=choose.is_finite,
        )
        between = BETWEEN[choose.turn("between") % len(BETWEEN)]
        if not self.of_gradients:
            return DesignedCall(dtype, call, choose.of("called from", *CALLERS), between=between)
        callers = [caller for caller in CALLERS if caller != INFERENCE]
        caller = choose.of("called from", *callers)
        gradient = choose.member("the output's gradient lies", PLACES)
        several = len(self.operator.spec.differentiable) > 1
        asked = choose.of("gradients asked for", *_ASKED) if several else "all"
        some = partial(_ASKED[asked], choose.turn("which gradient"))
        return DesignedCall(dtype, call, caller, change, gradient, some, between)

    def design(self, strength: int, seed: int) -> Design:
        """The design of the operator's calls; another seed turns it."""
        return _design(self, strength, seed)


_ASKED: Mapping[str, Callable[[int, tuple[str, ...]], tuple[str, ...]]] = {
    "all": lambda turn, names: names,
    "one": lambda turn, names: names[turn % len(names) :][:1],
    "all but one": lambda turn, names: tuple(
        name for index, name in enumerate(names) if index != turn % len(names) or len(names) == 1
    ),
}
"""Which gradients are asked for, of those that there are."""


def _together(
    choose: Choices, operator: AnyOperator, args: tuple[Any, ...], layout: Mapping[str, Layout]
) -> tuple[tuple[Any, ...], Mapping[str, Layout]]:
    """Two arguments that could be one tensor are, or are parts of one; so of a list's tensors."""
    written = operator.signature.written
    if len(args) == 1 and isinstance(args[0], list) and args[0] and not written:
        again = args[0][: choose.of("tensors that come twice", 0, 1)]
        return ([*args[0], *again],), layout
    pairs = alike(args, written)
    if not pairs:
        return args, layout
    first, second = pairs[0]
    how = choose.of(TWO, "apart", "one tensor", "parts of one")
    if how == "one tensor":
        args = (*args[:second], args[first], *args[second + 1 :])
    elif how == "parts of one":
        names = (operator.signature.positional[index] for index in (first, second))
        layout = {**layout, **dict.fromkeys(names, "packed")}
    return args, layout


@cache
def _design(asked: Asked, strength: int, seed: int) -> Design:
    run = partial(asked.row, seed=seed)
    found, masks = factors(run, of_gradients=asked.of_gradients)
    names = list(found)
    without = {
        (names.index(factor), level): [names.index(other) for other in others]
        for (factor, level), others in masks.items()
    }
    turn = stream(f"{asked.chapter}/{asked.operator.spec.name}", seed)
    rows = covering_array(list(found.values()), strength, turn, without)
    named = (zip(names, row, strict=True) for row in rows.tolist())
    return Design(
        found, tuple({n: v for n, v in row if v != NONE} for row in named), strength, masks
    )


def _place(choose: Choices, name: str, arg: Any, *, written: bool) -> Layout:
    is_flat = isinstance(arg, Tensor) and arg.dim() == 1
    may_be_equal = choose.chosen.get(name, "normal") in ("normal", "repeated")

    def fits(place: Layout) -> bool:
        is_equal = place in READ_ONLY_LAYOUTS and (place == "repeated" or is_flat)
        # Of equal numbers far from 1 the variance is nothing but rounding.
        return (may_be_equal or not is_equal) and can_lie(arg, place, written=written)

    places = OF_LISTS if isinstance(arg, list) else PLACES
    return choose.member(f"{name} lies", places, fits, "contiguous")


class _Failed(NamedTuple):
    at: DesignRow
    chosen: Mapping[str, object]
    error: Exception


def cases(
    chapter: str, context: Context, check: Callable[[Context, Subject, DesignedCall], None]
) -> Iterator[Case]:
    """A case per operator of ours.

    Args:
        check: raises when the answer is wrong.
    """
    for name, operator in registered().items():
        spec = operator.spec
        if chapter == "gradients" and not spec.differentiable:
            continue
        if not oracle_of(spec).plain:
            continue  # without a sample nobody knows how it is called
        dtypes = tuple(context.dtypes_of(spec))
        asked = Asked(operator, dtypes, chapter, check)
        if dtypes:
            yield Case(id=f"{chapter}/{name}/design", run=partial(ask, asked=asked))


def coverage(asked: Asked, plan: Design) -> Coverage:
    """What a design asks, for the report; or its rows with the levels that calls have had."""
    return Coverage(
        operator=f"{asked.chapter}/{asked.operator.spec.name}",
        factors=tuple(plan.factors),
        levels=tuple(plan.factors.values()),
        rows=len(plan.rows),
        strength=plan.strength,
        asked=tuple(tuple(round(part, 4) for part in row) for row in plan.asked().tolist()),
    )


def ask(context: Context, asked: Asked) -> None:
    """Makes every call of the design; of their errors the largest stays.

    Raises:
        CheckFailedError: of the simplest failing call that was found, with what the failing ones
            have in common.
        UnsupportedError: as the backend raised it.
    """
    strength = STRENGTH[context.level]
    plan = asked.design(strength, context.seed)
    kept, sizes, had = context.measurements, set[str](), list[Mapping[str, int]]()

    def tried(at: DesignRow) -> _Failed | None:
        context.measurements = []
        choose = asked.choices(at)
        row = asked.row(choose, context.seed)
        is_aside = row.caller in (SIDE_STREAM, AND_THREAD)
        if is_aside and "streams" not in context.backend.capabilities:
            choose.refused.add("called from")
        sizes.update(choose.sizes)
        had.append({f: at.levels.get(f, 0) for f in choose.asked.keys() - choose.refused})
        try:
            _from(context, row.caller, lambda: asked.check(context, asked.of(row), row))
        except UnsupportedError:
            raise
        except Exception as error:
            return _Failed(at, choose.chosen, error)
        kept[:] = _largest([*kept, *context.measurements])
        return None

    failed: list[_Failed] = []
    for at in itertools.chain(plan.asked_rows(), plan.lost_rows(had, sizes)):
        found = tried(at)
        failed += [] if found is None else [found]
        if len(failed) == FAILURES:
            break
    if failed:
        simplest = _simplest(failed[0], plan, tried)
        story = _story(simplest, failed, at.seed + 1, plan)
        context.measurements = _largest([*kept, *context.measurements])
        text = str(simplest.error)
        if not isinstance(simplest.error, CheckFailedError):
            text = f"{type(simplest.error).__name__}: {text}"
        raise CheckFailedError(f"{text}\n{story}") from simplest.error
    context.measurements = kept
    context.coverage = coverage(asked, plan._replace(rows=tuple(had)))


def _from(context: Context, caller: str, check: Callable[[], None]) -> None:
    """Asks from somewhere; of streams :func:`stream_of`."""
    for what, pattern in FREE.items():
        if caller == f"here, with {what} in free memory":
            fill_free_blocks(context, [64 << power for power in range(12)], pattern)
    if caller == IN_BACKWARD:
        in_backward(context.device, check)
    elif caller in ("a second thread", AND_THREAD):
        in_thread(check)
    elif caller == INFERENCE:
        with torch.inference_mode():
            check()
    else:
        check()


def with_other_numbers(trial: AnyTrial, context: Context, row: DesignedCall) -> AnyTrial | None:
    """The same call with other numbers, made in between: its results must not come again.

    None in every second row at level quick.
    """
    if context.level == "quick" and row.between == "nothing":
        return None
    (args, attrs), written = trial.arguments, trial.written
    others = tuple(_moved(a) if i not in written else a for i, a in enumerate(args))
    call = Call(trial.call.label, lambda _: (others, attrs), layout=trial.call.layout)
    return type(trial)(trial.operator, call, trial.dtype)


def between(
    run: Callable[[PlacedCall], T],
    placed: PlacedCall,
    other: Trial,
    context: Context,
    row: DesignedCall,
) -> Callable[[], T]:
    """Runs another call, on arguments of its own or in the memory of a placed call's.

    Its own numbers come back afterwards: nothing may be kept by address, shape or strides.
    """
    layouts = set(cast("Mapping[str, Layout]", row.call.layout).values())
    if row.between != "in the same memory" or other.written or layouts & set(READ_ONLY_LAYOUTS):
        described = context.call
        elsewhere = other.place(context)
        context.call = described
        return lambda: run(elsewhere)
    tensors, others = list(tensors_of(placed.args)), list(tensors_of(other.arguments[0]))

    def run_in_place() -> T:
        kept = [tensor.detach().clone() for tensor in tensors]
        _fill(tensors, others)
        found = run(placed)
        _fill(tensors, kept)
        return found

    return run_in_place


def _fill(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)


def _moved(arg: Any) -> Any:
    """The numbers of float tensors in another order, and of other signs."""
    if isinstance(arg, (list, tuple)):
        return [_moved(entry) for entry in arg]
    if not isinstance(arg, Tensor) or arg.dtype not in FORMATS:
        return arg  # of types with 8 bits torch turns no sign
    return -arg.flatten().flip(0).view(arg.shape)


@contextmanager
def stream_of(context: Context, caller: str) -> Iterator[None]:
    """On what stream the call runs; the tensors are there before, and the results after it."""
    backend = context.backend
    if caller not in (SIDE_STREAM, AND_THREAD) or "streams" not in backend.capabilities:
        yield
        return
    backend.synchronize()
    with backend.use_stream(backend.stream()):
        yield
        backend.synchronize()


def _simplest(
    failed: _Failed, plan: Design, tried: Callable[[DesignRow], _Failed | None]
) -> _Failed:
    """The failing call with as many factors at their first level as still fail."""
    for factor in plan.factors:
        if failed.at.levels.get(factor):
            levels = {name: level for name, level in failed.at.levels.items() if name != factor}
            failed = tried(failed.at._replace(levels=levels)) or failed
    return tried(failed.at) or failed


def _story(simplest: _Failed, failed: Sequence[_Failed], asked: int, plan: Design) -> str:
    """What it takes to fail, and what the calls that failed have in common."""
    needed = [
        f"{factor} {simplest.chosen[factor]}"
        for factor, level in simplest.at.levels.items()
        if level and factor in simplest.chosen
    ]
    counts = Counter(item for one in failed for item in one.at.levels.items() if item[1])
    common = [f"{f} {failed[0].chosen[f]}" for (f, _), n in counts.items() if n == len(failed)]
    lines = [f"{len(failed)} of {asked} calls of a design of strength {plan.strength} failed"]
    lines.append(f"  it takes: {', '.join(needed) or 'nothing in particular'}")
    if len(failed) > 1:
        lines.append(f"  in all of them: {', '.join(common) or 'nothing in common'}")
    return "\n".join(lines)


def _largest(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Of each result in each format the one with the largest error."""
    found: dict[tuple[str, str], Measurement] = {}
    for one in measurements:
        key = one.name.split("[")[0], one.format
        if key not in found or one.max > found[key].max:
            found[key] = one
    return list(found.values())
