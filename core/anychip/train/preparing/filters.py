"""Which documents are worth training on? Filters say it, by one small interface.

A filter is an entry point of the group ``anychip.filters``: ``--filter name:option=value`` makes
its class with these options. Ours stand there like anybody's. For users and authors: docs/data.md.

Source of the duplicates: Broder, "On the resemblance and containment of documents" (1997). Of the
languages: py3langid, whose model comes with it (Lui and Baldwin, "langid.py", 2012).
"""

import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import metadata
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from anychip.contract import AnychipError
from anychip.registry.loading import describe
from anychip.train.data import MissingExtraError
from anychip.train.data.extra import require

GROUP = "anychip.filters"
_CHARACTERS = 4096
_SHINGLE, _BANDS, _ROWS = 8, 16, 8
_PRIME = np.uint64(0xFF51AFD7ED558CCD)


class FilterError(AnychipError, ValueError):
    """There is no filter of a name, it does not have an option, or it cannot be made."""


class Filter(ABC):
    """Says which documents stay. Made with its options in every process.

    Attributes:
        in_order: what it keeps depends on the documents before: one process asks ``keeps``, in
            order. Otherwise whichever process has measured does.
    """

    in_order: ClassVar[bool] = False

    @abstractmethod
    def measure(self, documents: Sequence[Any]) -> list[Any]:
        """Of each document, a text or a list of messages, what JSON has a word for."""

    @abstractmethod
    def keeps(self, measure: Any) -> bool:
        """Whether the document with this measure stays."""

    def state(self) -> NDArray[Any]:
        """What it knows of the documents before, where ``in_order``."""
        return np.empty(0)

    def restore(self, state: NDArray[Any]) -> None:
        """Goes on from such a state; who decides in order says how."""
        if self.in_order:
            raise FilterError(f"{type(self).__name__} decides in order, and has no restore()")


class Bounds(Filter):
    """What a measure has to be at least and at most; a document without one does not stay."""

    def __init__(self, least: float = -math.inf, most: float = math.inf) -> None:
        if not (isinstance(least, (int, float)) and isinstance(most, (int, float))):
            raise ValueError(f"numbers expected, got least={least!r} and most={most!r}")
        if not least <= most:
            raise ValueError(f"least at most as large as most expected, got {least} and {most}")
        self.least, self.most = least, most

    def keeps(self, measure: Any) -> bool:
        return measure is not None and self.least <= measure <= self.most


class Length(Bounds):
    """By characters."""

    def measure(self, documents: Sequence[Any]) -> list[Any]:
        return [len(text_of(document)) for document in documents]


class Language(Bounds):
    """By the probability that a text is in one of some languages.

    Args:
        only: their codes of ISO 639, like "en" or "de+fr".
        least, most: of the sum of their probabilities, by the first 4096 characters.
    """

    def __init__(self, only: str, least: float = 0.5, most: float = 1.0) -> None:
        super().__init__(least, most)
        library = require("py3langid.langid", "the filter language")
        self._identifier = library.LanguageIdentifier.from_model_file(
            library.MODEL_FILE, norm_probs=True
        )
        self._only, known = str(only).split("+"), sorted(self._identifier.labels)
        if wrong := [code for code in self._only if code not in known]:
            raise ValueError(f"there is no language {wrong[0]!r}; there are: {', '.join(known)}")

    def measure(self, documents: Sequence[Any]) -> list[Any]:
        ranked = [dict(self._identifier.rank(text_of(d)[:_CHARACTERS])) for d in documents]
        # The sum of rounded probabilities of all languages is a little more than 1.
        return [min(1.0, sum(each[code] for code in self._only)) for each in ranked]


class Duplicates(Filter):
    """Leaves out what is nearly the text of an earlier document, by MinHash.

    Of two texts whose sets of 8 bytes (small letters, single spaces) are alike by a Jaccard
    similarity of 0.8, the second is found with a probability of 0.95, of 0.9 nearly always, of 0.5
    of 0.06. Memory is fixed: 128 bytes for each of the documents that are remembered; of more,
    earlier ones are forgotten.
    """

    in_order = True

    def __init__(self, remember: int = 1 << 18) -> None:
        if not isinstance(remember, int) or remember < 1:
            raise ValueError(f"remember must be a whole number of at least 1, got {remember!r}")
        self._seen = np.zeros((_BANDS, remember), np.uint64)
        generator = np.random.default_rng(0)
        self._factors = generator.integers(1 << 62, size=_BANDS * _ROWS).astype(np.uint64) * 2 + 1

    def measure(self, documents: Sequence[Any]) -> list[Any]:
        return [self._bands(text_of(document)) for document in documents]

    def _bands(self, text: str) -> list[int]:
        content = " ".join(text.lower().split()).encode("utf-8").ljust(_SHINGLE, b"\0")
        shingles = np.lib.stride_tricks.sliding_window_view(
            np.frombuffer(content, np.uint8), _SHINGLE
        )
        mixed = np.ascontiguousarray(shingles).view(np.uint64).ravel() * _PRIME
        mixed ^= mixed >> np.uint64(32)
        lowest = np.array([(mixed * f >> np.uint64(32)).min() for f in self._factors], np.uint32)
        return [
            int.from_bytes(hashlib.blake2b(band.tobytes(), digest_size=8).digest(), "little") | 1
            for band in lowest.reshape(_BANDS, _ROWS)
        ]

    def keeps(self, measure: Any) -> bool:
        bands = np.array(measure, np.uint64)
        places = np.arange(_BANDS), (bands % np.uint64(self._seen.shape[1])).astype(np.int64)
        if (self._seen[places] == bands).any():
            return False
        self._seen[places] = bands
        return True

    def state(self) -> NDArray[Any]:
        return self._seen

    def restore(self, state: NDArray[Any]) -> None:
        self._seen = state.astype(np.uint64)


def text_of(document: Any) -> str:
    """A text as it is; of messages what they say, one below the other."""
    if isinstance(document, str):
        return document
    return "\n".join(str(message.get("content", "")) for message in document)


def make(names: Sequence[str]) -> list[Filter]:
    """The filters of texts like ``length:least=200,most=100000``.

    Raises:
        FilterError: there is none of a name, or several; an option is wrong; it cannot be made.
        MissingExtraError: its library is not installed.
    """
    return [_make(*_parsed(name)) for name in names]


def _parsed(text: str) -> tuple[str, dict[str, Any]]:
    name, _, rest = text.partition(":")
    options = dict[str, Any]()
    for option in filter(None, rest.split(",")):
        key, sign, value = option.partition("=")
        if not sign or key in options:
            raise FilterError(f"filter {text!r}: name:option=value,option=value expected")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _make(name: str, options: dict[str, Any]) -> Filter:
    there = metadata.entry_points(group=GROUP)
    claims = {entry.value: entry for entry in there if entry.name == name}
    if len(claims) != 1:
        text = f"there is no filter {name!r}; there are: {', '.join(sorted(there.names))}"
        if claims:
            text = f"{name!r} is {' and '.join(sorted(claims))}; uninstall all but one"
        raise FilterError(text)
    (entry,) = claims.values()
    try:
        made = entry.load()
        known = list(inspect.signature(made).parameters)
        if wrong := [key for key in options if key not in known]:
            raise ValueError(f"there is no option {wrong[0]!r}; there are: {', '.join(known)}")
        found = made(**options)
        if not isinstance(found, Filter):
            raise TypeError(f"{__name__}.Filter expected, got {type(found).__name__}")
    except MissingExtraError:
        raise
    except (Exception, SystemExit) as error:
        raise FilterError(f"filter {name!r} ({entry.value}): {describe(error)}") from error
    return found
