"""Which part of a model does a stage hold? Some consecutive layers, under the names of the whole.

A layer is the smallest part that is cut off: of a decoder the embedding (layer 0), each block, and
the head with the loss (the last layer); of an ``nn.Sequential`` each member. The state dicts of all
stages together have the keys of the whole model's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from anychip.train.models import GPT, Decoder, Llama, Reduction

Model = Decoder | nn.Sequential
"""What can be cut into stages."""


def num_layers(model: Model) -> int:
    """How many layers a model can be cut into.

    Raises:
        TypeError: not a model that this function knows.
    """
    if isinstance(model, nn.Sequential):
        return len(model)
    if isinstance(model, (GPT, Llama)):
        return model.config.layers + 2
    raise TypeError(
        f"a GPT, a Llama or an nn.Sequential expected, got {type(model).__name__}; write a module "
        "per stage yourself, and give it to Pipeline"
    )


def make_stage(
    model: Model, layers: range, *, reduction: Reduction = "mean"
) -> Stage | SequentialStage:
    """Some layers of a model, sharing its parameters; see :class:`Stage`.

    Args:
        model: whole, on any device. What the stage does not share can be dropped with it.
        layers: consecutive, within ``range(num_layers(model))``.
        reduction: of a decoder's loss, where the stage has it.

    Raises:
        ValueError: no layers, or layers that the model does not have.
    """
    count = num_layers(model)
    if layers.step != 1 or not layers or layers.start < 0 or layers.stop > count:
        raise ValueError(f"consecutive layers from 0 to {count - 1} expected, got {layers}")
    if isinstance(model, nn.Sequential):
        return SequentialStage(model, layers)
    return Stage(model, layers, reduction=reduction)


class Stage(nn.Module):
    """Consecutive layers of a decoder.

    ``stage(x)`` takes tokens (B, S) when it begins with the embedding, else the vectors (B, S, D)
    of the layer before; it gives vectors, or with the head ``stage(x, targets)`` the loss and
    ``stage(x)`` logits.

    Where the head is tied to the embedding and another stage has that, the head has a copy.

    Attributes:
        layers: of the whole model.
        reduction: of the loss, over its targets.
    """

    def __init__(self, model: Decoder, layers: range, *, reduction: Reduction = "mean") -> None:
        super().__init__()
        count = num_layers(model)
        is_first, is_last = layers.start == 0, layers.stop == count
        below = "transformer" if isinstance(model, GPT) else "model"
        blocks, norm = ("h", "ln_f") if isinstance(model, GPT) else ("layers", "norm")
        inner = getattr(model, below)
        part = _part(inner, [n for n in inner._modules if n not in (blocks, norm)] * is_first)
        numbers = range(max(0, layers.start - 1), min(count - 2, layers.stop - 1))
        kept = {str(i): getattr(inner, blocks)[i] for i in numbers}
        part.add_module(blocks, nn.ModuleDict(kept))
        whole: Any = _part(model, ["lm_head"] * is_last)
        if is_last:
            part.add_module(norm, getattr(inner, norm))
        whole.add_module(below, part)
        self.layers, self.config, self.reduction = layers, model.config, reduction
        self._tied = ""
        if isinstance(model, GPT) and is_first != is_last:
            self._tied = "transformer.wte" if is_first else "lm_head"
            if is_last:
                whole.lm_head = copy.deepcopy(model.lm_head)
        # The modules are this one's own, under the decoder's names; whole runs them.
        self._modules = whole._modules
        object.__setattr__(self, "_whole", whole)
        self._path = (below, blocks)

    @property
    def tied(self) -> tuple[nn.Parameter, ...]:
        """The embedding's parameter on the first stage, the head's copy of it on the last.

        Empty where both are on one stage, and on stages that have neither. To be asked again after
        a move to another device, which may make other parameters.
        """
        return (self.get_parameter(f"{self._tied}.weight"),) if self._tied else ()

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        whole: Any = self._whole
        if self.layers.start == 0:
            x = whole.embed(x)
        for block in getattr(getattr(whole, self._path[0]), self._path[1]).values():
            x = whole.run_block(block, x)
        if self.layers.stop < self.config.layers + 2:
            return x
        return whole.head(x, targets, reduction=self.reduction)  # type: ignore[no-any-return]


class SequentialStage(nn.Module):
    """Consecutive members of an ``nn.Sequential``, with their names; nothing is tied."""

    tied: tuple[nn.Parameter, ...] = ()

    def __init__(self, model: nn.Sequential, layers: range) -> None:
        super().__init__()
        self.layers = layers
        for name, module in list(model.named_children())[layers.start : layers.stop]:
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


def merge(state_dicts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The whole model's state dict from those of all its stages, in order.

    Raises:
        ValueError: two stages have a key in common.
    """
    whole: dict[str, Tensor] = {}
    for number, state in enumerate(state_dicts):
        common = whole.keys() & state.keys()
        if common:
            raise ValueError(f"stage {number} has {sorted(common)}, as a stage before it")
        whole.update(state)
    return whole


def _part(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """A module like another one, with some of its submodules, and no parameters of its own."""
    part = copy.copy(module)
    part._parameters = {}
    part._modules = {name: module._modules[name] for name in names}
    return part
