"""The chapters of the suite: one file each, a generator of cases."""

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping

from anychip.conformance.case import Case, Cases, Context

_ORDER = (
    "device", "memory", "streams", "operators", "gradients", "random", "collectives", "optimizer",
    "zero", "pipeline", "training", "errors",
)  # fmt: skip
CHAPTERS: Mapping[str, Cases] = {
    name: importlib.import_module(f"{__name__}.{name}").cases for name in _ORDER
}


def check_chapters(names: Iterable[str]) -> tuple[str, ...]:
    """The chapters asked for, in the suite's order; all for none.

    Raises:
        ValueError: there is no such chapter; with the nearest name and all of them.
    """
    asked = set(names)
    for name in sorted(asked - set(CHAPTERS)):
        near = difflib.get_close_matches(name, CHAPTERS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no chapter {name!r}; {hint}this version has {', '.join(CHAPTERS)}"
        )
    return tuple(name for name in CHAPTERS if name in asked or not asked)


def all_cases(context: Context, chapters: Iterable[str] = ()) -> Iterator[Case]:
    """The cases of some chapters, of both levels."""
    for name in check_chapters(chapters):
        yield from CHAPTERS[name](context)
