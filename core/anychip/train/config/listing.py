"""Which settings are there? Read off the dataclasses: their fields, hints and docstrings."""

import inspect
import re
from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

from anychip.train.config.reading import KINDS, words_of
from anychip.train.config.settings import Config


class Setting(NamedTuple):
    """A setting; ``kind`` of its table, None where there are none; ``type`` in words."""

    key: str
    kind: str | None
    type: str
    default: Any
    meaning: str


def settings() -> list[Setting]:
    """Every setting, in the order of the tables; those of kinds one kind after the other."""
    hints, found = get_type_hints(Config), []
    for table in fields(Config):
        if table.name not in KINDS:
            found += _settings(table.name, hints[table.name], None)
            continue
        classes, default = KINDS[table.name]
        meaning = f"one of {', '.join(classes)}; the settings below follow from it"
        found.append(Setting(f"{table.name}.kind", None, "a string", default, meaning))
        for kind, cls in classes.items():
            found += _settings(table.name, cls, kind)
    return found


def _settings(table: str, cls: type[Any], kind: str | None) -> list[Setting]:
    hints, meanings, made = get_type_hints(cls), _meanings(cls), cls()
    return [
        Setting(f"{table}.{n}", kind, words_of(hints[n]), getattr(made, n), meanings.get(n, ""))
        for n in (f.name for f in fields(cls))
    ]


def _meanings(cls: type[Any]) -> dict[str, str]:
    """Field to its line in the class's docstring, or in that of a class that it extends."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for entry in re.split(r"\n(?= {4}\w)", section.strip("\n")):
            names, _, text = entry.partition(":")
            found |= dict.fromkeys(
                names.replace(",", " ").split(), " ".join(text.replace("``", "").split())
            )
    return found
