"""Runs a row. Did it give what its operator promises, and leave torch's settings as they were?

Looked at on the first call with a key and on one of many after it, always under ``strict``: a
result of a wrong dtype would otherwise be reported as the next operator's wrong use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anychip.contract import ContractError, settings
from anychip.dispatch.agreement import like_of, without_data
from anychip.dispatch.mutation import tensors_of
from anychip.dispatch.resolution import Choice, stray
from anychip.dispatch.signature import Signature

_signature = cache(Signature.parse)


class _Promise(NamedTuple):
    """One result; ``like`` has its dtype and shape, and is None where nobody can tell them."""

    name: str
    like: Tensor | None
    wanted: bool = True


def run(choice: Choice, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """What a chosen row gives for one call.

    Raises:
        ContractError: it broke its promise, or raised what would end the process.
    """
    try:
        if choice.turn() & choice.unexamined:
            return choice.function(*args, **attrs)
        return examined(choice, args, attrs)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise stray(choice.title, error) from error


def refuse_end(choice: Choice, error: BaseException) -> None:
    """Raises what :func:`run` does for an error that would end the process."""
    raise stray(choice.title, error) from error


def examined(choice: Choice, args: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Runs a row and looks at what it gave.

    Raises:
        ContractError: results of another number, dtype, shape or device than the spec says, or a
            setting of torch's that is not as it was before.
    """
    with settings.unchanged(choice.title):
        found = choice.function(*args, **attrs)
    device = next((t.device for t in tensors_of(args, range(len(args)))), None)
    if choice.row.direction == "backward":
        promised, came = list(_gradients(choice, args, attrs)), found
    else:
        promised, came = list(_results(choice, args, attrs)), _signature(choice.spec).results(found)
    fits = isinstance(came, (tuple, list)) and len(came) == len(promised)
    if not fits or any(_differs(p, c, device) for p, c in zip(promised, came, strict=True)):
        raise ContractError(_text(choice, promised, found, device))
    return found


def _results(choice: Choice, args: Sequence[Any], attrs: Mapping[str, Any]) -> Iterator[_Promise]:
    spec, pair = choice.spec, choice.row.paired
    signature, given = _signature(spec), [without_data(a) for a in args]
    results = list(signature.results(spec.fake(*given, **attrs)))
    count = signature.num_outputs
    names = ["y"] if count == 1 else [f"y{i}" for i in range(count)]
    if pair is None:
        names += [r.name for r in spec.residuals]
    else:
        results[count:] = signature.results(pair.fake_residuals(*given, **attrs))
        names += [f"residual {i} of its own" for i in range(pair.num_residuals)]
    for name, result in zip(names, results, strict=False):
        yield _Promise(name, result, wanted=result is not None)


def _gradients(choice: Choice, args: Sequence[Any], attrs: Mapping[str, Any]) -> Iterator[_Promise]:
    """A gradient is like its argument, or like what the spec says has the argument's shape."""
    spec, pair = choice.spec, choice.row.paired
    own = {r.name for r in spec.residuals} if pair else set()
    grads = (f"grad{i}" for i in range(_signature(spec).num_outputs))
    given = dict(zip([*grads, *(n for n in spec.saved if n not in own)], args, strict=False))
    likes = [like_of(spec, given, name) for name in spec.differentiable]
    unknown = any(
        n not in given and a is None for n, a in zip(spec.differentiable, likes, strict=True)
    )
    if unknown and not pair and spec.backward is not None:
        with suppress(RuntimeError):  # a reference that needs values has no gradient without data
            reference = spec.backward(*map(without_data, args), **attrs)
            likes = [r if a is None else a for a, r in zip(likes, reference, strict=True)]
    return map(_Promise, spec.differentiable, likes, attrs["needs"])


def _differs(promise: _Promise, came: Any, device: torch.device | None) -> bool:
    if not promise.wanted:
        return False
    if not isinstance(came, Tensor) or (device is not None and came.device != device):
        return True
    like = promise.like
    return like is not None and (came.dtype, came.shape) != (like.dtype, like.shape)


def _text(
    choice: Choice, promised: Sequence[_Promise], found: Any, device: torch.device | None
) -> str:
    wanted = [f"{p.name}: {_form(p.like, 'a tensor') if p.wanted else 'any'}" for p in promised]
    number = f"{len(wanted)} result{'' if len(wanted) == 1 else 's'}"
    place = "" if device is None else f" on {device}"
    listed = found if isinstance(found, (tuple, list)) else [found]
    got = ", ".join(_form(f) + (f" on {f.device}" if isinstance(f, Tensor) else "") for f in listed)
    return (
        f"{choice.title} broke its promise of {number}{place} "
        f"({', '.join(wanted) or 'it writes in place'}): it returned "
        f"{f'{len(listed)} ({got})' if listed is found else got}"
    )


def _form(value: Any, none: str = "None") -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return none if value is None else f"a {type(value).__name__}"
