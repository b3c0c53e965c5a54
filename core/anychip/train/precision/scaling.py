"""Dynamic loss scaling: which factor keeps float16 gradients from vanishing, and from overflowing?

The loss is multiplied by the scale before backward, and gradients are divided by it in the update.
An update with a gradient that is not finite is skipped. :func:`advance` is the whole rule, a pure
function: every rank that is told the same has the same scale.

Source: Micikevicius et al. 2018, arXiv:1710.03740, section 3.2; torch.amp.GradScaler (growth and
back-off); Megatron-LM and DeepSpeed (hysteresis, floor).
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from anychip.contract import AnychipError

_LARGEST = 3.4028234663852886e38  # of float32, in which the scale reaches the device


class LossScaleError(AnychipError, RuntimeError):
    """Gradients are not finite although the scale has come down to its floor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """Settings; the defaults are torch.amp.GradScaler's, with a floor.

    Attributes:
        init_scale: the first scale.
        growth_factor: of the scale after ``growth_interval`` clean updates in a row.
        backoff_factor: of the scale when an update is skipped.
        hysteresis: skipped updates until the scale backs off; the count begins again when the
            scale grows. 1 backs off at once.
        min_scale: the scale backs off no further; an update skipped at the floor is an error.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.init_scale <= _LARGEST:
            raise ValueError(f"init_scale must be positive and finite, got {self.init_scale}")
        if not 1.0 < self.growth_factor < math.inf:
            raise ValueError(f"growth_factor must be greater than 1, got {self.growth_factor}")
        if not 0.0 < self.backoff_factor < 1.0:
            raise ValueError(f"backoff_factor must be within 0 and 1, got {self.backoff_factor}")
        for name in ("growth_interval", "hysteresis"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0.0 < self.min_scale <= self.init_scale:
            raise ValueError(
                f"min_scale must be positive and at most init_scale {self.init_scale:g}, got "
                f"{self.min_scale}"
            )


class ScaleState(NamedTuple):
    """Where the scale stands.

    Attributes:
        scale: of the next loss.
        num_clean: updates in a row that were not skipped, since the scale last changed.
        num_skipped: updates skipped since the scale last grew.
    """

    scale: float
    num_clean: int = 0
    num_skipped: int = 0


def advance(settings: LossScaling, state: ScaleState, found_inf: bool) -> ScaleState:
    """The state after an update.

    Args:
        found_inf: some rank had a gradient that is not finite, so that the update was skipped.

    Raises:
        LossScaleError: a back-off is due and the scale is at its floor already.
    """
    if found_inf:
        num_skipped = state.num_skipped + 1
        if num_skipped < settings.hysteresis:
            return ScaleState(state.scale, 0, num_skipped)
        if state.scale <= settings.min_scale:
            raise LossScaleError(
                f"a gradient is not finite at the smallest loss scale, {state.scale:g}: this is "
                "no overflow of float16; look for a division by 0 or a logarithm of 0 in the "
                "model, lower the learning rate, or use bf16"
            )
        reduced = _float32(state.scale * settings.backoff_factor)
        return ScaleState(max(reduced, settings.min_scale), 0, num_skipped)
    if state.num_clean + 1 < settings.growth_interval:
        return ScaleState(state.scale, state.num_clean + 1, state.num_skipped)
    grown = state.scale * settings.growth_factor
    return ScaleState(_float32(grown) if grown <= _LARGEST else state.scale, 0, 0)


def _float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


class LossScaler:
    """The scale of a run.

    Args:
        settings: of the policy.
    """

    def __init__(self, settings: LossScaling) -> None:
        self.settings = settings
        self.state = ScaleState(settings.init_scale)

    @property
    def scale(self) -> float:
        """Of the next loss."""
        return self.state.scale

    def update(self, found_inf: bool) -> None:
        """Goes to the next state; see :func:`advance`."""
        self.state = advance(self.settings, self.state, found_inf)

    def state_dict(self) -> dict[str, float]:
        """The state, by name."""
        return self.state._asdict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on from a state; the settings stay.

        Raises:
            ValueError: the names are not those of a state.
        """
        if set(state_dict) != set(ScaleState._fields):
            raise ValueError(
                f"loss scale: {', '.join(ScaleState._fields)} expected, got "
                f"{', '.join(sorted(state_dict))}"
            )
        scale = float(state_dict["scale"])
        self.state = ScaleState(scale, int(state_dict["num_clean"]), int(state_dict["num_skipped"]))
