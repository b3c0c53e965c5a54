"""Windows of a text that is asked and not trained on: each token but the first is a target once.

The windows stand side by side, in order, and every one has the shape of those that are trained on.
What the last one, or a batch, has too much of has no target: a causal model's other predictions do
not see it. A window knows nothing of the one before it, as in training.
"""

import numpy as np
import torch
from torch import Tensor

from anychip.train.data.packing import IGNORED_TARGET, NO_TARGET, mask_targets, split_marked
from anychip.train.data.rows import TokenRow, as_row
from anychip.train.data.text import Tokenizer


class HeldOut:
    """Windows by their numbers, from 0.

    Args:
        tokens: (N,) of an integer dtype on the host, or a row.
        context: tokens of a window, without the one after it.
        tokenizer: what the tokens were made with.
        cross_document_targets: False: the first token of a document is no target.

    Raises:
        ValueError: fewer than two tokens, of which none is a target.
    """

    def __init__(
        self,
        tokens: Tensor | TokenRow,
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
        self.tokens, self.context, self.tokenizer = as_row(tokens), context, tokenizer
        self.cross_document_targets = cross_document_targets

    @property
    def num_windows(self) -> int:
        """With a target."""
        return -(-(len(self.tokens) - 1) // self.context)

    def batch(self, numbers: range) -> tuple[Tensor, Tensor]:
        """Tokens and targets, each (len(numbers), context) int64, on the host.

        Numbers from ``num_windows`` on have windows without a target.
        """
        starts, length = np.array(numbers) * self.context, len(self.tokens)
        is_there = torch.from_numpy(starts[:, None] + np.arange(self.context + 1) < length)
        windows = torch.zeros(is_there.shape, dtype=torch.int64)
        whole = starts + self.context + 1 <= length
        windows[torch.from_numpy(whole)] = torch.from_numpy(
            self.tokens.read(starts[whole], self.context + 1)
        )
        for place in np.flatnonzero(~whole & (starts < length)):
            rest = self.tokens.read(starts[place : place + 1], length - int(starts[place]))
            windows[int(place), : rest.shape[1]] = torch.from_numpy(rest[0])
        if self.tokens.is_marked:
            return split_marked(windows.masked_fill(~is_there, NO_TARGET))
        tokens = windows.masked_fill(~is_there, 0)[:, :-1].contiguous()
        targets = windows.masked_fill(~is_there, IGNORED_TARGET)[:, 1:].contiguous()
        if not self.cross_document_targets:
            targets = mask_targets(tokens, targets, self.tokenizer.end_of_document)
        return tokens, targets
