"""Settings: what is read is what is meant, and what cannot be is answered with what was meant."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from anychip.train import config, optim
from anychip.train.config import (
    AdamWConfig,
    Config,
    ConfigError,
    LionConfig,
    OptimizerConfig,
    ScheduleConfig,
    SGDConfig,
)
from anychip.train.cutting import rule_of
from anychip.train.models import GPTConfig, LlamaConfig, PretrainedConfig

EVERY_OPTIMIZER = [[f"optimizer.kind={kind}"] for kind in config.OPTIMIZERS]
LR_KINDS = list(config.LR_SCHEDULES)
# With all that a model of a directory makes others of.
PRETRAINED = ["model.path=/nowhere", "data.tokenizer=model", "optimizer.lr=3e-3"]


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_config_without_anything_is_the_default() -> None:
    assert config.load() == Config()


def test_config_takes_the_file_and_over_it_the_settings(tmp_path: Path) -> None:
    file = _written(
        tmp_path / "c.toml",
        '[model]\nkind = "llama"\nwidth = 64\nlayers = 2\n[optimizer]\nlr = 1\n'
        '[data]\nfiles = ["a.txt"]\n',
    )
    loaded = config.load(file, ["model.width=96", "model.hidden=128", "run.backend=acme"])
    assert loaded.model == LlamaConfig(width=96, layers=2, hidden=128)
    assert loaded.optimizer.lr == 1.0
    assert type(loaded.optimizer.lr) is float
    assert loaded.data.files == ("a.txt",)
    assert loaded.run.backend == "acme"


@pytest.mark.parametrize("settings", [(), ("model.kind=llama",), ("model.kind=gpt",)], ids=str)
def test_config_with_its_kind_from_settings_alone_is_of_that_kind(settings: list[str]) -> None:
    wanted = LlamaConfig if "model.kind=llama" in settings else GPTConfig
    assert type(config.load(None, settings).model) is wanted


@pytest.mark.parametrize("settings", [
    [],
    ["model.kind=llama", "model.hidden=96", "run.backend=acme"],
    ['data.files=["a b.txt", "\\"c.txt"]', "optimizer.lr=3e-4", "model.dropout=0.1"],
], ids=["default", "llama", "texts"])  # fmt: skip
def test_config_written_and_read_is_the_same(tmp_path: Path, settings: list[str]) -> None:
    loaded = config.load(None, settings)
    assert config.load(_written(tmp_path / "config.toml", config.dump(loaded))) == loaded


@pytest.mark.parametrize(("setting", "answer"), [
    ("model.widht=3", "there is no setting 'model.widht'; did you mean 'model.width'?"),
    ("modl.width=3", "there is no setting 'modl.width'; did you mean 'model.width'?"),
    ("steps=3", "there is no setting 'steps'; did you mean 'run.steps'?"),
    ("parallel.tensor=2", "there is no setting 'parallel.tensor'; there are parallel."),
    ("run.lr=3", "there is no setting 'run.lr'; did you mean 'optimizer.lr'?"),
    ("optimiser.learning=3", "there is no setting 'optimiser.learning'"),
    ("model.kv_heads=2", "there is no setting 'model.kv_heads'"),
    ("model.width=wide", "model.width: an integer expected, got 'wide'"),
    ("model.width=64.0", "model.width: an integer expected, got 64.0"),
    ("model.layers=true", "model.layers: an integer expected, got True"),
    ("optimizer.lr=nan", "optimizer.lr: a finite number expected, got nan"),
    ("run.precision=16", "run.precision: a string expected, got 16"),
    ("data.files=a.txt", "data.files: a list of strings"),
    ("data.files=[1]", "data.files: a list of strings"),
    ("model.kind=gtp", "model.kind must be one of gpt, llama, pretrained, got 'gtp'"),
    ("model.width=30", "[model] width must be a multiple of heads, got width 30 and heads 4"),
    ("model.vocab_size=100", "model.vocab_size must be at least 256"),
    ("run.steps=0", "[run] steps must be at least 1, got 0"),
    ("data.accumulation=0", "[data] accumulation must be at least 1, got 0"),
    ("optimizer.beta2=1", "[optimizer] beta2 must be at least 0 and below 1, got 1.0"),
    ("optimizer.eps=0", "[optimizer] eps must be greater than 0, got 0.0"),
    ("optimizer.lr=-1", "[optimizer] lr must be at least 0, got -1.0"),
    ("optimizer.states=16bit", "[optimizer] states must be one of float32, 8bit, got '16bit'"),
    ("optimizer.stage=4", "[optimizer] stage must be 0, 1, 2 or 3, got 4"),
    ("schedule.kind=step", "schedule.kind must be one of cosine, constant, got 'step'"),
    ("schedule.warmup=2", "[schedule] warmup must be from 0 to 1, got 2.0"),
    ("checkpoint.every=0", "[checkpoint] every must be at least 1, got 0"),
    ("model.kind=pretrained", "needs model.path, the model's directory"),
    ("data.tokenizer=model", "is that of model.path, which is not given"),
    ("data.weights=[0.5]", "weights: one for each of the 0 files expected, got 1"),
    ("data.weights=[true]", "a list of numbers, like [0.7, 0.3], expected, got [True]"),
    ("files=a.txt", "there is no setting 'files'; did you mean 'data.files'?"),
    ("eval.fraction=1", "[eval] fraction must be at least 0 and below 1, got 1.0"),
    ("eval.every=-1", "[eval] every must be at least 0, got -1"),
    ("eval.every=5", "[eval] every = 5 needs something that is held out: set files or fraction"),
    ("eval.keep_best=true", "[eval] keep_best = True needs something that is held out"),
    ("model", "a setting is key=value, like model.width=256; got 'model'"),
    ("=3", "a setting is key=value"),
])  # fmt: skip
def test_setting_that_cannot_be_is_an_error_that_says_what_can(setting: str, answer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(None, [setting])
    assert answer in str(caught.value)


@pytest.mark.parametrize(("settings", "answer"), [
    (["eval.files=['a']", "eval.fraction=0.1"], "files and fraction both say what is held out"),
    (["eval.fraction=0.1", "eval.patience=1"], "patience needs several evaluations: set every"),
    (["eval.files=['a']", "eval.keep_best=true"], "keep_best needs several evaluations"),
    (["eval.files=['a']", "eval.ema=true"], "eval.ema = true asks an average .* optimizer.ema_d"),
], ids=["both", "patience", "best", "average"])  # fmt: skip
def test_evaluation_settings_that_need_each_other_say_so(settings: list[str], answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        config.load(None, settings)


@pytest.mark.parametrize(("text", "setting", "left_out", "kept"), [
    ('kind = "adamw"\nlr = 0.5\nbeta1 = 0.5\neps = 1', "optimizer.kind=sgd",
     "optimizer.beta1, optimizer.eps of", SGDConfig(lr=0.5)),
    ("states = '8bit'", "optimizer.kind=lion", "optimizer.states of", LionConfig()),
    ("lr = 0.5", "optimizer.kind=sgd", None, SGDConfig(lr=0.5)),
    ("beta1 = 0.5", "optimizer.kind=adamw", None, AdamWConfig(beta1=0.5)),
], ids=["written", "default-kind", "nothing", "same"])  # fmt: skip
def test_another_kind_leaves_out_what_only_the_files_kind_has_and_says_so(
    tmp_path: Path, text: str, setting: str, left_out: str | None, kept: OptimizerConfig
) -> None:
    notes: list[str] = []
    file = _written(tmp_path / "c.toml", f"[optimizer]\n{text}")
    assert config.load(file, [setting], note=notes.append).optimizer == kept
    assert len(notes) == (left_out is not None)
    assert all(f"{setting}: {left_out} {file} are settings of 'adamw'" in note for note in notes)
    with pytest.raises(ConfigError, match=r"there is no setting 'optimizer\.momentum'"):
        config.load(file, ["optimizer.kind=lion", "optimizer.momentum=0.5"], note=notes.append)


def test_list_of_settings_has_what_configurations_have_with_a_line_for_each() -> None:
    listed = config.settings()
    for setting in listed:
        key, kind = setting.key, setting.kind
        table, _, name = key.partition(".")
        kinds = [f"{table}.kind={kind}"] if kind else []
        made = config.load(None, PRETRAINED if kind == "pretrained" else kinds)
        if key == "model.path":
            assert setting.default == ""
            continue
        assert name == "kind" or getattr(getattr(made, table), name) == setting.default
        assert len(setting.meaning) > 10, key
    schedules = [[f"schedule.kind={kind}"] for kind in LR_KINDS]
    every = [*EVERY_OPTIMIZER, ["model.kind=llama"], PRETRAINED, *schedules]
    written = [config.load(None, kinds) for kinds in every]
    keys = {f"{t}.{key}" for made in written for t, of in asdict(made).items() for key in of}
    kinds = {"model.kind", "optimizer.kind", "schedule.kind"}
    assert keys | kinds == {setting.key for setting in listed}


def test_directory_chooses_its_kind_wherever_it_is_named(tmp_path: Path) -> None:
    notes = list[str]()
    file = _written(tmp_path / "c.toml", '[model]\npath = "there"\nlora_rank = 4\n')
    loaded = config.load(file, note=notes.append)
    assert loaded.model == PretrainedConfig(path="there", lora_rank=4)
    assert (loaded.data.tokenizer, loaded.optimizer.lr) == (config.OF_MODEL, 2e-4)
    assert config.load(None, ["model.path=there"], note=notes.append).optimizer.lr == 2e-5
    assert notes == [f"optimizer.lr = {x}, the default for a model of a directory"
                     for x in ("0.0002", "2e-05")]  # fmt: skip
    given = ["model.path=there", "optimizer.kind=sgd", "data.tokenizer=own.json"]
    assert config.load(None, given, note=notes.append).optimizer == SGDConfig()
    other = _written(tmp_path / "d.toml", '[model]\nkind = "llama"\nwidth = 64\ncontext = 32\n')
    moved = config.load(other, ["model.path=there"], note=notes.append)
    assert moved.model == PretrainedConfig(path="there", context=32)
    assert "model.width of" in notes[2]
    again = _written(tmp_path / "e.toml", config.dump(loaded))
    assert config.load(again, note=notes.append) == loaded
    assert len(notes) == 4  # of a file that says everything there is nothing to note


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plain(OptimizerConfig):
    """``optimizer.kind = "plain"``."""

    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        return optim.sgd(lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Halving(ScheduleConfig):
    """``schedule.kind = "halving"``.

    Attributes:
        every: updates from one half to the next.
    """

    every: int = 2

    def rate(self, highest: float, steps: int) -> optim.LRSchedule:
        return lambda count: highest * 0.5 ** (count // self.every)


def test_entry_of_the_tables_is_a_kind_that_is_listed_written_read_and_trained_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(dict[str, Any], config.OPTIMIZERS), "plain", _Plain)
    monkeypatch.setitem(cast(dict[str, Any], config.LR_SCHEDULES), "halving", _Halving)
    kinds = ["optimizer.kind=plain", "schedule.kind=halving", "schedule.every=3"]
    loaded = config.load(None, [*kinds, "optimizer.lr=8"])
    assert (loaded.optimizer, loaded.schedule) == (_Plain(lr=8.0), _Halving(every=3))
    assert config.load(_written(tmp_path / "c.toml", config.dump(loaded))) == loaded
    assert ("schedule.every", "halving") in {(s.key, s.kind) for s in config.settings()}
    rule = rule_of(loaded)
    assert rule.schedule is not None
    assert "momentum" in rule.options
    assert [rule.schedule(count) for count in range(7)] == [8, 8, 8, 4, 4, 4, 2]


@pytest.mark.parametrize(("text", "answer"), [
    ("[model]\nwidht = 3", "c.toml: there is no setting 'model.widht'; did you mean"),
    ("width = 3", "c.toml: there is no setting 'width'; did you mean 'model.width'?"),
    ("[model]\nwidth = 30", "c.toml: [model] width must be a multiple of heads"),
    ("[model]\nwidth = {}", "c.toml: model.width: an integer expected, got {}"),
    ("[model\nwidth = 3", "c.toml is not TOML: "),
])  # fmt: skip
def test_file_with_a_mistake_is_an_error_that_names_the_file(
    tmp_path: Path, text: str, answer: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config.load(_written(tmp_path / "c.toml", text))
    assert answer in str(caught.value)


def test_setting_given_twice_is_an_error_that_shows_both() -> None:
    with pytest.raises(
        ConfigError, match=r"run.seed is given twice: 'run.seed=1' and 'run.seed=2'"
    ):
        config.load(None, ["run.seed=1", "run.seed=2"])


def test_file_that_is_no_text_is_an_error_and_a_missing_one_too(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        config.load(tmp_path / "c.toml")
    with pytest.raises(FileNotFoundError):
        config.load(tmp_path / "absent.toml")
