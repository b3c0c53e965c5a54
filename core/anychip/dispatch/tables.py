"""What is wrong with a table, before any of its rows is called? A wrong row would serve nobody.

Operators' names, limits against the sizes that a spec names, dtypes, signatures, and the number of
results where a row's annotations tell. What a row computes is the conformance suite's question.
"""

import difflib
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from anychip.contract import HOST, OperatorSpec, OperatorTable, Row, SampleMaker
from anychip.dispatch.operator import check_names, registered
from anychip.dispatch.resolution import named
from anychip.dispatch.signature import Signature


def faults(table: OperatorTable) -> list[str]:
    """Every row that could not serve a call, and why, in one line each."""
    return [
        f"{row.operator} {row.direction}, {row.label}: {fault}"
        for row in table
        for fault in _faults(row)
    ]


def _faults(row: Row) -> Iterator[str]:
    try:
        check_names([row.operator])
    except ValueError as error:
        yield str(error)
        return
    operator = registered()[row.operator]
    spec, signature = operator.spec, operator.signature
    yield from _limits(row, spec, signature)
    if row.direction == "backward" and spec.backward is None:
        yield f"{spec.name} has no gradient"
        return
    own = row.paired.num_residuals if row.paired else len(spec.residuals)
    arguments, attrs = signature.positional, signature.attr_names
    grads = tuple(f"grad{i}" for i in range(signature.num_outputs))
    forward = arguments, attrs, signature.num_outputs + own
    backward = (*grads, *spec.saved), (*attrs, "needs"), len(spec.differentiable)
    called = forward if row.direction == "forward" else backward
    yield from _dtypes(row, spec, called[0])
    yield from _function(row.function, *called)
    if row.accepts is not None:
        yield from _function(row.accepts, *called[:2], None)
    if row.paired is not None:
        canonical = {residual.name for residual in spec.residuals}
        saved = [n for n in spec.saved if n not in canonical] + [f"own{i}" for i in range(own)]
        yield from _function(row.paired.backward, (*grads, *saved), *backward[1:])
        yield from _function(row.paired.fake_residuals, arguments, attrs, own)


def _dtypes(row: Row, spec: OperatorSpec, names: Sequence[str]) -> Iterator[str]:
    if row.dtypes is not None and not isinstance(row.dtypes, Mapping):
        if not row.dtypes & named(spec.free_dtypes):
            listed = sorted(map(str, row.dtypes)) or "none"
            yield f"it takes no float type of {spec.name}: dtypes are {listed}"
        return
    for name, taken in (row.dtypes or {}).items():
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it is given {', '.join(names)}"
            yield f"dtypes speak of {name!r}; {hint}"
        elif not taken & named(spec.dtypes_of(name)):
            yield f"it takes no type of {name}: {' or '.join(spec.dtypes_of(name))}"


def _limits(row: Row, spec: OperatorSpec, signature: Signature) -> Iterator[str]:
    sizes = size_names(spec)
    for name, allowed in row.limits.items():
        if name not in sizes:
            near = difflib.get_close_matches(name, sizes, 1)
            known = f"the sizes of {spec.name} are {', '.join(sizes) or 'none'}"
            yield f"limits speak of {name!r}; {f'did you mean {near[0]!r}?' if near else known}"
        if not isinstance(allowed, (range, set, frozenset)) or not allowed:
            yield f"the limit of {name!r} must be a range or a set with a size in it: {allowed!r}"
    given = zip(signature.positional, signature.optional, strict=True)
    lost = [name for name, may in given if not may and name not in spec.saved]
    if row.limits and row.direction == "backward" and lost:
        yield f"it cannot have limits, since it is not given {', '.join(lost)}; use accepts"


@cache
def size_names(spec: OperatorSpec) -> tuple[str, ...]:
    """Names of the sizes that limits may speak of, from the spec's first sample."""
    if spec.sizes is None:
        return ()
    sample = next(iter(spec.samples(SampleMaker(torch.device(HOST), torch.float32))), None)
    if sample is None:
        return ()
    args, attrs = Signature.parse(spec).bind(sample.args, sample.attrs)
    return tuple(spec.sizes(*args, **attrs))


def _function(
    function: Callable[..., Any], names: Sequence[str], keywords: Sequence[str], count: int | None
) -> Iterator[str]:
    """Whether a function can be called so, and its annotation promises so many results."""
    what = getattr(function, "__name__", repr(function))
    try:
        parameters = inspect.signature(function)
    except (ValueError, TypeError):  # compiled code need not say how it is called
        return
    try:
        parameters.bind(*names, **dict.fromkeys(keywords))
    except TypeError as error:
        call = ", ".join([*names, *(f"{name}=" for name in keywords)])
        yield f"{what}{parameters} is called as {what}({call}): {error}"
    promised = _promised(function)
    if count is not None and promised not in (None, count):
        yield f"{what} returns {promised} results by its annotation, and {count} are expected"


def _promised(function: Callable[..., Any]) -> int | None:
    """How many results a function's annotation promises; None where it does not tell."""
    try:
        kind = typing.get_type_hints(function).get("return", Any)
    except Exception:  # names that exist for type checkers only, and whatever else stands there
        return None
    if kind in (Tensor, type(None)):
        return int(kind is Tensor)
    parts = typing.get_args(kind)
    is_fixed = typing.get_origin(kind) is tuple and Ellipsis not in parts
    return len(parts) if is_fixed else None
