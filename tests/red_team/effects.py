"""What does a generated mistake do? Changes of arguments and results, whatever the operator is."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.red_team.conditions import Call

Change = Callable[["Effect", Tensor], Tensor]


def wrong_numbers(t: Tensor) -> Tensor:
    """Numbers that are clearly others."""
    if t.dtype == torch.bool:
        return ~t
    if not t.is_floating_point():
        return t ^ 1
    return t + 0.25 * t.abs() + 0.5 * t.float().abs().nan_to_num(1.0, 1.0).mean().to(t.dtype)


def _flat(change: Callable[["Effect", Tensor, Tensor], None]) -> Change:
    def changed(effect: "Effect", y: Tensor) -> Tensor:
        made = y.clone(memory_format=torch.contiguous_format)
        if made.numel():
            change(effect, made.view(-1), wrong_numbers(made).view(-1))
        return made

    return changed


def _element(effect: "Effect", flat: Tensor, wrong: Tensor) -> None:
    place = round(effect.place * (len(flat) - 1))
    flat[place] = wrong[place]


def _beyond(effect: "Effect", flat: Tensor, wrong: Tensor) -> None:
    flat[effect.number :] = 0


def _of_row(change: Callable[[Tensor], Tensor]) -> Change:
    def changed(effect: "Effect", y: Tensor) -> Tensor:
        made = y.clone(memory_format=torch.contiguous_format)
        if made.numel():
            rows = made.view(-1, made.shape[-1]) if made.dim() else made.view(1, 1)
            place = round(effect.place * (len(rows) - 1))
            rows[place] = change(rows)[place]
        return made

    return changed


def _tail(effect: "Effect", y: Tensor) -> Tensor:
    made = y.clone(memory_format=torch.contiguous_format)
    if made.dim():
        made[..., made.shape[-1] // effect.number * effect.number :] = 0
    return made


def _strided(effect: "Effect", y: Tensor) -> Tensor:
    if y.dim() < 2:
        return torch.stack((y, y), -1)[..., 0]
    return y.transpose(0, -1).contiguous().transpose(0, -1)


VALUES: Mapping[str, Change] = {
    "one element of {} is wrong": _flat(_element),
    "{} is 0 from element {n} on": _flat(_beyond),
    "a row of {} is that before it": _of_row(lambda rows: rows.roll(1, 0)),
    "a row of {} is wrong": _of_row(wrong_numbers),
    "a row of {} is moved by one": _of_row(lambda rows: rows.roll(1, -1)),
    "{} lacks what remains after vectors of {n}": _tail,
    "{} is rounded to bfloat16": lambda effect, y: (
        y.bfloat16().to(y.dtype) if y.is_floating_point() else y
    ),
    "{} is moved by one": lambda effect, y: y.roll(1, -1) if y.dim() else y,
    "{} has another sign": lambda effect, y: -y if y.is_floating_point() else y,
}
"""Of a result, or of what is written."""
FORMS: Mapping[str, Change] = {
    "{} is not contiguous": _strided,
    "{} has another dtype": lambda effect, y: y.bfloat16() if y.is_floating_point() else y.short(),
}


def _bound(arg: Tensor) -> Tensor:
    """As if it were dense, where its storage has so much."""
    fits = arg.storage_offset() + arg.numel() <= arg.untyped_storage().size() // arg.element_size()
    strides = torch.empty(arg.shape, device="meta").stride()
    return arg.as_strided(arg.shape, strides) if fits else arg


def _one_index(arg: Tensor) -> Tensor:
    made = arg.clone(memory_format=torch.contiguous_format)
    if made.numel():
        made.view(-1)[-1] = made.view(-1)[0]
    return made


ARGUMENTS: Mapping[str, Callable[[Any], Any]] = {
    "{} is rounded to bfloat16": lambda x: x.bfloat16().to(x.dtype),
    "{} is read as if it were dense": _bound,
    "the last number of {} is read as the first": _one_index,
    "{} is left out": lambda x: None,
    "the last of {} is left out": lambda xs: xs[:-1],
}
WRITTEN = "the last number of {} is written"
STALE, BUFFER = "the result is that of the call before", "the result lies in one buffer"
EXCHANGED, RAISED = "two results are exchanged", "an exception is raised"
LATE, LATE_S = "the result is there a little later", 0.003


class Effect(NamedTuple):
    """What a mistake does.

    Attributes:
        name: which of the above.
        argument: what is changed, by name.
        result: which result, or which tensor of those that are written.
        number: a width or a length.
        place: from 0, the first, to 1, the last.
        value: what an attribute is taken for.
    """

    name: str
    argument: str = ""
    result: int = 0
    number: int = 0
    place: float = 0.0
    value: Any = None

    @property
    def kind(self) -> str:
        """Of what sort it is, for tables."""
        what = "an argument" if self.argument else "a result"
        return self.name.format(what, n="N", v="another value")

    def __str__(self) -> str:
        what = self.argument or f"result {self.result}"
        return self.name.format(what, n=self.number, v=self.value)

    def on_arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """The arguments that the right row is called with."""
        value = values.get(self.argument)
        if "is taken for" in self.name:
            return {**values, self.argument: self.value}
        if self.name not in ARGUMENTS or value is None:
            return values
        if isinstance(value, (list, tuple)):
            return {
                name: other[:-1] if isinstance(other, (list, tuple)) and len(other) == len(value)
                and all(isinstance(each, Tensor) for each in other) else other
                for name, other in values.items()
            }  # fmt: skip
        return {**values, self.argument: ARGUMENTS[self.name](value)}

    def on_results(self, results: list[Any], call: Call, *, written: bool) -> list[Any]:
        """The results that are given in the place of right ones."""
        if self.name == WRITTEN:
            _write(call.values[self.argument])
        if self.name == STALE:
            before, call.history.results = call.history.results, [_copy(r) for r in results]
            return [_copy(r) for r in before] if _alike(before, results) else results
        if self.name == BUFFER:
            return [_in_buffer(r, number, call) for number, r in enumerate(results)]
        if self.name == EXCHANGED and len(results) > 1 and _alike(results[:1], results[1:2]):
            return [results[1], results[0], *results[2:]]
        if self.name == LATE:
            return [_late(r) for r in results]
        change = VALUES.get(self.name) if not self.argument else None
        change = change or FORMS.get(self.name)
        if change is None or self.result >= len(results) or results[self.result] is None:
            return results
        made = change(self, results[self.result])
        if written:
            results[self.result].copy_(made)
            return results
        return [*results[: self.result], made, *results[self.result + 1 :]]


def _write(arg: Any) -> None:
    tensor = arg[-1] if isinstance(arg, (list, tuple)) and arg else arg
    if isinstance(tensor, Tensor) and tensor.numel():
        last = tensor.detach()[tuple(-1 for _ in tensor.shape)]
        last.copy_(wrong_numbers(last.clone()))


def _copy(result: Any) -> Any:
    return result.clone() if isinstance(result, Tensor) else result


def _alike(left: Sequence[Any], right: Sequence[Any]) -> bool:
    def form(result: Any) -> Any:
        return result is not None and (result.shape, result.dtype)

    return [form(r) for r in left] == [form(r) for r in right]


def _in_buffer(result: Any, number: int, call: Call) -> Any:
    if result is None:
        return None
    key = (number, result.shape, result.dtype)
    return call.history.buffers.setdefault(key, torch.empty_like(result)).copy_(result)


def _late(result: Any) -> Any:
    if result is None:
        return None
    promised = torch.zeros_like(result)
    filling = threading.Timer(LATE_S, promised.detach().copy_, [result])
    filling.daemon = True
    filling.start()
    return promised


def draw_effect(draw: random.Random, call: Call, num_results: int, *, written: bool) -> Effect:
    """One that calls like this one may suffer."""
    where, result = draw.random(), draw.randrange(max(num_results, 1))
    place = draw.choice((0.0, 1.0, 1.0, draw.random()))
    number = 1 << draw.randint(2, 7)
    if where < 0.5 or (written and where < 0.75):
        name = draw.choice(list(VALUES))
        number = 1 << draw.randint(6, 16) if "from element" in name else number
        return Effect(name, result=result, number=number, place=place)
    if where < 0.62:
        names = [STALE, BUFFER, EXCHANGED, RAISED, LATE, *FORMS]
        return Effect(draw.choice(names[3:4] if written else names), result=result)
    argument, value = draw.choice(list(call.values.items()))
    if isinstance(value, Tensor):
        if draw.random() < 0.25 and not written:
            return Effect(WRITTEN, argument)
        names = list(ARGUMENTS)[:2] if value.is_floating_point() else list(ARGUMENTS)[1:3]
        return Effect(draw.choice([*names, "{} is left out"]), argument)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return Effect("the last of {} is left out", argument)
    taken: Sequence[Any] = (None,)
    if isinstance(value, bool):
        taken = (not value,)
    elif isinstance(value, (int, float)):
        taken = (value + 1, value - 1) if isinstance(value, int) else (0.0, 1.0, 1e-5, 0.1)
    return Effect("{} is taken for {v}", argument, value=draw.choice(taken))
