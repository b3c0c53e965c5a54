"""A call's label says what the call is: ``3x17.p:0.1`` is its id, and all there is to it.

The words between the dots stand for options of what makes the operator's arguments. ``3x17`` and
``scalar`` are a shape, ``name:number`` is the option of that name, ``huge``, ``tiny`` and
``subnormal`` are a scale. An operator may have words, and forms of words, of its own. Where tensors
lie is no part of it, but a factor of the designs (:mod:`.designs`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anychip.conformance.calls import Call

Options = Mapping[str, Any]
Forms = Mapping[str, Sequence[str] | Callable[..., Options]]
_SCALES = {name: {"scale": name} for name in ("huge", "tiny", "subnormal")}
_REAL = ("eps", "p", "scale")
"""Options whose numbers are not whole."""
_WORD = re.compile(r"[^.:]+(?::[^.]*(?:\.\d+(?:e-?\d+)?(?=\.|$))?)?")
"""Up to a dot that is not one of a number behind a colon."""
ROOTS = {name: {"scale": f"root-{name}"} for name in ("huge", "tiny")}
"""Words for scales at which a product of two numbers still fits."""


def lengths(text: str) -> Options:
    """``4+0+3``, or ``none``."""
    return {"lengths": tuple(map(int, re.findall(r"\d+", text)))}


@dataclass(frozen=True, slots=True)
class Labels:
    """How an operator's labels are read.

    Attributes:
        words: of its own, with the options that each stands for.
        forms: patterns of words of its own, with the names of the whole numbers in them, or what
            makes options of the texts of its groups.
    """

    words: Mapping[str, Options] = field(default_factory=dict)
    forms: Forms = field(default_factory=dict)

    def __call__(
        self, make: Any, text: str, *, ends: Sequence[str] = ("",), **flags: Any
    ) -> Iterator[Call]:
        """A call per label of a text.

        Args:
            make: ``make(draw, **options)`` gives the arguments.
            ends: of each label, one after the other.
            flags: of every call.
        """
        for label in (f"{label}{end}" for label in text.split() for end in ends):
            words = _WORD.findall(label)
            options = {key: v for word in words for key, v in self._options(word).items()}
            sized = all(map(_is_size, words))
            yield Call(label, partial(make, **options), sized=sized, **flags)

    def _options(self, word: str) -> Options:
        """What a word stands for."""
        known = {**_SCALES, **self.words}
        if word in known:
            return known[word]
        for form, meaning in self.forms.items():
            found = re.fullmatch(form, word)
            if found and callable(meaning):
                return meaning(*found.groups())
            if found:
                return dict(zip(meaning, map(int, found.groups()), strict=True))  # type: ignore[arg-type]
        if re.fullmatch(r"scalar|\d+(x\d+)*", word):
            return {"shape": tuple(map(int, re.findall(r"\d+", word)))}
        name, _, number = word.partition(":")
        return {name: float(number) if name in _REAL else int(number)}


def _is_size(word: str) -> bool:
    """Whether a word says sizes and nothing else."""
    return re.fullmatch(r"[\dx+of-]+", word) is not None


PLAIN = Labels()
