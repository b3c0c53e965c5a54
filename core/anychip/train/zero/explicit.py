"""When are weights whole and gradients sent, if somebody says so? What a pipeline's rows decide.

The actions UNSHARD, RESHARD and REDUCE_GRAD, each of all parameters of a module. Weights that
nobody has asked for come and go by the hooks of their units; gradients that nobody has sent stay
local, and go with the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from anychip.train.zero.sharded import ShardedModel


class Explicit:
    """What a backward, or several, are told about the modules of a model; by all ranks alike.

    Args:
        sharded: the model; None: one rank has everything, and nothing is done.
    """

    def __init__(self, sharded: ShardedModel | None = None) -> None:
        self.sharded = sharded
        self._held: dict[nn.Module, Callable[[], None]] = {}
        self._done: set[Tensor] = set()

    def unshard(self, module: nn.Module) -> None:
        """UNSHARD: begins to gather a module's weights, which stay whole until :meth:`reshard`."""
        if self.sharded is not None and module not in self._held:
            self._held[module] = self.sharded.hold(set(module.parameters()))

    def reshard(self, module: nn.Module) -> None:
        """RESHARD: gives the memory of the other ranks' parts back."""
        if module in self._held:
            self._held.pop(module)()

    @contextmanager
    def reducing(self, module: nn.Module) -> Iterator[None]:
        """REDUCE_GRAD: within it runs the last backward of a module, whose gradients are sent.

        A buffer goes when all modules that have parameters in it had their last one; nothing is
        waited for.
        """
        if self.sharded is None:
            yield
            return
        self._done |= set(module.parameters())
        with self.sharded.queue.round(self._done):
            yield

    @contextmanager
    def ending(self) -> Iterator[Explicit]:
        """Shows at its end what was sent, and leaves nothing whole."""
        try:
            yield self
            if self.sharded is not None:
                self.sharded.queue.end()
        except BaseException:
            if self.sharded is not None:
                self.sharded.queue.drop()
            raise
        finally:
            for module in list(self._held):
                self.reshard(module)
