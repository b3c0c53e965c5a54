"""The references as a backend: honest rows, in every dtype."""

import torch

from tests.meta.honest import HonestRows


class References(HonestRows):
    """What a mutant of a reference is seen through."""

    name = "references"
    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})
