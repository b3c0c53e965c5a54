"""Mistakes in methods of a device, its memory, streams, events and generators."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.meta.asynchronous import AsynchronousBackend, AsynchronousMemory, Event, Stream
from tests.meta.wrong import with_method
from tests.red_team.conditions import COUNT, OF_OTHER_CALLS, Call, Condition, draw_condition
from tests.red_team.effects import RAISED, Effect, wrong_numbers
from tests.red_team.mistake import Mistake
from tests.red_team.seam import on_side_stream

PARTS: Mapping[str, type] = {
    "backend": AsynchronousBackend, "memory": AsynchronousMemory, "stream": Stream, "event": Event,
}  # fmt: skip
CHAPTERS = ("device", "memory", "random", "streams")
OWN = "calls of this object before"
NOTHING, STALE, OTHER = "nothing happens", "the result is that of the call before", "{} is another"
CALLS_PROBED = 80
OF_TENSORS = ("two tensors share a storage", *OF_OTHER_CALLS)
"""States that calls without tensors do not have."""


class Method(NamedTuple):
    """A method that mistakes are put into.

    Attributes:
        values: draws the values of a call.
        effects: names of what may happen there.
    """

    values: Callable[[random.Random], dict[str, Any]]
    effects: tuple[str, ...]


def _index(draw: random.Random) -> dict[str, Any]:
    return {"index": draw.choice((None, 0, 1))}


def _place(draw: random.Random) -> dict[str, Any]:
    return {"index": draw.choice((0, 1))}


def _size(draw: random.Random) -> dict[str, Any]:
    return {"nbytes": round(math.exp(draw.uniform(0, math.log(1 << 26)))), **_index(draw)}


def _none(draw: random.Random) -> dict[str, Any]:
    return {}


def _seed(draw: random.Random) -> dict[str, Any]:
    return {"seed": draw.getrandbits(draw.choice((3, 16, 31, 33, 60))), **_index(draw)}


def _copy(draw: random.Random) -> dict[str, Any]:
    shape = [draw.randint(1, draw.choice((4, 40, 400))) for _ in range(draw.randint(1, 3))]
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool))
    made = {"target": torch.zeros(shape).to(dtype), "source": torch.ones(shape).to(dtype)}
    for name in made:
        if draw.random() < 0.4:
            made[name] = (
                made[name].mT if len(shape) > 1 else torch.stack([made[name]] * 2, -1)[:, 0]
            )
    return {**made, "stream": draw.choice((None, "one"))}


CHANGED = (NOTHING, RAISED)
GIVEN = (STALE, OTHER, RAISED)
METHODS: Mapping[tuple[str, str], Method] = {
    ("backend", "current_device"): Method(_none, (OTHER, RAISED)),  # of one device it is the same
    ("backend", "set_device"): Method(_place, CHANGED),  # None is no device to set
    ("backend", "synchronize"): Method(_index, CHANGED),
    ("backend", "device"): Method(_index, (STALE, RAISED)),
    ("backend", "generator"): Method(_seed, (*GIVEN, "the upper half of {} is left out")),
    ("backend", "random_state"): Method(_index, GIVEN),
    ("backend", "set_random_state"): Method(_index, CHANGED),
    ("backend", "current_stream"): Method(_index, (STALE, RAISED)),
    ("backend", "event"): Method(_none, (STALE, RAISED)),
    ("memory", "allocate"): Method(_size, (OTHER, RAISED)),
    ("memory", "freed"): Method(lambda draw: {"nbytes": _size(draw)["nbytes"]}, (NOTHING,)),
    ("memory", "stats"): Method(_index, GIVEN),
    ("memory", "reset_peak"): Method(_index, CHANGED),
    ("memory", "copy_async"): Method(_copy, (*CHANGED, "the target's last number is wrong")),
    ("stream", "wait_event"): Method(_none, CHANGED),
    ("stream", "wait_stream"): Method(_none, CHANGED),
    ("stream", "synchronize"): Method(_none, CHANGED),
    ("stream", "query"): Method(_none, (OTHER, RAISED)),
    ("event", "record"): Method(_none, CHANGED),
    ("event", "wait"): Method(_none, CHANGED),
    ("event", "query"): Method(_none, (OTHER, RAISED)),
    ("event", "synchronize"): Method(_none, CHANGED),
    ("event", "elapsed_time"): Method(_none, GIVEN),
}


def method_mistakes(count: int, draw: random.Random) -> list[Mistake]:
    """So many, each of which a call at random meets."""
    found: list[Mistake] = []
    targets = list(METHODS)
    while len(found) < count:
        target = draw.choice(targets)
        method = METHODS[target]
        effect = draw.choice(method.effects)
        argument = "seed" if "half of" in effect else ""
        number = draw.choice((1, 1, 2, 2, 3))
        # Of what is there once, calls of this object are calls of the process.
        own = OWN if target[0] in ("stream", "event") else ""
        conditions = [_condition(draw, method.values(draw), own) for _ in range(number)]
        probes = [Call(method.values(draw)) for _ in range(CALLS_PROBED)]
        fixed = [c for c in conditions if c.argument and c.argument != OWN]
        if any(all(c.holds(call) for c in fixed) for call in probes):
            unique = tuple({_counted(each): each for each in conditions}.values())
            found.append(
                Mistake(
                    backend="asynchronous", target=target, conditions=unique,
                    effect=Effect(effect, argument=argument),
                )
            )  # fmt: skip
    return found


def _counted(condition: Condition) -> tuple[str, ...]:
    """What at most one condition of a mistake may speak of."""
    counts = condition.argument == OWN or condition.counts
    return ("calls",) if counts else condition[:2]


def _condition(draw: random.Random, values: dict[str, Any], own: str) -> Condition:
    if not values or draw.random() < 0.35:
        if draw.random() < 0.5:
            comparison, number = draw.choice((">=", "==")), draw.choice((1, 1, 2, 2, 3, 5))
            return Condition("{}" if own else COUNT, own, comparison, number)
        states = ("not the main thread", "on a side stream")
        return draw.choice((
            Condition(draw.choice(states), "", "==", draw.random() < 0.7),
            Condition(COUNT, "", ">=", draw.randint(1, 8)),
        ))  # fmt: skip
    found = draw_condition(draw, Call(values), has_streams=True)
    while found.measure in OF_TENSORS and not any(isinstance(v, Tensor) for v in values.values()):
        found = draw_condition(draw, Call(values), has_streams=True)
    if found.number == "one":  # of streams it is only said whether there is one
        return found._replace(comparison={"==": "!=", "!=": "=="}[found.comparison], number=None)
    if found.measure == "{}" and found.argument in ("nbytes", "seed"):
        size = round(math.exp(draw.uniform(0, 18)))
        return found._replace(number=max(size, 1)) if found.comparison in (">=", "<") else found
    return found


def with_wrong_method(mistake: Mistake) -> Any:
    """The asynchronous backend with the mistake in it."""
    part, method = mistake.target
    change = _Change(mistake)
    made = with_method(PARTS[part], method, change)
    if part != "backend":
        name = {"memory": "memory_type", "stream": "stream_type", "event": "event_type"}[part]
        made = type("WrongMethod", (AsynchronousBackend,), {name: made})
    change.backend = made()
    return change.backend


class _Change:
    """``change(self, right, *args)`` for :func:`tests.meta.wrong.with_method`."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake
        self.backend: AsynchronousBackend | None = None  # while it is being made

    def __call__(self, owner: Any, right: Callable[..., Any], *args: Any, **named: Any) -> Any:
        mistake, history = self.mistake, self.mistake.history
        bound = inspect.signature(right).bind(*args, **named)
        bound.apply_defaults()
        own = vars(owner).get("generated_calls", 0)
        call = Call({**bound.arguments, OWN: own}, history, on_side_stream(self.backend))
        applies = mistake.applies(call)
        owner.generated_calls = own + 1
        call.enter()
        if applies:
            return self._wrong(right, bound, call)
        history.results = [right(*args, **named)]
        return history.results[0]

    def _wrong(self, right: Callable[..., Any], bound: inspect.BoundArguments, call: Call) -> Any:
        name, before = self.mistake.effect.name, call.history.results
        if name == RAISED:
            raise RuntimeError("a generated mistake")
        if name == NOTHING:
            return None
        if self.mistake.effect.argument:
            bound.arguments["seed"] &= (1 << 32) - 1
        found = right(*bound.args, **bound.kwargs)
        if name == STALE:
            call.history.results = [found]
            return before[0] if before else found
        if "target's last" in name:
            target, stream = bound.arguments["target"], bound.arguments["stream"]
            if target.numel():
                last = target.reshape(-1)[-1:].new_zeros(1)
                spot = target[tuple(slice(-1, None) for _ in target.shape)]
                right(spot, last.view([1] * target.dim()), stream)
            return found
        return _another(found) if name == OTHER else found


def _another(found: Any) -> Any:
    if isinstance(found, bool):
        return not found
    if isinstance(found, tuple):  # statistics: more is allocated than a host does beside
        more = found.allocated + (8 << 20)  # type: ignore[attr-defined]
        return found._replace(allocated=more)  # type: ignore[attr-defined]
    if isinstance(found, (int, float)):
        return found + 1
    if isinstance(found, torch.UntypedStorage):
        return found[: max(found.nbytes() - 1, 0)] if found.nbytes() else found
    if isinstance(found, torch.Generator):
        return found.manual_seed(found.initial_seed() + 1)
    return wrong_numbers(found) if isinstance(found, Tensor) else found
