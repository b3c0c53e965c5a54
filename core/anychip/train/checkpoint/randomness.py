"""Where do the generators of random numbers stand, on the host and on the model's device?"""

import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from anychip import runtime
from anychip.contract import HOST
from anychip.train import schema

_DEVICE = {"device": schema.optional(schema.BYTES), "device_type": str}
FORM: schema.Form = {"host": schema.BYTES, "python": tuple, **_DEVICE}


def state(device: torch.device) -> dict[str, Any]:
    """Of torch's generators, for the host and a device, and of Python's."""
    states = {"host": torch.get_rng_state(), "python": random.getstate(), "device": None}
    if device.type != HOST:
        states["device"] = runtime.owner(device.type).random_state(device.index)
    return {**states, "device_type": device.type}


def check(states: Mapping[str, Any], device: torch.device) -> None:
    """Raises ValueError for what :func:`restore` would not take."""
    try:
        torch.Generator().set_state(states["host"])
        random.Random().setstate(states["python"])
    except Exception as error:  # they take what they made, and have no type for the rest
        raise ValueError(f"no state of a generator: {error}") from error
    mine, saved = _words(state(device)["device"]), _words(states["device"])
    if states["device_type"] == device.type and mine != saved:
        raise ValueError(f"a device's generator with {mine} expected, got {saved}")


def _words(value: Tensor | None) -> str:
    return "no state" if value is None else f"{list(value.shape)} bytes"


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Sets the generators."""
    torch.set_rng_state(states["host"])
    random.setstate(states["python"])
    # The state of one chip's generator means nothing to another's.
    if states["device"] is not None and states["device_type"] == device.type:
        runtime.owner(device.type).set_random_state(states["device"], device.index)
