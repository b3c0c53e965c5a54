"""What does a run consist of? Settings: dataclasses (``settings``), read from TOML (``reading``).

Every setting has a name of two parts, ``model.width``, a default, and a check beside it. A key that
does not exist, or a value that cannot be, is answered with where it came from and what was meant.
"""

from anychip.train.config.listing import Setting, settings
from anychip.train.config.reading import dump, load
from anychip.train.config.settings import (
    AUTO,
    LR_SCHEDULES,
    MODELS,
    OF_MODEL,
    OPTIMIZERS,
    TOKENIZERS,
    AdamWConfig,
    CheckpointConfig,
    Config,
    ConfigError,
    ConstantConfig,
    CosineConfig,
    DataConfig,
    EvalConfig,
    LAMBConfig,
    LionConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    SGDConfig,
)

__all__ = [
    "AUTO", "LR_SCHEDULES", "MODELS", "OF_MODEL", "OPTIMIZERS", "TOKENIZERS", "AdamWConfig",
    "CheckpointConfig", "Config", "ConfigError", "ConstantConfig", "CosineConfig", "DataConfig",
    "EvalConfig", "LAMBConfig", "LionConfig", "OptimizerConfig", "ParallelConfig", "RunConfig",
    "SGDConfig", "ScheduleConfig", "Setting", "dump", "load", "settings",
]  # fmt: skip
