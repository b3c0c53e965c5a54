"""Has a value that came from a file the form that is expected? Asked before anything is changed.

A form is a type (exactly: ``True`` is no int), a :class:`Check`, ``[form]`` for a list, or a dict
of forms by name: ``"name?"`` may be missing, a type stands for all other keys, of that type.
"""

from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

Form = Any


class Check(NamedTuple):
    """What is expected in words, and whether a value is it."""

    words: str
    fits: Callable[[Any], bool]


def _is_tensor(value: Any) -> bool:
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided
    return is_dense and not (value.is_meta or value.is_quantized or value.is_nested)


def _is_option(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(not isinstance(v, (list, tuple)) and _is_option(v) for v in value)
    is_text = value is None or isinstance(value, str)
    return is_text or _is_tensor(value) or (isinstance(value, (int, float)) and isfinite(value))


ANY = Check("anything", lambda value: True)
COUNT = Check("a whole number from 0", lambda value: type(value) is int and 0 <= value < 1 << 62)
TENSOR = Check("a dense tensor", _is_tensor)
BYTES = Check("bytes", lambda v: _is_tensor(v) and v.dtype == torch.uint8 and v.dim() == 1)
OPTION = Check("a number, a text, or a few of them", _is_option)


def optional(rule: Check) -> Check:
    """The rule, or None."""
    return Check(f"{rule.words}, or None,", lambda value: value is None or rule.fits(value))


def check(value: Any, form: Form, where: str) -> None:
    """Says where a value is not of its form.

    Raises:
        ValueError: with the place, what was expected and what came.
    """
    if isinstance(form, Check):
        _require(form.fits(value), form.words, value, where)
    elif isinstance(form, list):
        _require(type(value) is list, "a list", value, where)
        for index, entry in enumerate(value):
            check(entry, form[0], f"{where}[{index}]")
    elif isinstance(form, dict):
        _check_dict(value, form, where)
    else:
        _require(type(value) is form, form.__name__, value, where)


def _check_dict(value: Any, form: dict[Any, Form], where: str) -> None:
    _require(isinstance(value, dict), "a dict", value, where)
    others = next((key for key in form if isinstance(key, type)), None)
    named = {key.removesuffix("?"): inner for key, inner in form.items() if key is not others}
    for name in named:
        is_there = name in value or name not in form
        _require(is_there, f"an entry {name!r}", [*map(_shown, value)][:9], where)
    for key, entry in value.items():
        if isinstance(key, str) and key in named:
            check(entry, named[key], f"{where}[{key!r}]")
        elif others is not None:
            check(key, others, f"a name in {where}")
            check(entry, form[others], f"{where}[{_shown(key)}]")


def _require(is_right: bool, words: str, value: Any, where: str) -> None:
    if not is_right:
        raise ValueError(f"{where}: {words} expected, got {_shown(value)}")


def _shown(value: Any) -> str:
    """A line at most; and nothing deep, which repr does not survive."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return ", ".join(value)
    is_plain = value is None or isinstance(value, (float, str))
    is_plain = is_plain or (isinstance(value, int) and abs(value) < 1 << 99)
    return f"{value!r:.60}" if is_plain else f"a {type(value).__name__}"
