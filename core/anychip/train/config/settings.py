"""What can be set? Frozen dataclasses with defaults, each value checked beside it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from anychip.contract import AnychipError
from anychip.train import optim
from anychip.train.data import VOCAB_SIZE
from anychip.train.models import GPTConfig, LlamaConfig, ModelConfig, PretrainedConfig
from anychip.train.optim.elementwise import ADAMW_STATES
from anychip.train.parallel import stages_per_rank
from anychip.train.zero.tiers import in_text

MODELS: Mapping[str, type[ModelConfig]] = {
    "gpt": GPTConfig,
    "llama": LlamaConfig,
    "pretrained": PretrainedConfig,
}
"""Values of ``model.kind`` and the settings that each has."""

MESSAGES = "messages"
"""``data.field`` of conversations, where the model has a template for them."""

TOKENIZERS = ("bytes", "bpe")
"""Values of ``data.tokenizer`` that are no file, and begin with the 256 bytes."""

OF_MODEL = "model"
"""``data.tokenizer``: the one in ``model.path``."""


class ConfigError(AnychipError, ValueError):
    """A setting does not exist, has the wrong type, or a value that cannot be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The run as a whole.

    Attributes:
        steps: updates of the parameters, counted from the start of the first run.
        seed: of initial weights, order of the data, dropout and the sample.
        precision: fp32, bf16, fp16 (with dynamic loss scaling), or auto: what the backend says is
            fast.
        backend: name of the backend; of a pipeline also a list, one for each rank of it or for as
            many of them one behind the other; None: the argument, the environment, or the best one
            here.
        sample_tokens: length of the text that the trained model writes.
        timeout_s: seconds that a rank waits for another one before it gives up.
        heartbeat_s: seconds without a sign of life after which a rank counts as lost.
        trackers: what the numbers of the run go to besides its files: of tensorboard, wandb,
            mlflow, and entry points of the group anychip.trackers; none.
    """

    steps: int = 500
    seed: int = 0
    precision: str = "auto"
    backend: str | tuple[str, ...] | None = None
    sample_tokens: int = 300
    timeout_s: float = 600.0
    heartbeat_s: float = 30.0
    trackers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _at_least(1, steps=self.steps)
        _at_least(0, seed=self.seed, sample_tokens=self.sample_tokens)
        _positive(timeout_s=self.timeout_s, heartbeat_s=self.heartbeat_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """What is read.

    Attributes:
        files: texts, JSON lines, Parquet and tar files, directories, patterns, and directories of
            anychip data prepare, in order; none: the documentation that comes with Python.
        cache: directory where what is not prepared is kept as tokens, made before training begins
            (or while it goes on: shuffle_buffer) and found by later runs: for data that memory does
            not hold. None: tokens are held in memory.
        shuffle_buffer: of a stream: the first epoch is shuffled in buffers of so many windows, and
            with cache training begins when the first one is there; 0: all windows are shuffled, and
            tokens of all files made before.
        filters: of what goes into cache: which documents stay, like "length:least=200", in order.
        skip_corrupt: of what goes into cache: what is behind the damage in a file is left out.
        weights: for each of the files how much of what is trained on comes from it, as a mixture in
            which each has its own epochs; none: the files are one text, one behind the other.
        field: of JSON lines and tar files, and column of Parquet, that holds the text; messages, of
            a model in ``model.path``: conversations in its template, of which the assistant's part
            is learnt.
        tokenizer: bytes; bpe: trained on the files to ``model.vocab_size`` tokens and kept in the
            results; model: that of ``model.path``; or a JSON file of the library ``tokenizers``.
        batch_size: sequences in one forward pass of one replica; each is ``model.context`` tokens.
        accumulation: forward passes of a replica whose mean gradient makes one update; with stages
            these are the micro-batches of the pipeline.
        end_of_document: put that token between two documents.
        cross_document_targets: the first token of a document is predicted from the one before.
        prefetch: batches made ahead by a thread; 0: none.
        verify: the hash of what was prepared is compared, for which each rank reads it once.
    """

    files: tuple[str, ...] = ()
    cache: str = ""
    shuffle_buffer: int = 0
    filters: tuple[str, ...] = ()
    skip_corrupt: bool = False
    weights: tuple[float, ...] = ()
    field: str = "text"
    tokenizer: str = "bytes"
    batch_size: int = 16
    accumulation: int = 1
    end_of_document: bool = True
    cross_document_targets: bool = True
    prefetch: int = 2
    verify: bool = True

    def __post_init__(self) -> None:
        _at_least(1, batch_size=self.batch_size, accumulation=self.accumulation)
        _at_least(0, prefetch=self.prefetch, shuffle_buffer=self.shuffle_buffer)
        if self.weights and len(self.weights) != len(self.files):
            raise ValueError(
                f"weights: one for each of the {len(self.files)} files expected, got "
                f"{len(self.weights)}"
            )
        for weight in self.weights:
            _positive(weights=weight)
        self._check_cache()
        known = (*TOKENIZERS, OF_MODEL)
        if self.tokenizer not in known and not self.tokenizer.endswith(".json"):
            raise ValueError(
                f"tokenizer must be {', '.join(known)} or a .json file, got {self.tokenizer!r}"
            )

    def _check_cache(self) -> None:
        for wrong, why in (
            (not self.files, "files, which are kept there"),
            (self.tokenizer == "bpe", "a tokenizer that is there already, not 'bpe'"),
            (not self.end_of_document, "end_of_document = true"),
        ):
            if self.cache and wrong:
                raise ValueError(f"cache = {self.cache!r} needs {why}")
        for name in ("filters", "skip_corrupt"):
            if getattr(self, name) and not self.cache:
                raise ValueError(f"{name} needs cache: it is of what is kept there")


AUTO = "auto"
"""``parallel.schedule`` that is still to be chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How the ranks of a job share the work; the sizes multiply to their number.

    Attributes:
        data: replicas of the model, each with its own part of every batch; 0: as many as there
            are ranks for.
        pipeline: ranks that hold the layers of one replica together, in stages.
        schedule: of the stages: 1f1b, gpipe, zb1p, interleaved, looped-bfs, interleaved-zb, zbv,
            dualpipev, or a .csv file in torch's form; auto: the one that is simulated to be the
            quickest among those that fit into the memory.
        virtual: stages per rank; 0: as few as the schedule has, of auto any number.
        memory: bytes of a device that auto may plan with; 0: all that it has.
        whole_stages: with optimizer.stage = 3, so many of a rank's stages have whole weights at
            once, the ones that it uses next, and are gathered when they become one of these; 0:
            block by block, for each micro-batch.
        rates: a file that ``anychip bench device --json`` wrote on this device, or a list with one
            for each chip: where layers are cut follows from what was measured, and not from what
            the backend says.
    """

    data: int = 0
    pipeline: int = 1
    schedule: str = "1f1b"
    virtual: int = 0
    memory: int = 0
    whole_stages: int = 0
    rates: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _at_least(0, data=self.data, virtual=self.virtual, whole_stages=self.whole_stages)
        _at_least(0, memory=self.memory)
        _at_least(1, pipeline=self.pipeline)
        if self.schedule != AUTO:
            stages_per_rank(self.schedule, self.virtual)
        if self.whole_stages and self.pipeline == 1:
            raise ValueError(
                f"whole_stages is for stages of a pipeline; got whole_stages = {self.whole_stages} "
                "and pipeline = 1"
            )

    @property
    def stages(self) -> int:
        """That the layers of one replica are cut into; not to be asked while that is open."""
        if self.pipeline == 1:
            return 1
        return self.pipeline * stages_per_rank(self.schedule, self.virtual)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(ABC):
    """What every kind of optimizer has.

    Attributes:
        lr: the highest learning rate; the schedule says when.
        weight_decay: of matrices; norms and biases have none.
        max_norm: the gradient's norm is clipped to it; 0 does not clip.
        stage: of ZeRO, 0 to 3: 0 keeps everything on every replica, 1 shares out the optimizer's
            states, 2 the gradients too, 3 the weights too.
        offload: what is not on the device, and where, like "states=host, gradients=/mnt/nvme": of
            states, masters, gradients and weights. Nothing.
        ema_decay: by which an average of the weights decays, which is kept beside them and can be
            asked and exported; of N steps about the last 1 / (1 - ema_decay) count. 0: none.
    """

    lr: float = 3e-3
    weight_decay: float = 0.1
    max_norm: float = 1.0
    stage: int = 0
    offload: str = ""
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        in_text(self.offload)
        _at_least(0, lr=self.lr, weight_decay=self.weight_decay, max_norm=self.max_norm)
        _below_one(ema_decay=self.ema_decay)
        if self.stage not in (0, 1, 2, 3):
            raise ValueError(f"stage must be 0, 1, 2 or 3, got {self.stage}")

    @abstractmethod
    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        """What these settings say, with a learning rate in place of the highest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWConfig(OptimizerConfig):
    """``optimizer.kind = "adamw"``.

    Attributes:
        beta1: by which the average of gradients decays.
        beta2: by which that of their squares does.
        eps: added to the root that is divided by.
        states: in which both averages are kept: float32, or 8bit, about a quarter of the bytes.
    """

    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    states: str = "float32"

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        if self.states not in ADAMW_STATES:
            known = ", ".join(ADAMW_STATES)
            raise ValueError(f"states must be one of {known}, got {self.states!r}")
        _below_one(beta1=self.beta1, beta2=self.beta2)
        _positive(eps=self.eps)

    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        betas = {"beta1": self.beta1, "beta2": self.beta2}
        return optim.adamw(lr, **betas, eps=self.eps, states=self.states)


@dataclass(frozen=True, kw_only=True, slots=True)
class LAMBConfig(OptimizerConfig):
    """``optimizer.kind = "lamb"``: a learning rate per parameter, for large batches.

    Attributes:
        beta1: by which the average of gradients decays.
        beta2: by which that of their squares does.
        eps: added to the root that is divided by.
    """

    lr: float = 1e-2
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _below_one(beta1=self.beta1, beta2=self.beta2)
        _positive(eps=self.eps)

    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        return optim.lamb(lr, beta1=self.beta1, beta2=self.beta2, eps=self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class LionConfig(OptimizerConfig):
    """``optimizer.kind = "lion"``: updates of one size, by the sign; one state instead of two.

    Attributes:
        beta1: by which the average enters the update.
        beta2: by which it decays.
    """

    lr: float = 5e-4
    weight_decay: float = 0.5
    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _below_one(beta1=self.beta1, beta2=self.beta2)

    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        return optim.lion(lr, beta1=self.beta1, beta2=self.beta2)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGDConfig(OptimizerConfig):
    """``optimizer.kind = "sgd"``.

    Attributes:
        momentum: by which the sum of gradients decays; 0 keeps none.
        nesterov: the gradient where the momentum leads to.
    """

    lr: float = 0.3
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        OptimizerConfig.__post_init__(self)
        _below_one(momentum=self.momentum)
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum greater than 0")

    def rule(self, lr: optim.LRSchedule) -> optim.Rule:
        return optim.sgd(lr, momentum=self.momentum, nesterov=self.nesterov)


OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": AdamWConfig, "sgd": SGDConfig, "lamb": LAMBConfig, "lion": LionConfig,
}  # fmt: skip
"""Values of ``optimizer.kind``, and the settings that each has, which make its rule."""


class ScheduleConfig(ABC):
    """What every kind of schedule of the learning rate has."""

    __slots__ = ()

    @abstractmethod
    def rate(self, highest: float, steps: int) -> optim.LRSchedule:
        """What these settings say, over ``run.steps``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineConfig(ScheduleConfig):
    """``schedule.kind = "cosine"``: warm-up, then half a cosine over the rest of ``run.steps``.

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

    def rate(self, highest: float, steps: int) -> optim.LRSchedule:
        return optim.warmup_cosine(
            highest, round(self.warmup * steps), steps, final_fraction=self.final
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantConfig(ScheduleConfig):
    """``schedule.kind = "constant"``: the highest learning rate at every step."""

    def rate(self, highest: float, steps: int) -> optim.LRSchedule:
        return optim.constant(highest)


LR_SCHEDULES: Mapping[str, type[ScheduleConfig]] = {
    "cosine": CosineConfig,
    "constant": ConstantConfig,
}
"""Values of ``schedule.kind``, and the settings that each has, which make its learning rates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When the run is saved; at its end and on Ctrl-C it always is.

    Attributes:
        every: steps from one checkpoint to the next.
        keep: so many of the last checkpoints stay.
        asynchronous: training goes on while a checkpoint is written, from a copy in host memory.
    """

    every: int = 100
    keep: int = 1
    asynchronous: bool = False

    def __post_init__(self) -> None:
        _at_least(1, every=self.every, keep=self.keep)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """What the model is asked about while it trains, without being trained on it.

    Attributes:
        files: that are held out, like ``data.files``; none: see fraction.
        fraction: the last part of the training tokens that is held out; 0: none.
        every: steps from one evaluation to the next; 0: only at the end.
        batches: so many of ``data.batch_size`` windows are asked, from the start; 0: all there are.
        patience: evaluations in a row without a lower loss than before, after which the run ends;
            0: it does not.
        keep_best: a checkpoint of the evaluation with the lowest loss stays, in ``best``.
        ema: the average of ``optimizer.ema_decay`` is asked, in the place of the weights.
    """

    files: tuple[str, ...] = ()
    fraction: float = 0.0
    every: int = 0
    batches: int = 0
    patience: int = 0
    keep_best: bool = False
    ema: bool = False

    def __post_init__(self) -> None:
        _at_least(0, every=self.every, batches=self.batches, patience=self.patience)
        _below_one(fraction=self.fraction)
        if self.files and self.fraction:
            raise ValueError(
                f"files and fraction both say what is held out; got {len(self.files)} files and "
                f"fraction = {self.fraction}; leave out one of them"
            )
        if not (self.files or self.fraction):
            for name in ("every", "batches", "patience", "keep_best", "ema"):
                if getattr(self, name):
                    raise ValueError(
                        f"{name} = {getattr(self, name)} needs something that is held out: set "
                        "files or fraction"
                    )
        if (self.patience or self.keep_best) and not self.every:
            name = "patience" if self.patience else "keep_best"
            raise ValueError(f"{name} needs several evaluations: set every to at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=GPTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=AdamWConfig)
    schedule: ScheduleConfig = field(default_factory=CosineConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def tokenizer_path(self) -> str:
        """``data.tokenizer``, or the directory that has it."""
        if self.data.tokenizer != OF_MODEL:
            return self.data.tokenizer
        assert isinstance(self.model, PretrainedConfig), "checked when the settings were made"
        return self.model.path

    @property
    def has_messages(self) -> bool:
        """The data is conversations, of which not every token is a target."""
        return isinstance(self.model, PretrainedConfig) and self.data.field == MESSAGES

    def __post_init__(self) -> None:
        if self.data.cache and self.data.shuffle_buffer and self.eval.fraction:
            raise ConfigError(
                f"eval.fraction = {self.eval.fraction} is the last part of all tokens, which are "
                "still made while it trains (data.cache with data.shuffle_buffer); set eval.files, "
                "or data.shuffle_buffer = 0"
            )
        if isinstance(self.model, PretrainedConfig):
            self._check_pretrained(self.model)
        elif self.data.tokenizer == OF_MODEL:
            raise ConfigError("data.tokenizer = 'model' is that of model.path, which is not given")
        if self.eval.ema and not self.optimizer.ema_decay:
            raise ConfigError(
                "eval.ema = true asks an average of the weights, of which there is none: set "
                "optimizer.ema_decay, like 0.999"
            )
        least = VOCAB_SIZE + (self.data.tokenizer == "bpe")
        if self.data.tokenizer in TOKENIZERS and self.model.vocab_size < least:
            raise ConfigError(
                f"model.vocab_size must be at least {least} for the tokenizer "
                f"{self.data.tokenizer!r}, whose tokens begin with the 256 bytes; got "
                f"{self.model.vocab_size}"
            )

    def _check_pretrained(self, model: PretrainedConfig) -> None:
        if not model.path:
            raise ConfigError("model.kind = 'pretrained' needs model.path, the model's directory")
        if self.has_messages and self.data.tokenizer != OF_MODEL:
            raise ConfigError(
                "data.field = 'messages' needs the template of the model's own tokenizer: "
                f"data.tokenizer = 'model', got {self.data.tokenizer!r}"
            )
        if self.has_messages and not self.data.cross_document_targets:
            raise ConfigError(
                "data.cross_document_targets = false is for text; of messages no target crosses "
                "into the next conversation"
            )


def _at_least(least: int, **values: float) -> None:
    for name, value in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _below_one(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0.0:
            raise ValueError(f"{name} must be greater than 0, got {value}")
