"""How are settings written? As TOML, and as ``key=value`` on the command line.

Every setting has a name of two parts, ``model.width``, a default, and a check beside it. A key that
does not exist, or a value that cannot be, is answered with where it came from and what was meant.
"""

import difflib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

from anychip.train.config.settings import (
    LR_SCHEDULES,
    MODELS,
    OF_MODEL,
    OPTIMIZERS,
    Config,
    ConfigError,
)

KINDS: Mapping[str, tuple[Mapping[str, type[Any]], str]] = {
    "model": (MODELS, "gpt"),
    "optimizer": (OPTIMIZERS, "adamw"),
    "schedule": (LR_SCHEDULES, "cosine"),
}
"""Tables whose settings depend on their ``kind``: the kinds that there are, and the default."""
FINE_TUNING_LR, LORA_LR = 2e-5, 2e-4
"""Learning rates of a model in a directory where nobody says one."""
_PATH, _PRETRAINED = "model.path", "pretrained"
_LIST, _NUMBERS = tuple[str, ...], tuple[float, ...]


class _Entry(NamedTuple):
    """A value as it was written, and where."""

    value: Any
    origin: str


def load(
    path: Path | None = None,
    settings: Sequence[str] = (),
    *,
    note: Callable[[str], object] = warnings.warn,
) -> Config:
    """The configuration of a file, changed by ``key=value`` settings.

    Args:
        path: a TOML file with tables like ``[model]``; None: the defaults.
        settings: like ``model.width=256``; values are TOML, quotes of a string may be left out.
            Another ``kind`` than the file's leaves out what only the file's kind has.
        note: gets a line that says what was left out.

    Raises:
        ConfigError: with the key, where it stands, what was expected, and the nearest right key.
        FileNotFoundError: there is no such file.
    """
    given: dict[str, _Entry] = {}
    if path is not None:
        given |= {key: _Entry(value, str(path)) for key, value in _flatten(_read(path))}
        _imply_kind(given)
    chosen = _parse(settings)
    _imply_kind(chosen)
    for name in KINDS:
        if path is not None and f"{name}.kind" in chosen:
            _leave_out(name, given, chosen[f"{name}.kind"], note)
    given |= chosen
    _imply_defaults(given, note)
    kinds = {
        name: given.pop(f"{name}.kind", _Entry(default, "default"))
        for name, (_, default) in KINDS.items()
    }
    sections = _sections(kinds)
    known = [f"{name}.{f.name}" for name, cls in sections.items() for f in fields(cls)]
    for key, entry in given.items():
        if key not in known:
            advice = _of_another_model(key, kinds["model"]) or _near(key, known)
            raise ConfigError(f"{entry.origin}: there is no setting {key!r}{advice}")
    return Config(**{name: _section(name, cls, given) for name, cls in sections.items()})


def _imply_kind(given: dict[str, _Entry]) -> None:
    """A directory says what kind of model it has."""
    if _PATH in given:
        given.setdefault("model.kind", _Entry(_PRETRAINED, given[_PATH].origin))


def _imply_defaults(given: dict[str, _Entry], note: Callable[[str], object]) -> None:
    """Of a directory's model: its tokenizer, and a rate that does not undo what it has learnt."""
    if _PATH not in given or given["model.kind"].value != _PRETRAINED:
        return
    given.setdefault("data.tokenizer", _Entry(OF_MODEL, "default"))
    if given.keys().isdisjoint(("optimizer.kind", "optimizer.lr")):
        has_adapters = given.get("model.lora_rank", _Entry(0, "")).value
        rate = LORA_LR if has_adapters else FINE_TUNING_LR
        given["optimizer.lr"] = _Entry(rate, "default")
        note(f"optimizer.lr = {rate:g}, the default for a model of a directory")


def _of_another_model(key: str, kind: _Entry) -> str:
    """What to say of a size that a directory has said already."""
    others = {f"model.{f.name}" for cls in MODELS.values() for f in fields(cls)}
    if kind.value != _PRETRAINED or key not in others:
        return ""
    return f" of a model in a directory, whose config.json says it; leave it out ({kind.origin})"


def _leave_out(
    table: str, given: dict[str, _Entry], chosen: _Entry, note: Callable[[str], object]
) -> None:
    """Takes out of a file's settings those of its kind that the chosen kind does not have."""
    classes, default = KINDS[table]
    before = given.get(f"{table}.kind", _Entry(default, "")).value
    if chosen.value not in classes or before not in classes:
        return  # a mistake, which is told of later
    old, new = ({f"{table}.{f.name}" for f in fields(classes[k])} for k in (before, chosen.value))
    left_out = {key: given.pop(key) for key in sorted(old - new) if key in given}
    kept = [f"{key} = {given[key].value!r}" for key in sorted(new & given.keys())]
    if left_out:
        origin = next(iter(left_out.values())).origin
        note(
            f"{chosen.origin}: {', '.join(left_out)} of {origin} are settings of {before!r}, and "
            f"left out; {', '.join(kept) or 'nothing'} of it is kept"
        )


def dump(config: Config) -> str:
    """The configuration as TOML, every setting written out; ``load`` gives it back."""
    document = tomlkit.document()
    for name, values in asdict(config).items():
        table = tomlkit.table()
        if name in KINDS:
            classes, mine = KINDS[name][0], type(getattr(config, name))
            table.add("kind", next(kind for kind, cls in classes.items() if cls is mine))
        for key, value in values.items():
            if value is not None:  # TOML has no word for it; leaving it out says the same
                table.add(key, list(value) if isinstance(value, tuple) else value)
        document.add(name, table)
    return tomlkit.dumps(document)


def _sections(kinds: Mapping[str, _Entry]) -> dict[str, type[Any]]:
    """Class of each table; some depend on their kind."""
    classes = {f.name: get_type_hints(Config)[f.name] for f in fields(Config)}
    for name, kind in kinds.items():
        known = KINDS[name][0]
        if not isinstance(kind.value, str) or kind.value not in known:
            raise ConfigError(
                f"{kind.origin}: {name}.kind must be one of {', '.join(known)}, got {kind.value!r}"
            )
        classes[name] = known[kind.value]
    return classes


def _section(name: str, cls: type[Any], given: Mapping[str, _Entry]) -> Any:
    hints = get_type_hints(cls)
    mine = {f.name: given[key] for f in fields(cls) if (key := f"{name}.{f.name}") in given}
    values = {key: _typed(f"{name}.{key}", hints[key], entry) for key, entry in mine.items()}
    try:
        return cls(**values)
    except ValueError as error:
        origins = ", ".join(dict.fromkeys(entry.origin for entry in mine.values()))
        raise ConfigError(f"{origins or 'default'}: [{name}] {error}") from None


def _typed(key: str, wanted: Any, entry: _Entry) -> Any:
    """The value, if it is of the type that a dataclass asks for."""
    value = entry.value
    if wanted in (float, float | None) and type(value) is int:
        value = float(value)
    options = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    if _LIST in options and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if wanted == _NUMBERS and isinstance(value, list):
        numbers = [v for v in value if type(v) in (int, float) and math.isfinite(v)]
        if len(numbers) == len(value):
            return tuple(map(float, numbers))
    # type(), because True is an int for isinstance, and "layers = true" is a mistake.
    if type(value) in options and not (isinstance(value, float) and not math.isfinite(value)):
        return value
    examples = {_LIST: ', like ["a.txt", "b.txt"],', _NUMBERS: ", like [0.7, 0.3],"}
    example = examples.get(wanted, "")
    raise ConfigError(f"{entry.origin}: {key}: {words_of(wanted)}{example} expected, got {value!r}")


def words_of(wanted: Any) -> str:
    """The type that a dataclass asks for, in words."""
    names: dict[Any, str] = {bool: "true or false", int: "an integer", float: "a finite number"}
    names |= {str: "a string", _LIST: "a list of strings", NoneType: ""}
    names |= {_NUMBERS: "a list of numbers"}
    options = get_args(wanted) if isinstance(wanted, UnionType) else (wanted,)
    return " or ".join(filter(None, (names[option] for option in options)))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomlkit.parse(path.read_text(encoding="utf-8")).unwrap()
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _flatten(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(table.key, value) for each; what stands outside of a table keeps its bare name."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", item) for key, item in value.items())
        else:
            yield name, value


def _parse(settings: Sequence[str]) -> dict[str, _Entry]:
    given: dict[str, _Entry] = {}
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"a setting is key=value, like model.width=256; got {setting!r}")
        key = key.strip()
        if key in given:
            raise ConfigError(f"{key} is given twice: {given[key].origin!r} and {setting!r}")
        given[key] = _Entry(_value(text.strip()), setting)
    return given


def _value(text: str) -> Any:
    try:
        return tomlkit.parse(f"value = {text}").unwrap()["value"]
    except TOMLKitError:
        return text


def _near(key: str, known: Sequence[str]) -> str:
    """The right key that is most like a wrong one, as an advice."""
    section, _, last = key.rpartition(".")
    mine = [name for name in known if name.startswith(f"{section}.")]
    tails = {name.rpartition(".")[2]: name for name in (*reversed(known), *mine)}
    if near := difflib.get_close_matches(last, tails, n=1):
        return f"; did you mean {tails[near[0]]!r}?"
    return f"; there are {', '.join(mine or known)}"
