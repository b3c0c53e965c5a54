"""What does training know of a decoder? Its parts by name, and how each of them is run.

Who states this can be cut into the stages of a pipeline, whatever its modules are called; a class
of another library states it in a subclass, and keeps its names.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from anychip import ops

LossReduction = Literal["mean", "sum"]
"""Of a decoder's loss over its targets."""


class Parts(NamedTuple):
    """Paths of a decoder's submodules. Every stage has one that is in no part, without parameters.

    Attributes:
        below: what makes vectors of tokens.
        blocks: the list of blocks.
        above: what follows the last block. A parameter may be below too: it is tied.
    """

    below: tuple[str, ...]
    blocks: str
    above: tuple[str, ...]


class Layers(NamedTuple):
    """Which part of a decoder there is: consecutive layers.

    Attributes:
        begin: with what is below the blocks.
        blocks: numbers of the blocks; where there are none, of the next one.
        end: with what is above them.
    """

    begin: bool
    blocks: range
    end: bool


class Past:
    """Keys and values of the tokens that a decoder has read, so that only new ones are run.

    Attributes:
        length: how many tokens those are.
        library: the same of a model of another library, which keeps its own.
    """

    def __init__(self) -> None:
        self.length = 0
        self.library: Any = None
        self._kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def joined(self, attention: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of a layer's new tokens, (B, S, heads, head_dim) each, after those it has kept."""
        if attention in self._kept:
            before = self._kept[attention]
            k, v = (torch.cat(pair, dim=1) for pair in zip(before, (k, v), strict=True))
        self._kept[attention] = k, v
        return k, v


class Decoder(nn.Module, ABC):
    """A model of tokens; ``model(tokens)`` gives logits, ``model(tokens, targets)`` the mean loss.

    Between its parts one tensor is handed on: vectors (B, S, D), as wide for every block.

    Attributes:
        parts: where they are.
        config: its sizes; ``config.context`` tokens are in the longest sequence.
        layers: of a part of a decoder, those that it has; None: it is whole.
        needs_tokens: parts above others want the tokens too, not only vectors.
        past: what came before the tokens that it is given, while it writes; None: nothing did.
    """

    parts: Parts
    config: Any
    layers: Layers | None = None
    needs_tokens: bool = False
    past: Past | None = None

    @property
    def read(self) -> int:
        """Tokens that came before."""
        return self.past.length if self.past else 0

    @contextmanager
    def reading_on(self) -> Iterator[None]:
        """Within it each call goes on where the one before ended."""
        self.past = Past()
        try:
            yield
        finally:
            self.past = None

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, reduction: LossReduction = "mean"
    ) -> Tensor:
        """Logits (B, S, V), or the 0-dim float32 loss when targets are given.

        Args:
            tokens: (B, S) int64, S at most ``config.context``.
            targets: (B, S) int64; -100 is not counted.
            reduction: over the targets: ``mean`` or ``sum``.
        """
        found = self.run_part(tokens, targets, reduction=reduction)
        if self.past is not None:
            self.past.length += tokens.shape[1]
        return found

    def end_of(self, tokens: Tensor) -> int:
        """Where tokens (B, S) end; raises ValueError where that is behind the longest sequence."""
        end = self.read + tokens.shape[1]
        if end > self.config.context:
            raise ValueError(f"at most {self.config.context} tokens expected, got {end}")
        return end

    def blocks(self) -> list[nn.Module]:
        """Those that are here, in order: of a stage its own."""
        return [*cast(nn.ModuleList, self.get_submodule(self.parts.blocks))]

    @abstractmethod
    def embed(self, tokens: Tensor) -> Tensor:
        """What the first block is given: tokens (B, S) as vectors (B, S, D)."""

    def run_block(self, block: nn.Module, x_BSD: Tensor) -> Tensor:
        """One of the blocks, with whatever else it needs."""
        return block(x_BSD)  # type: ignore[no-any-return]

    @abstractmethod
    def logits(self, x_BSD: Tensor) -> Tensor:
        """What follows the last block, (B, S, V)."""

    def on_paper(self) -> AbstractContextManager[object]:
        """Within it tensors without data may go through it, as through all parts of it."""
        return nullcontext()

    def become_part(self, layers: Layers) -> None:
        """Said once to a copy from which the modules of all other layers were taken."""
        self.layers = layers

    def run_part(
        self,
        x: Tensor,
        targets: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        reduction: LossReduction = "mean",
    ) -> Tensor:
        """What a part makes of what the part below has made: vectors (B, S, D), or as the whole.

        Args:
            x: vectors (B, S, D); of the lowest part, and of the whole, tokens (B, S).
            targets: (B, S), of the highest part.
            tokens: (B, S), of others than the lowest, where ``needs_tokens``.
        """
        if self.layers is None or self.layers.begin:
            x = self.embed(x)
        for block in self.blocks():
            x = self.run_block(block, x)
        is_end = self.layers is None or self.layers.end
        return self.head(x, targets, reduction=reduction) if is_end else x

    def head(
        self, x_BSD: Tensor, targets: Tensor | None = None, *, reduction: LossReduction = "mean"
    ) -> Tensor:
        """What follows the last block: logits, or the loss."""
        logits = self.logits(x_BSD)
        if targets is None:
            return logits
        return ops.cross_entropy(logits, targets, reduction=reduction)
