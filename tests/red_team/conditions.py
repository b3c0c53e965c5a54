"""When is a generated mistake made? Predicates on one raw call, with thresholds from a seed.

Nothing here knows which calls the conformance suite makes: sizes, layouts, addresses and values are
measured on whatever a row or a method is given, and thresholds are those that kernels have.
"""

import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class History:
    """What a mistake remembers of the calls before this one.

    Attributes:
        count: of those that met its conditions, but for one about their number.
    """

    count: int = 0
    shapes: tuple[Any, ...] = ()
    addresses: set[int] = field(default_factory=set)
    results: list[Any] = field(default_factory=list)
    buffers: dict[Any, Any] = field(default_factory=dict)
    met: dict[str, int] = field(default_factory=dict)
    """How many calls met a condition; under the empty name: all of them at once."""


@dataclass
class Call:
    """One call: values by the names of arguments; what was before; where it is made."""

    values: dict[str, Any]
    history: History = field(default_factory=History)
    on_side_stream: bool = False
    measured: dict[tuple[str, str], Any] = field(default_factory=dict)

    def measure(self, name: str, argument: str) -> Any:
        """One of MEASURES of an argument, taken once."""
        if (name, argument) not in self.measured:
            self.measured[name, argument] = MEASURES[name](self.values.get(argument))
        return self.measured[name, argument]

    def tensors(self) -> Iterator[Tensor]:
        """All of them, those in lists too."""
        for value in self.values.values():
            for each in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(each, Tensor):
                    yield each

    def shapes(self) -> tuple[Any, ...]:
        """Of all tensors."""
        return tuple(tuple(t.shape) for t in self.tensors())

    def enter(self) -> None:
        """Counts it, after its conditions were looked at."""
        self.history.shapes = self.shapes()
        self.history.addresses.update(t.data_ptr() for t in self.tensors())


def _sorted(t: Tensor) -> bool:
    flat = t.reshape(-1)
    return flat.numel() > 1 and bool((flat[1:] >= flat[:-1]).all())


def _repeated(t: Tensor) -> bool:
    return t.numel() > 1 and t.unique().numel() < t.numel()


Measure = Callable[[Any], Any]
SIZES: Mapping[str, Measure] = {
    "{}.shape[-1]": lambda t: t.shape[-1] if t.dim() else None,
    "{}.shape[0]": lambda t: t.shape[0] if t.dim() > 1 else None,
    "{}.shape[-2]": lambda t: t.shape[-2] if t.dim() > 1 else None,
    "{}.numel()": lambda t: t.numel(),
    "rows of {}": lambda t: t.numel() // t.shape[-1] if t.dim() and t.shape[-1] else None,
}
LAYOUTS: Mapping[str, Measure] = {
    "{} is contiguous": lambda t: t.is_contiguous(),
    "{}'s last stride is 1": lambda t: t.dim() > 0 and t.stride()[-1] == 1,
    "{} is expanded": lambda t: 0 in t.stride() and t.numel() > 1,
    "{} starts inside its storage": lambda t: t.storage_offset() > 0,
    "{} is aligned to 16 bytes": lambda t: t.data_ptr() % 16 == 0,
    "{} is aligned to 32 bytes": lambda t: t.data_ptr() % 32 == 0,
    "{} is aligned to 64 bytes": lambda t: t.data_ptr() % 64 == 0,
    "{} is empty": lambda t: t.numel() == 0,
}
VALUES: Mapping[str, Measure] = {
    "min({})": lambda t: t.min().item() if t.numel() else None,
    "max({})": lambda t: t.max().item() if t.numel() else None,
    "max(abs({}))": lambda t: t.abs().max().item() if t.numel() else None,
}
FEATURES: Mapping[str, Measure] = {
    "{} has a zero": lambda t: bool((t == 0).any()),
    "{} has a negative number": lambda t: bool((t < 0).any()),
    "{} is of equal numbers": lambda t: t.numel() > 1 and bool((t == t.reshape(-1)[0]).all()),
    "{} has a NaN": lambda t: bool(torch.isnan(t).any()),
    "{} has an infinity": lambda t: bool(torch.isinf(t).any()),
    "{} is bfloat16": lambda t: t.dtype == torch.bfloat16,
    "{} is float16": lambda t: t.dtype == torch.float16,
}
INTEGERS: Mapping[str, Measure] = {
    "{} is sorted": _sorted, "{} has a number twice": _repeated,
    "{} has a zero": lambda t: bool((t == 0).any()),
    "{} has a negative number": lambda t: bool((t < 0).any()),
}  # fmt: skip
LISTS: Mapping[str, Measure] = {
    "len({})": len, "elements of all {}": lambda ts: sum(t.numel() for t in ts),
    "the longest of {}": lambda ts: max((t.numel() for t in ts), default=0),
}  # fmt: skip
MEASURES: Mapping[str, Measure] = {
    **SIZES, **LAYOUTS, **VALUES, **FEATURES, **INTEGERS, **LISTS,
    "{} is None": lambda value: value is None,
    "one of {} is empty": lambda ts: any(t.numel() == 0 for t in ts),
    "{}": lambda value: value,
}  # fmt: skip


def _same_storage(call: Call) -> bool:
    found = [t.untyped_storage().data_ptr() for t in call.tensors() if t.numel()]
    return len(set(found)) < len(found)


COUNT = "such calls before"
OF_OTHER_CALLS = SAME_SHAPES, SAME_ADDRESS = (
    "the shapes are those of the call before", "a tensor lies where one of an earlier call lay",
)  # fmt: skip
STATES: Mapping[str, Callable[[Call], Any]] = {
    COUNT: lambda call: call.history.count,
    SAME_SHAPES: lambda call: call.shapes() == call.history.shapes,
    SAME_ADDRESS: lambda call: any(t.data_ptr() in call.history.addresses for t in call.tensors()),
    "two tensors share a storage": _same_storage,
    "not the main thread": lambda call: threading.current_thread() is not threading.main_thread(),
    "on a side stream": lambda call: call.on_side_stream,
}
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": lambda a, n: a >= n, "<": lambda a, n: a < n, "==": lambda a, n: a == n,
    "!=": lambda a, n: a != n, "divides by": lambda a, n: a % n == 0,
    "does not divide by": lambda a, n: a % n != 0,
}  # fmt: skip


class Condition(NamedTuple):
    """A measure of an argument, or of the call, compared with a number.

    Attributes:
        measure: key of MEASURES or STATES.
        argument: what is measured; empty for what is of the call.
        comparison: key of COMPARISONS.
        number: what it is compared with; a truth value for what is true or not.
    """

    measure: str
    argument: str
    comparison: str
    number: Any

    @property
    def kind(self) -> str:
        """Of what sort it is, for tables."""
        return self.measure.format("tensor" if "{}" != self.measure else "attribute")

    @property
    def counts(self) -> bool:
        """Whether it is about how many calls were before."""
        return self.measure == COUNT

    def holds(self, call: Call) -> bool:
        """Whether a call meets it; what cannot be measured does not."""
        if self.measure in STATES:
            found = STATES[self.measure](call)
        else:
            is_optional = self.measure in ("{} is None", "{}")
            if call.values.get(self.argument) is None and not is_optional:
                return False
            found = call.measure(self.measure, self.argument)
        if found is None and self.comparison not in ("==", "!="):
            return False
        return COMPARISONS[self.comparison](found, self.number)

    def __str__(self) -> str:
        text = self.measure.format(self.argument)
        if isinstance(self.number, bool) and self.measure != "{}":
            return text if self.number else f"not {text}"
        return f"{text} {self.comparison} {self.number}"


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def _size(draw: random.Random, measure: str, argument: str, high: int = 20000) -> Condition:
    comparison = draw.choice((">=", ">=", "<", "==", "divides by", "does not divide by"))
    if comparison in (">=", "<"):
        number = round(_log_uniform(draw, 2, high))
        if draw.random() < 0.5:  # a limit of a launch, a tile or an index
            number = 1 << round(math.log2(number))
    elif comparison == "==":
        number = draw.choice((1, 1, 2, 3, 4, 8, 16, 32, 64, 128))
    else:
        number = draw.choice((2, 4, 8, 16, 32, 64, 128, 3, 5, 6, 7))
    return Condition(measure, argument, comparison, number)


def _is(draw: random.Random, measures: Mapping[str, Any], argument: str) -> Condition:
    return Condition(draw.choice(list(measures)), argument, "==", draw.random() < 0.7)


def _of_tensor(draw: random.Random, argument: str, value: Tensor) -> Condition:
    if not value.is_floating_point():
        where = draw.random()
        if where < 0.4:
            return _is(draw, INTEGERS, argument)
        return _size(draw, draw.choice([*SIZES, "max({})"] if where < 0.9 else ["min({})"]),
                     argument)  # fmt: skip
    where = draw.random()
    if where < 0.45:
        measure = draw.choice(list(SIZES))
        return _size(draw, measure, argument, 1 << 18 if "numel" in measure else 20000)
    if where < 0.65:
        return _is(draw, LAYOUTS, argument)
    if where < 0.8:
        number = float(f"{_log_uniform(draw, 1e-4, 1e4):.2g}") * draw.choice((1, 1, -1))
        return Condition(draw.choice(list(VALUES)), argument, draw.choice((">=", "<")), number)
    return _is(draw, FEATURES, argument)


def draw_condition(draw: random.Random, call: Call, *, has_streams: bool) -> Condition:
    """One that may hold for calls like this one."""
    argument, value = draw.choice(list(call.values.items()))
    where = draw.random()
    if where < 0.12:
        measure = draw.choice([m for m in STATES if has_streams or m != "on a side stream"])
        if measure == COUNT:
            return Condition(measure, "", draw.choice((">=", "==")), draw.randint(1, 8))
        return Condition(measure, "", "==", draw.random() < 0.8)
    if isinstance(value, Tensor):
        return _of_tensor(draw, argument, value)
    if isinstance(value, (list, tuple)) and any(isinstance(each, Tensor) for each in value):
        if where < 0.3:
            return Condition("one of {} is empty", argument, "==", True)
        return _size(draw, draw.choice(list(LISTS)), argument, 1000)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and where < 0.6:
        return _size(draw, "{}", argument, 1000) if isinstance(value, int) else Condition(
            "{}", argument, draw.choice((">=", "<")), float(f"{_log_uniform(draw, 1e-3, 2):.2g}")
        )  # fmt: skip
    if value is None:
        return Condition("{} is None", argument, "==", True)
    return Condition("{}", argument, draw.choice(("==", "!=")), value)
