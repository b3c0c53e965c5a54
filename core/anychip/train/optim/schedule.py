"""Learning rates over the course of training: a number for the number of updates done."""

import math
from collections.abc import Callable
from typing import Any

LRSchedule = Callable[[int], float]
"""Learning rate given the number of updates done before this one."""


def constant(lr: float) -> LRSchedule:
    """The same learning rate at every step."""
    _check_rate(lr)
    return lambda count: lr


def warmup_cosine(
    peak: float, warmup_steps: int, total_steps: int, *, final_fraction: float = 0.1
) -> LRSchedule:
    """Linear to ``peak`` over the warm-up, then half a cosine down to ``final_fraction * peak``.

    The first update has ``peak / warmup_steps``, the last of the warm-up has ``peak``; from
    ``total_steps`` on the rate stays. Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5.
    """
    _check_rate(peak)
    if not 0 <= warmup_steps <= total_steps or total_steps < 1:
        raise ValueError(
            f"warmup_cosine: 0 <= warmup_steps <= total_steps and total_steps >= 1 expected, got "
            f"warmup_steps {warmup_steps} and total_steps {total_steps}"
        )
    if not 0 <= final_fraction <= 1:
        raise ValueError(f"final_fraction must be from 0 to 1, got {final_fraction}")

    def schedule(count: int) -> float:
        if count < warmup_steps:
            return peak * (count + 1) / warmup_steps
        done = (count - warmup_steps) / max(1, total_steps - warmup_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
        return peak * (final_fraction + (1.0 - final_fraction) * cosine)

    return schedule


def _check_rate(lr: float) -> None:
    if not lr >= 0 or math.isinf(lr):
        raise ValueError(f"a learning rate must be a finite number of at least 0, got {lr}")


def with_rate(lr: float | LRSchedule, **others: Any) -> tuple[LRSchedule | None, dict[str, Any]]:
    """The schedule, if it is one, and the options of a rule, the rate among them."""
    rate = lr(0) if callable(lr) else lr
    _check_rate(rate)
    return lr if callable(lr) else None, {"lr": rate, "lr_scale": 1.0, **others}
