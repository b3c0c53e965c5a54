"""Designs: which calls of an operator are made, so that any two of its factors meet at all levels.

The factors are those of the operator's arguments (:mod:`.oracles.drawn`), and those of every call:
where each argument lies, whether two arguments share memory, from where the call comes; of
gradients, where that of the output lies, and which are asked for. At level quick any two levels of
two factors meet in some call, at level full any three of three.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from anychip.conformance.bounds import NOTHING, Measurement
from anychip.conformance.calling_rules import alike, can_lie, fill_free_blocks
from anychip.conformance.calls import (
    READ_ONLY_LAYOUTS,
    Call,
    Draw,
    Layout,
    Layouts,
    PlacedCall,
    stream,
    tensors_of,
)
from anychip.conformance.case import Case, CheckFailedError, Context, check_same_bits
from anychip.conformance.choices import ENDS, NOT_FINITE, Choices
from anychip.conformance.covering import FEW, Coverage, CoveringArray
from anychip.conformance.formats import FORMATS
from anychip.conformance.oracles import oracle_of
from anychip.conformance.oracles.drawn import drawn_of
from anychip.conformance.surroundings import in_backward, in_thread
from anychip.conformance.trial import AnyOperator, Subject, Trial
from anychip.contract import UnsupportedError
from anychip.dispatch.operator import registered

T = TypeVar("T")
AnyTrial = TypeVar("AnyTrial", bound=Trial)
STRENGTH = {"quick": 2, "full": 3}
FAILURES = 8
"""So many calls that fail are enough to see what they have in common."""
PLACES: Mapping[str, tuple[Layout, ...]] = {
    "contiguous": ("contiguous", "first"),
    "misaligned": ("offset",),
    "strided": ("strided",),
    "with gaps": ("padded", "gapped"),
    # Swapped as often as both others: so lies a sequence of batches.
    "in another order": ("transposed", "swapped", "channels last", "swapped"),
    "with equal numbers": ("expanded",),
    "with equal numbers in a row": ("repeated",),
}
"""Where a tensor may lie; what its dims do not allow is contiguous."""
OF_CHANNELS: Mapping[str, tuple[Layout, ...]] = {
    **PLACES, "in another order": ("swapped", "transposed"), "channels last": ("channels last",),
}  # fmt: skip
"""Where operators have channels, which are often innermost."""
OF_LISTS: Mapping[str, tuple[Layout, ...]] = {
    **{at: PLACES[at] for at in ("contiguous", "misaligned", "strided", "with equal numbers")},
    "in another order": ("transposed",),
    "with gaps": ("padded",),
    "in one storage": ("shared",),
    "in one storage, backwards": ("shared-backwards",),
}
FREE = {"NaN": 0xFF, "large numbers": 0x7B}
"""What lies in free memory: in every format a number that a result must not be made of."""
INFERENCE, IN_BACKWARD = "inference mode", "a backward pass, as of a checkpoint"
TWO, LIES = "two arguments are", " lies"
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


def _here(call: Callable[[], T]) -> T:
    return call()


class DesignedCall(NamedTuple):
    """A call of a design.

    Attributes:
        caller: from where it is made; one of CALLERS.
        change: makes the outputs' gradients of normal numbers.
        gradient: how they lie.
        asked: which gradients are asked for, of the names of all that there are.
        between: what comes before the call is made again.
        again: makes a call from where it is made again.
        turn: says which argument stays as it is in between, and which outputs' gradients lie so.
    """

    dtype: torch.dtype
    call: Call
    caller: str
    change: Callable[[Tensor], Tensor] = torch.clone
    gradient: Layout = "contiguous"
    asked: Callable[[tuple[str, ...]], tuple[str, ...]] = tuple
    between: Between = "elsewhere"
    again: Callable[[Callable[[], Any]], Any] = _here
    turn: int = 0

    def gradient_layouts(self, count: int) -> list[Layout]:
        """How so many outputs' gradients lie: all alike, or the first, or the others."""
        is_alike, of_first = count == 1 or self.turn % 3 == 0, self.turn % 3 == 1
        other: Layout = self.gradient if is_alike else "contiguous"
        return [self.gradient if (n == 0) == of_first else other for n in range(count)]


class Asked(NamedTuple):
    """An operator, and what a chapter asks about it.

    Attributes:
        dtypes: in which it is called.
        check: ``check(context, of, row)`` raises when the answer is wrong.
        streams: calls come from streams too.
    """

    operator: AnyOperator
    dtypes: tuple[torch.dtype, ...]
    chapter: str
    check: Callable[[Context, Subject, DesignedCall], None]
    streams: bool = False

    @property
    def of_gradients(self) -> bool:
        return self.chapter == "gradients"

    def of(self, row: DesignedCall) -> Subject:
        """What a row asks about."""
        return Subject(self.operator, oracle_of(self.operator.spec), row.dtype)

    def row(self, choose: Choices, seed: int) -> DesignedCall:
        """Asks for every factor of a call, and makes its arguments."""
        name, signature = self.operator.spec.name, self.operator.signature
        dtype = choose.of("dtype", *self.dtypes)
        draw = Draw(dtype, f"{self.chapter}/{name}/{choose.seed}", seed)
        args, attrs = signature.bind(*drawn_of(self.operator.spec)(choose, draw))
        args, parts = _together(choose, self.operator, args)
        layout, known = dict[str, Layout](), dict[int, Layout]()
        for index, (n, arg) in enumerate(zip(signature.positional, args, strict=True)):
            if (isinstance(arg, Tensor) and arg.dim()) or (isinstance(arg, list) and arg):
                where = "packed" if index in parts else known.get(id(arg))
                layout[n] = where or _place(choose, n, arg, written=index in signature.written)
                known[id(arg)] = layout[n]
        if self.of_gradients:
            change = choose.change("the outputs' gradients are", draw)
        is_apart = choose.chosen.get(TWO) != "one tensor"
        is_random = choose.is_random and not set(layout.values()) & set(READ_ONLY_LAYOUTS)
        call = Call(
            "design",
            lambda _: (args, dict(attrs)),
            layout=layout,
            statistical=is_random and is_apart and oracle_of(self.operator.spec).independent,
            gradient=choose.is_finite,
            leaves_open=choose.leaves_open,
        )
        between, turn = BETWEEN[choose.turn("between") % len(BETWEEN)], choose.turn("of several")
        aside = () if self.streams else (SIDE_STREAM, AND_THREAD)
        out = (*aside, INFERENCE) if self.of_gradients else aside
        caller = choose.of("called from", *(caller for caller in CALLERS if caller not in out))
        # Of any two options some call is made again in another thread, whatever the third is.
        again = in_thread if caller.startswith("here") and choose.turn("again") % 2 else _here
        if not self.of_gradients:
            return DesignedCall(dtype, call, caller, between=between, again=again, turn=turn)
        gradient = choose.member("the output's gradient lies", _places(choose))
        several = len(self.operator.spec.differentiable) > 1
        asked = choose.of("gradients asked for", *_ASKED) if several else "all"
        some = partial(_ASKED[asked], choose.turn("which gradient"))
        return DesignedCall(dtype, call, caller, change, gradient, some, between, again, turn)

    def at(self, point: DesignRow, seed: int) -> tuple[Mapping[str, object], DesignedCall]:
        """The call of a point, and its levels for people."""
        choose = Choices(*point, of_gradients=self.of_gradients)
        return choose.chosen, self.row(choose, seed)

    def rows(
        self, array: CoveringArray, seed: int, context: Context | None = None
    ) -> Iterator[tuple[DesignRow, Mapping[str, object], DesignedCall]]:
        """The calls that it takes for an array to have all combinations of levels.

        What a call really has is noted: who is not asked for a level, or cannot have it, has not;
        and with a context, what serves it.
        """
        point = partial(Choices, of_gradients=self.of_gradients, choose=array.level)
        for number in itertools.takewhile(lambda _: array.begin(), itertools.count()):
            choose = point(array.row, number, array.places)
            row = self.row(choose, seed)
            if context is not None:
                self._notice(array, context, row)
            if array.end(choose.refused, choose.hiding):
                yield DesignRow(array.row, number, array.places), choose.chosen, row

    def _notice(self, array: CoveringArray, context: Context, row: DesignedCall) -> None:
        """A tensor that lies so that something else serves a call hides what others do."""
        apart = [factor for factor, level in array.row.items() if level]
        layout = cast("Mapping[str, Layout]", row.call.layout)
        lying = {f: name for f in apart if (name := f.removesuffix(LIES)) != f and name in layout}
        if not lying or len(apart) > FEW:
            return

        def served(layout: Layouts) -> str | None:
            trial = self.of(row).trial(replace(row.call, layout=layout), context)
            return trial.served_by(trial.place(context))

        plain = served("contiguous")
        for factor, name in lying.items():
            if (other := served({name: layout[name]})) != plain:
                array.hide(factor, str(other))


_ASKED: Mapping[str, Callable[[int, tuple[str, ...]], tuple[str, ...]]] = {
    "all": lambda turn, names: names,
    "one": lambda turn, names: names[turn % len(names) :][:1],
    "all but one": lambda turn, names: tuple(
        name for index, name in enumerate(names) if index != turn % len(names) or len(names) == 1
    ),
}
"""Which gradients are asked for, of those that there are."""


def _together(
    choose: Choices, operator: AnyOperator, args: tuple[Any, ...]
) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Two arguments that could be one tensor are, or are parts of one; so of a list's tensors.

    Returns:
        the arguments; and the places of those that are parts.
    """
    written = operator.signature.written
    if len(args) == 1 and isinstance(args[0], list) and args[0] and not written:
        # A list of one stays one.
        again = args[0][: choose.of("tensors that come twice", 0, 1, can=(True, len(args[0]) > 1))]
        return ([*args[0], *again],), ()
    pairs = alike(args, written)
    if not pairs:
        return args, ()
    first, second = pairs[0]
    # Of two arguments one may be as large, or not finite, as the other may not; in float16 both
    # gradients infinite, of opposite signs.
    far = {*ENDS, *NOT_FINITE, *(["wide"] if choose.chosen["dtype"] == torch.float16 else [])}
    is_near = not far & {*choose.chosen.values()}
    how = choose.of(TWO, "apart", "one tensor", "parts of one", can=(True, is_near, True))
    if how == "one tensor":
        args = (*args[:second], args[first], *args[second + 1 :])
        choose.refused.add(operator.signature.positional[second])
    return args, (first, second) if how == "parts of one" else ()


def _place(choose: Choices, name: str, arg: Any, *, written: bool) -> Layout:
    is_flat = isinstance(arg, Tensor) and arg.dim() == 1
    may_be_equal = choose.chosen.get(name, "normal") in ("normal", "repeated")

    def fits(place: Layout) -> bool:
        is_equal = place in READ_ONLY_LAYOUTS and (place == "repeated" or is_flat)
        # Of equal numbers far from 1 the variance is nothing but rounding.
        can_be = (may_be_equal or not is_equal) and can_lie(arg, place, written=written)
        return can_be or place == "contiguous"

    return choose.member(name + LIES, OF_LISTS if isinstance(arg, list) else _places(choose), fits)


def _places(choose: Choices) -> Mapping[str, tuple[Layout, ...]]:
    return OF_CHANNELS if choose.has_channels else PLACES


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
        streams = "streams" in context.backend.capabilities
        asked = Asked(operator, dtypes, chapter, check, streams)
        if dtypes:
            yield Case(id=f"{chapter}/{name}/design", run=partial(ask, asked=asked))


def ask(context: Context, asked: Asked) -> None:
    """Makes every call of the design; of their errors the largest stays.

    Raises:
        CheckFailedError: of the simplest failing call that was found, with what the failing ones
            have in common.
        UnsupportedError: as the backend raised it.
    """
    strength, name = STRENGTH[context.level], asked.operator.spec.name
    array = CoveringArray(strength, stream(f"{asked.chapter}/{name}", context.seed))
    kept, failed, count = context.measurements, list[_Failed](), 0

    def tried(at: DesignRow, chosen: Mapping[str, object], row: DesignedCall) -> _Failed | None:
        context.measurements, context.known = [], {one.of: one.max for one in kept}
        try:
            _from(context, row.caller, lambda: asked.check(context, asked.of(row), row))
        except UnsupportedError:
            raise
        except Exception as error:
            return _Failed(at, chosen, error)
        finally:
            context.known = NOTHING
        kept[:] = _largest([*kept, *context.measurements])
        return None

    for point in asked.rows(array, context.seed, context):
        count += 1
        failed += filter(None, [tried(*point)])
        if len(failed) == FAILURES:
            break
    if failed:
        simplest = _simplest(failed[0], lambda at: tried(at, *asked.at(at, context.seed)))
        story = _story(simplest, failed, count, strength)
        context.measurements = _largest([*kept, *context.measurements])
        is_said = isinstance(simplest.error, CheckFailedError)
        kind = "" if is_said else f"{type(simplest.error).__name__}: "
        raise CheckFailedError(f"{kind}{simplest.error}\n{story}") from simplest.error
    context.measurements = kept
    context.coverage = Coverage(
        operator=f"{asked.chapter}/{name}",
        factors=tuple(array.factors),
        levels=tuple(map(len, array.factors.values())),
        rows=count,
        strength=strength,
        asked=tuple(tuple(round(part, 4) for part in row) for row in array.asked()),
    )


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

    None in every second row at level quick. One argument may stay as it is, and what is made of it.
    """
    if context.level == "quick" and row.between == "nothing":
        return None
    (args, attrs), names = trial.arguments, trial.signature.positional
    stays = (*trial.written, _kept(trial, row))
    others = tuple(
        arg if index in stays else _moved(name, arg)
        for index, (name, arg) in enumerate(zip(names, args, strict=True))
    )
    call = Call(trial.call.label, lambda _: (others, attrs), layout=trial.call.layout)
    return type(trial)(trial.operator, call, trial.dtype)


def _kept(trial: Trial, row: DesignedCall) -> int | None:
    """An argument that stays as it is in between, of those that there are, or in turn none."""
    args, written = trial.arguments[0], trial.written
    read = [index for index, arg in enumerate(args) if index not in written and arg is not None]
    turns = [*read, None] if len(read) > 1 else [None]
    return turns[row.turn % len(turns)]


class OtherCall(NamedTuple):
    """Another call: ``run`` makes it, ``check`` says afterwards what it wrote and may not write."""

    run: Callable[[], Any] = tuple
    check: Callable[[], object] = tuple


def between(
    run: Callable[[PlacedCall], Any], placed: PlacedCall, other: Trial, context: Context,
    row: DesignedCall,
) -> OtherCall:  # fmt: skip
    """Another call, on arguments of its own or in the memory of a placed call's.

    Its own numbers come back afterwards: nothing may be kept by address, shape or strides.
    """
    layouts = set(cast("Mapping[str, Layout]", row.call.layout).values())
    kept, note = _kept(other, row), " of a call with other numbers"
    changed = [index for index in range(len(placed.args)) if index != kept]
    if row.between != "in the same memory" or layouts & set(READ_ONLY_LAYOUTS):
        described, elsewhere = context.call, other.place(context)
        context.call = described
        args = list(placed.args)
        for index in changed:
            args[index] = elsewhere.args[index]
        ours = replace(elsewhere, args=tuple(args))
        return OtherCall(partial(run, ours), partial(other.check_untouched, ours, note))
    changed = [*other.written, *(index for index in changed if index not in other.written)]
    tensors, others = (
        list(tensors_of([args[index] for index in changed]))
        for args in (placed.args, other.arguments[0])
    )
    read, left = len(list(tensors_of([placed.args[i] for i in other.written]))), list[Tensor]()

    def run_in_place() -> Any:
        kept = [tensor.detach().clone() for tensor in tensors]
        _fill(tensors, others)
        found = run(placed)
        left[:] = [tensor.detach().clone() for tensor in tensors[read:]]
        _fill(tensors, kept)
        return found

    def check_left() -> None:
        names = [f"argument {number} that may not be written," for number in range(len(left))]
        check_same_bits(names, left, others[read:], note)

    return OtherCall(run_in_place, check_left)


def _fill(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for tensor, other in zip(tensors, others, strict=True):
            tensor.copy_(other)


_ENDS = ("cu_seqlens_q", "cu_seqlens_k", "offsets")
"""Arguments whose numbers never fall: ends of groups."""


def _moved(name: str, arg: Any) -> Any:
    """A tensor's numbers in another order, of floats halves of them; of ends other lengths; of
    targets the last one.

    Halves, since sums of squares see no signs, and a mistake may need those that there were.
    """
    if isinstance(arg, (list, tuple)):
        return [_moved(name, entry) for entry in arg]
    if not isinstance(arg, Tensor) or (arg.is_floating_point() and arg.dtype not in FORMATS):
        return arg  # of types with 8 bits torch makes no product
    flipped = arg.flatten().flip(0).view(arg.shape)
    if name == "target":  # as many of which are ignored otherwise
        return arg.flatten()[-1:].expand(arg.numel()).reshape(arg.shape)
    if name in _ENDS:
        return arg[:1] + arg[-1:] - flipped
    return flipped * 0.5 if arg.dtype in FORMATS else flipped


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


def _simplest(failed: _Failed, tried: Callable[[DesignRow], _Failed | None]) -> _Failed:
    """The failing call with as many factors at their first level as still fail."""
    for factor in tuple(failed.at.levels):
        if failed.at.levels.get(factor):
            levels = {name: level for name, level in failed.at.levels.items() if name != factor}
            failed = tried(failed.at._replace(levels=levels)) or failed
    return tried(failed.at) or failed


def _story(simplest: _Failed, failed: Sequence[_Failed], asked: int, strength: int) -> str:
    """What it takes to fail, and what the calls that failed have in common."""
    needed = [
        f"{factor} {simplest.chosen[factor]}"
        for factor, level in simplest.at.levels.items()
        if level and factor in simplest.chosen
    ]
    counts = Counter(item for one in failed for item in one.at.levels.items() if item[1])
    common = [f"{f} {failed[0].chosen[f]}" for (f, _), n in counts.items() if n == len(failed)]
    lines = [f"{len(failed)} of {asked} calls of a design of strength {strength} failed"]
    lines.append(f"  it takes: {', '.join(needed) or 'nothing in particular'}")
    if len(failed) > 1 and common:
        lines.append(f"  in all of them: {', '.join(common)}")
    return "\n".join(lines)


def _largest(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Of each result in each format the one with the largest error."""
    found: dict[tuple[str, str], Measurement] = {}
    for one in measurements:
        if one.of not in found or one.max > found[one.of].max:
            found[one.of] = one
    return list(found.values())
