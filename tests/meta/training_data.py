"""Makes ``training.json``: ``python -m tests.meta.training_data > FILE``.

A few minutes on one core. What the numbers mean stands in :mod:`.training`.
"""

import json
import math
from functools import partial
from typing import Any

import torch

from anychip.conformance.oracles.training import (
    RECIPES,
    SAMPLES,
    Envelope,
    Params,
    Recipe,
    curve,
    envelope,
    orders,
)


def smallest_bias(recipe: Recipe, known: Envelope) -> float:
    """By trial in float32, from 2^-8 down to the first that stays below the limit."""
    found = math.inf
    for exponent in range(8, 24):
        losses = curve(
            recipe, torch.float32, orders(1)[0], change=partial(enlarge, factor=1.0 + 0.5**exponent)
        )
        if known.deviation(losses) <= known.limit:
            return found
        found = 0.5**exponent
    return found


def enlarge(grads: Params, factor: float) -> None:
    """Multiplies every gradient."""
    for grad in grads.values():
        grad.mul_(factor)


def make() -> dict[str, Any]:
    """What ``training.json`` holds."""
    torch.set_num_threads(1)
    data = {}
    for name, recipe in RECIPES.items():
        permuted = orders(SAMPLES)
        losses = curve(recipe, torch.float64, permuted[0])
        samples = [curve(recipe, torch.float32, order) for order in permuted]
        found = envelope(losses, samples)
        data[name] = {
            "smallest_bias": smallest_bias(recipe, found),
            "losses": [float(f"{value:.12g}") for value in found.losses],
            "spread": [float(f"{value:.4g}") for value in found.spread],
            "deviations": [float(f"{value:.4g}") for value in found.deviations],
            "limit": float(f"{found.limit:.4g}"),
        }
    return data


def text(data: dict[str, Any]) -> str:
    """As JSON, a line per list."""
    recipes = []
    for name, entry in data.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items()]
        recipes.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(recipes) + "\n}\n"


if __name__ == "__main__":
    print(text(make()), end="")
