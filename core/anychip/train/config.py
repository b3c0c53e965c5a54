"""What does a run consist of? Its settings: frozen dataclasses, read from TOML and ``key=value``.

Every setting has a name of two parts, ``model.width``, a default, and a check beside it. A key that
does not exist, or a value that cannot be, is answered with where it came from and what was meant.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import tomlkit
from tomlkit.exceptions import TOMLKitError

from anychip.contract import AnychipError
from anychip.train.data import VOCAB_SIZE
from anychip.train.models import GPTConfig, LlamaConfig

MODELS: Mapping[str, type[GPTConfig] | type[LlamaConfig]] = {"gpt": GPTConfig, "llama": LlamaConfig}
"""Values of ``model.kind`` and the settings that each has."""


class ConfigError(AnychipError, ValueError):
    """A setting does not exist, has the wrong type, or a value that cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run as a whole.

    Attributes:
        steps: updates of the parameters, counted from the start of the first run.
        seed: of initial weights, order of the data, dropout and the sample.
        precision: fp32, bf16, or auto: what the backend says is fast.
        backend: name of the backend; None: the argument, the environment, or the best one here.
        sample_bytes: length of the text that the trained model writes.
    """

    steps: int = 500
    seed: int = 0
    precision: str = "auto"
    backend: str | None = None
    sample_bytes: int = 300

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps)
        _at_least(0, seed=self.seed, sample_bytes=self.sample_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read.

    Attributes:
        files: texts, read one after the other; none: the documentation that comes with Python.
        batch_size: sequences in one forward pass; each is ``model.context`` bytes.
        accumulation: forward passes whose mean gradient makes one update.
    """

    files: tuple[str, ...] = ()
    batch_size: int = 16
    accumulation: int = 1

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, accumulation=self.accumulation)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW behind clipping by the global norm.

    Attributes:
        lr: the highest learning rate; the schedule says when.
        weight_decay: of matrices; norms and biases have none.
        max_norm: the gradient's norm is clipped to it; 0 does not clip.
        stage: of ZeRO, 0 to 2.
    """

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    stage: int = 0

    def __post_init__(self) -> None:
        _at_least(0, lr=self.lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(
                    f"{name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        if not self.eps > 0.0:
            raise ValueError(f"eps must be greater than 0, got {self.eps}")
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Warm-up, then half a cosine over the rest of ``run.steps``.

    Attributes:
        warmup: the part of all steps in which the learning rate rises, from 0 to 1.
        final: the last learning rate as a part of the highest, from 0 to 1.
    """

    warmup: float = 0.1
    final: float = 0.1

    def __post_init__(self) -> None:
        for name in ("warmup", "final"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved; at its end and on Ctrl-C it always is.

    Attributes:
        every: steps from one checkpoint to the next.
    """

    every: int = 100

    def __post_init__(self) -> None:
        _at_least(1, every=self.every)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: GPTConfig | LlamaConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self) -> None:
        if self.model.vocab_size < VOCAB_SIZE:
            raise ConfigError(
                f"model.vocab_size must be at least {VOCAB_SIZE}, since a token is a byte; got "
                f"{self.model.vocab_size}"
            )


class _Entry(NamedTuple):
    """A value as it was written, and where."""

    value: Any
    origin: str


def load(path: Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The configuration of a file, changed by ``key=value`` settings.

    Args:
        path: a TOML file with tables like ``[model]``; None: the defaults.
        settings: like ``model.width=256``; values are TOML, quotes of a string may be left out.

    Raises:
        ConfigError: with the key, where it stands, what was expected, and the nearest right key.
        FileNotFoundError: there is no such file.
    """
    given: dict[str, _Entry] = {}
    if path is not None:
        given |= {key: _Entry(value, str(path)) for key, value in _flatten(_read(path))}
    given |= _parse(settings)
    kind = given.pop("model.kind", _Entry("gpt", "default"))
    sections = _sections(kind)
    known = [f"{name}.{f.name}" for name, cls in sections.items() for f in fields(cls)]
    for key, entry in given.items():
        if key not in known:
            raise ConfigError(f"{entry.origin}: there is no setting {key!r}{_near(key, known)}")
    return Config(**{name: _section(name, cls, given) for name, cls in sections.items()})


def dump(config: Config) -> str:
    """The configuration as TOML, every setting written out; ``load`` gives it back."""
    document = tomlkit.document()
    for name, values in asdict(config).items():
        table = tomlkit.table()
        if name == "model":
            kind = next(kind for kind, cls in MODELS.items() if type(config.model) is cls)
            table.add("kind", kind)
        for key, value in values.items():
            if value is not None:  # TOML has no word for it; leaving it out says the same
                table.add(key, list(value) if isinstance(value, tuple) else value)
        document.add(name, table)
    return tomlkit.dumps(document)


def _sections(kind: _Entry) -> dict[str, type[Any]]:
    """Class of each table; which one describes the model depends on its kind."""
    if not isinstance(kind.value, str) or kind.value not in MODELS:
        raise ConfigError(
            f"{kind.origin}: model.kind must be one of {', '.join(MODELS)}, got {kind.value!r}"
        )
    return {
        f.name: MODELS[kind.value] if f.name == "model" else get_type_hints(Config)[f.name]
        for f in fields(Config)
    }


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
    if wanted == tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        expected = 'a list of strings, like ["a.txt", "b.txt"],'
    else:
        # type(), because True is an int for isinstance, and "layers = true" is a mistake.
        options = getattr(wanted, "__args__", (wanted,))
        if type(value) in options and not (isinstance(value, float) and not math.isfinite(value)):
            return value
        names = {int: "an integer", float: "a finite number", str: "a string"}
        expected = names[options[0]]
    raise ConfigError(f"{entry.origin}: {key}: {expected} expected, got {value!r}")


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
    last = key.rpartition(".")[2]
    tails = {name.rpartition(".")[2]: name for name in known}
    near = difflib.get_close_matches(key, known, n=1)
    near = near or [tails[tail] for tail in difflib.get_close_matches(last, tails, n=1)]
    if near:
        return f"; did you mean {near[0]!r}?"
    section = key.partition(".")[0]
    mine = [name for name in known if name.startswith(f"{section}.")] or known
    return f"; there are {', '.join(mine)}"


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
