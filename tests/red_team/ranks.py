"""Mistakes in the calls of a communicator: on some ranks, of some sizes, in some groups.

The ranks are the suite's own processes. They make the backend anew, by its name, and find in their
environment what is wrong with it.
"""

from __future__ import annotations

import base64
import inspect
import math
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anychip.contract import Communicator, Work
from tests.meta.honest import HonestBackend
from tests.meta.wrong import with_method
from tests.meta.wrong_collectives import changed
from tests.red_team.conditions import COUNT, Call, Condition, draw_condition
from tests.red_team.effects import RAISED, VALUES, Effect, wrong_numbers
from tests.red_team.mistake import Mistake

CHAPTERS = ("collectives",)
PART = "communicator"
RANK, WORLD, GROUP = "the rank", "the number of ranks", "is a group of some"
OVERWRITTEN, TAKEN = "what it gives is written", "{} is taken for {v}"
EARLY = "the work is done before it is"
VARIABLE = "ANYCHIP_RED_TEAM_MISTAKE"
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8)
LARGEST = 1 << 16
"""Elements of a tensor."""
CALLS_PROBED = 80


def _tensor(draw: random.Random) -> Tensor:
    numel = round(math.exp(draw.uniform(0, math.log(LARGEST))))
    start = draw.choice((0, 0, 1, 3))
    return torch.zeros(numel + start, dtype=draw.choice(DTYPES))[start:] + 1


def _one(draw: random.Random) -> dict[str, Any]:
    return {"tensor": _tensor(draw)}


def _reduced(draw: random.Random) -> dict[str, Any]:
    return {**_one(draw), "reduction": draw.choice(("sum", "sum", "avg", "max", "min"))}


def _two(draw: random.Random) -> dict[str, Any]:
    tensor = _tensor(draw)
    return {"tensor": tensor, "output": tensor.new_ones(tensor.numel() * draw.randint(1, 4))}


def _rooted(draw: random.Random) -> dict[str, Any]:
    return {**_one(draw), "source": draw.randrange(4)}


def _lists(draw: random.Random) -> dict[str, Any]:
    ranks = range(draw.randint(1, 4))
    return {name: [_tensor(draw) for _ in ranks] for name in ("outputs", "inputs")}


METHODS: Mapping[str, Callable[[random.Random], dict[str, Any]]] = {
    "all_reduce": _reduced, "all_gather": _two, "reduce_scatter": lambda draw: {
        "output": _one(draw)["tensor"], **_reduced(draw)
    }, "broadcast": _rooted, "all_to_all": _lists, "send": _one, "recv": _one,
}  # fmt: skip
"""Draws the values of a call."""
WRITTEN = {"all_gather": "output", "reduce_scatter": "output", "all_to_all": "outputs"}
"""What a call writes, where it is not ``tensor``."""
NAMES = [name for name in VALUES if "{n}" not in name and "row" not in name]


def rank_mistakes(count: int, draw: random.Random) -> list[Mistake]:
    """So many, each of which a call at random meets."""
    found: list[Mistake] = []
    while len(found) < count:
        method = draw.choice(list(METHODS))
        number = draw.choice((1, 1, 2, 2, 3))
        conditions = [_condition(draw, _values(method, draw)) for _ in range(number)]
        probes = [Call(_values(method, draw)) for _ in range(CALLS_PROBED)]
        fixed = [c for c in conditions if not c.counts]
        if any(all(c.holds(call) for c in fixed) for call in probes):
            unique = tuple({c[:2]: c for c in conditions}.values())
            found.append(
                Mistake(backend="ranks", target=(PART, method), conditions=unique,
                        effect=_effect(draw, method))
            )  # fmt: skip
    return found


def _values(method: str, draw: random.Random) -> dict[str, Any]:
    world = draw.randint(2 if method in ("send", "recv") else 1, 4)  # nobody sends to himself
    place = {RANK: draw.randrange(world), WORLD: world, GROUP: draw.random() < 0.3}
    return {**METHODS[method](draw), "async_op": draw.random() < 0.5, **place}


def _condition(draw: random.Random, values: dict[str, Any]) -> Condition:
    if draw.random() < 0.35:
        name = draw.choice((RANK, WORLD, GROUP, "async_op"))
        return Condition("{}", name, draw.choice(("==", "==", "!=")), values[name])
    if draw.random() < 0.15:
        return Condition(COUNT, "", ">=", draw.randint(1, 8))
    tensors = {n: v for n, v in values.items() if isinstance(v, (Tensor, list, str))}
    return draw_condition(draw, Call(tensors), has_streams=False)


def _effect(draw: random.Random, method: str) -> Effect:
    where, place = draw.random(), draw.choice((0.0, 1.0, draw.random()))
    if where < 0.1:
        return Effect(RAISED)
    if where < 0.25 and method in ("all_reduce", "reduce_scatter"):
        return Effect(TAKEN, "reduction", value=draw.choice(("avg", "max", "min")))
    if method == "send":  # it writes nothing that is its own, and may have copied what it gives
        return Effect(OVERWRITTEN, "tensor", place=place)
    if where < 0.35:
        return Effect(EARLY)
    return Effect(draw.choice(NAMES), place=place)


def with_wrong_ranks(mistake: Mistake) -> WrongRanks:
    """The backend of which the ranks have the mistake."""
    os.environ[VARIABLE] = base64.b64encode(pickle.dumps(mistake)).decode()
    return WrongRanks()


class WrongRanks(HonestBackend):
    """Honest, but for the calls of its communicators."""

    def communicator(self, **settings: Any) -> Communicator:
        mistake: Mistake = pickle.loads(base64.b64decode(os.environ[VARIABLE]))
        return _with(mistake, super().communicator(**settings), is_group=False)


def _with(mistake: Mistake, comm: Communicator, *, is_group: bool) -> Communicator:
    method = mistake.target[1]

    def change(self: Any, right: Callable[..., Any], *args: Any, **named: Any) -> Any:
        bound = inspect.signature(right).bind(*args, **named)
        bound.apply_defaults()
        place = {RANK: self.rank, WORLD: self.world_size, GROUP: is_group}
        call = Call({**bound.arguments, **place}, mistake.history)
        applies = mistake.applies(call)
        call.enter()
        return _wrong(mistake, right, bound) if applies else right(*args, **named)

    def split(self: Any, right: Callable[..., Any], groups: Any, *, name: str) -> Communicator:
        return _with(mistake, right(groups, name=name), is_group=True)

    within = type("Within", (Communicator,), {})
    return changed(comm, with_method(with_method(within, method, change), "split", split))


def _wrong(mistake: Mistake, right: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    effect = mistake.effect
    if effect.name == RAISED:
        raise RuntimeError("a generated mistake")
    if effect.name == TAKEN:
        bound.arguments["reduction"] = effect.value
    if effect.name == OVERWRITTEN:
        _write(bound.arguments["tensor"], effect.place)
    work = right(*bound.args, **bound.kwargs)
    written = bound.arguments[WRITTEN.get(mistake.target[1], "tensor")]
    altered = Altered(work, effect, list(_each(written)))
    if not bound.arguments["async_op"]:
        altered.wait()
    return altered


@dataclass
class Altered(Work):
    """Work whose results are others."""

    right: Work
    effect: Effect
    written: list[Tensor]

    def wait(self) -> None:
        if self.effect.name != EARLY:
            self.right.wait()
        for tensor in self.written if self.effect.name in VALUES else ():
            tensor.copy_(VALUES[self.effect.name](self.effect, tensor))
        self.written = []

    def is_done(self) -> bool:
        return self.effect.name == EARLY or self.right.is_done()


def _write(tensor: Tensor, place: float) -> None:
    flat = tensor.view(-1)
    if flat.numel():
        spot = round(place * (flat.numel() - 1))
        flat[spot] = wrong_numbers(flat)[spot]


def _each(value: Any) -> Iterator[Tensor]:
    yield from value if isinstance(value, (list, tuple)) else (value,)
