"""Does a library read what it is passed? An argument that it ignores hides a wrong one.

For authors of emulators, and of bindings of a vendor's library. Calls are recorded where rows leave
for the library, and made again with one argument changed: what the page of a function says to
matter must change the outcome, which may be an error; what it says to be ignored must not.
``Call(row.function, arguments)`` asks so of a row: does it pass on what it is given?

Whether values are right the conformance suite asks, and sees a wrong argument only if it is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from anychip.contract import Row

MOST_CALLS = 4
"""Kept of each function."""
Function = Callable[..., Any]
Calls = Mapping[str, Sequence["Call"]]
Judge = Callable[[Exception], bool]


class Reads(Enum):
    """What a function reads of an argument, as its page says."""

    VALUE = "its value"
    FORM = "whether it is there, its sizes and strides, and no value"
    NOTHING = "nothing of it"


class Call(NamedTuple):
    """A function, and the arguments of one call by name."""

    function: Function
    arguments: Mapping[str, Any]

    def outcome(self, **changed: Any) -> dict[str, list[Any]]:
        """What it returns, as "", and what the arguments are then; it is given copies."""
        given = tree_map_only(torch.Tensor, torch.clone, {**self.arguments, **changed})
        return {"": _bits(self.function(**given)), **{n: _bits(v) for n, v in given.items()}}


def findings(
    calls: Sequence[Call],
    page: Mapping[str, Reads],
    *,
    values: Mapping[str, Sequence[Any]] | None = None,
    of_library: Judge = lambda error: True,
) -> list[str]:
    """A sentence for each argument of which calls do not show what a page says of it; none: all do.

    Args:
        calls: of one function, from :func:`recording` or :func:`recorded`.
        page: the arguments that its documentation has.
        values: by argument, values that it may have, where :func:`others` knows none, as of texts.
        of_library: whether an error is the library's, and so an outcome. One of a check in front of
            it shows something only when every other value ends so. It may raise the error.

    Raises:
        Exception: of a recorded call, made again as it was.
    """
    passed = {name for call in calls for name, v in call.arguments.items() if v is not None}
    found = [f"{name}: passed, and not on the page" for name in sorted(passed - page.keys())]
    for name, reads in page.items():
        having = [call for call in calls if call.arguments.get(name) is not None]
        problem = _problem(having, name, reads, (values or {}).get(name, ()), of_library)
        found += [f"{name}: {problem}"] if problem else []
    return found if calls else [*found, "no call was recorded"]


def _problem(
    calls: Sequence[Call], name: str, reads: Reads, values: Sequence[Any], judge: Judge
) -> str:
    def unlike(value: Any) -> Iterator[Any]:
        return (v for v in (*values, *others(value)) if _bits(v) != _bits(value))

    is_read = _is_read(calls, name, unlike, judge)
    if not calls:
        return "passed by no call, or as None"
    if is_read is None:
        return "no call can show it: of what is passed no other value is known, name some"
    if is_read and reads is not Reads.VALUE:
        return f"another value changes the outcome, and the page says that it reads {reads.value}"
    if reads is Reads.VALUE and not is_read:
        return "ignored: no other value changes the outcome"
    if reads is Reads.FORM and not _is_read(calls, name, forms, judge):
        return "ignored: neither None nor other sizes or strides change the outcome"
    return ""


def _is_read(calls: Sequence[Call], name: str, others: Function, judge: Judge) -> bool | None:
    """Whether some value changes an outcome, or each ends in an error; None where there is none."""
    refused = []
    for end in (end for call in calls for end in _ends(call, name, others)):
        if end is True or (isinstance(end, Exception) and judge(end)):
            return True
        refused.append(end is not False)
    return all(refused) if refused else None


def _ends(call: Call, name: str, others: Function) -> Iterator[bool | Exception]:
    """Of each other value, whether it changes the outcome, or the error in which it ends."""
    value, before = call.arguments[name], call.outcome()
    # Of the argument itself the end tells something only where the call writes to it.
    told = [n for n in before if n != name or before[n] != _bits(value)]
    for other in others(value):
        try:
            after = call.outcome(**{name: other})
        except Exception as error:
            yield error
        else:
            again = call.outcome()
            yield any(_differ(before[n], again[n], after[n]) for n in told)


def _differ(before: list[Any], again: list[Any], after: list[Any]) -> bool:
    """In what the call itself gives twice: what nobody writes may be what was there before."""
    if len(before) != len(after):
        return True
    return any(x == y != z for x, y, z in zip(before, again, after, strict=True))


def _bits(value: Any) -> list[Any]:
    """What can be compared of all that is in a value."""

    def of(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return repr(x)
        flat = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return x.dtype, x.shape, flat.numpy().tobytes()

    return [of(x) for x in tree_leaves(value)]


def others(value: Any) -> Iterator[Any]:
    """Values of the same kind, perhaps itself too; none where its author alone knows them."""
    if isinstance(value, torch.Tensor):
        yield from _other_tensors(value)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, Enum):
        yield from type(value)
    elif isinstance(value, int):
        yield from (value + 1, value - 1, 1 - value, 0)
    elif isinstance(value, float):
        yield from (value * 1.5 + 0.125, value / 2)
    elif isinstance(value, torch.dtype):
        yield from (torch.float32, torch.bfloat16, torch.float16)
    elif isinstance(value, (list, tuple)) and value:
        if all(type(x) is int for x in value):  # perhaps ends of parts, of which the last stays
            yield [*(max(x - 1, 0) for x in value[:-1]), value[-1]]
        for i, each in enumerate(value):
            yield from ([*value[:i], other, *value[i + 1 :]] for other in others(each))


def _other_tensors(x: torch.Tensor) -> Iterator[torch.Tensor]:
    if x.is_floating_point():  # of some the sign alone is read
        yield from ((x.float() * 1.25 + 0.125).to(x.dtype), (-x.float()).to(x.dtype))
    elif x.dtype == torch.bool:
        yield from (x.logical_not(), x.t() if x.dim() == 2 else x.reshape(-1).flip(0).view_as(x))
    elif x.dim() == 1 and len(x) > 1 and bool((x.diff() >= 0).all()):  # perhaps ends of parts
        yield torch.cat((x[:-1] - 1, x[-1:])).clamp(min=0)
    else:
        yield from ((x - 1).clamp(min=0), x.reshape(-1).flip(0).view_as(x), x + 1)


def forms(value: Any) -> Iterator[Any]:
    """None, and a tensor with one slice less, with a dim more, and in other strides."""
    yield None
    if isinstance(value, torch.Tensor):
        yield from (value.narrow(d, 0, n - 1) for d, n in enumerate(value.shape) if n)
        yield from (value.unsqueeze(0), value.mT.contiguous().mT if value.dim() > 1 else value)


@contextmanager
def recording(rows: Iterable[Row], operators: Iterable[str]) -> Iterator[Calls]:
    """Keeps calls of torch's operators, like ``aten::mm``, made inside rows, in whatever thread."""
    recorder = _Recorder(operators)
    before = [(row, row.function, row.paired) for row in rows]

    def watched(function: Function) -> Function:
        def call(*arguments: Any, **attributes: Any) -> Any:
            with recorder:
                return function(*arguments, **attributes)

        return call

    def put(made: Callable[[Function], Function]) -> None:
        for row, function, pair in before:  # a row is frozen
            object.__setattr__(row, "function", made(function))
            own = pair and pair._replace(backward=made(pair.backward))
            object.__setattr__(row, "paired", own)

    put(watched)
    try:
        yield recorder.calls
    finally:
        put(lambda function: function)


class _Recorder(TorchDispatchMode):
    def __init__(self, operators: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, list[Call]] = {name: [] for name in operators}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in self.calls:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            _keep(self.calls[func.name()], func, given)
        return func(*args, **(kwargs or {}))


def recorded(function: Function, calls: list[Call]) -> Function:
    """The function, which keeps its calls in the list: to be put where its callers look for it."""

    def call(*arguments: Any, **named: Any) -> Any:
        _keep(calls, function, signature(function).bind(*arguments, **named).arguments)
        return function(*arguments, **named)

    return call


def _keep(calls: list[Call], function: Function, given: Mapping[str, Any]) -> None:
    """Of calls that differ in tensors alone the first."""

    def plain(arguments: Mapping[str, Any]) -> str:
        return repr(tree_map_only(torch.Tensor, lambda x: "", dict(arguments)))

    if len(calls) < MOST_CALLS and all(plain(call.arguments) != plain(given) for call in calls):
        copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), dict(given))
        calls.append(Call(function, copies))
