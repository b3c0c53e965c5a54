"""Windows of a text that is asked and not trained on: each token but the first is a target once.

The windows stand side by side, in order, and every one has the shape of those that are trained on.
What the last one, or a batch, has too much of has no target: a causal model's other predictions do
not see it. A window knows nothing of the one before it, as in training.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anychip.train.data.packing import (
    IGNORED_TARGET,
    NO_TARGET,
    has_marks,
    mask_targets,
    split_marked,
)
from anychip.train.data.text import Tokenizer


class HeldOut:
    """Windows by their numbers, from 0.

    Args:
        tokens: (N,) of an integer dtype on the host.
        context: tokens of a window, without the one after it.
        tokenizer: what the tokens were made with.
        cross_document_targets: False: the first token of a document is no target.

    Raises:
        ValueError: fewer than two tokens, of which none is a target.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        context: int,
        tokenizer: Tokenizer,
        cross_document_targets: bool = True,
    ) -> None:
        if len(tokens) < 2:
            raise ValueError(
                "the held-out data is too short: at least 2 tokens expected (one, and the target "
                f"after it), got {len(tokens)}"
            )
        self.tokens, self.context, self.tokenizer = tokens, context, tokenizer
        self.cross_document_targets, self._is_marked = cross_document_targets, has_marks(tokens)

    @property
    def num_windows(self) -> int:
        """With a target."""
        return -(-(len(self.tokens) - 1) // self.context)

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (len(numbers), context) int64, on the host.

        Numbers from ``num_windows`` on have windows without a target.
        """
        index = np.array(numbers)[:, None] * self.context + np.arange(self.context + 1)
        is_there = torch.from_numpy(index < len(self.tokens))
        index = np.minimum(index, len(self.tokens) - 1)
        windows = torch.from_numpy(self.tokens.numpy()[index].astype(np.int64))
        if self._is_marked:
            return split_marked(windows.masked_fill(~is_there, NO_TARGET))
        tokens = windows.masked_fill(~is_there, 0)[:, :-1].contiguous()
        targets = windows.masked_fill(~is_there, IGNORED_TARGET)[:, 1:].contiguous()
        if not self.cross_document_targets:
            targets = mask_targets(tokens, targets, self.tokenizer.end_of_document)
        return tokens, targets
