"""In which dtype a model computes, and what float16 needs for it.

``policy`` decides for a backend; :class:`anychip.train.zero.Optimizer` does what the policy says:
the dtype in which gradients are reduced, and the scale of the loss (``scaling``).
"""

from anychip.train.precision.policy import NAMES, PrecisionPolicy, common_policy, policy
from anychip.train.precision.scaling import (
    LossScaleError,
    LossScaler,
    LossScaling,
    ScaleState,
    advance,
)

__all__ = [
    "NAMES", "LossScaleError", "LossScaler", "LossScaling", "PrecisionPolicy", "ScaleState",
    "advance", "common_policy", "policy",
]  # fmt: skip
