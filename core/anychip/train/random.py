"""Where random operators get their (seed, offset) from: torch's own CPU generator.

There is no state of ours. What keeps torch's generator right also keeps dropout right: a checkpoint
that saves ``torch.get_rng_state()``, activation checkpointing that restores it to recompute.
"""

import torch
from torch import Tensor

_HIGH = (1 << 63) - 1


def draw(device: torch.device) -> Tensor:
    """A fresh int64[2] (seed, offset) on ``device``; two draws do not share a stream.

    The numbers come from the CPU generator, so they are the same on every chip.
    """
    return torch.randint(_HIGH, (2,), dtype=torch.int64).to(device)
