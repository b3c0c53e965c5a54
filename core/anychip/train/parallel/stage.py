"""Which part of a model does a stage hold? Some consecutive layers, under the names of the whole.

A layer is the smallest part that is cut off: of a decoder the embedding (layer 0), each block, and
the head with the loss (the last layer); of an ``nn.Sequential`` each member. The state dicts of all
stages together have the keys of the whole model's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from anychip.contract import UnsupportedError
from anychip.train.models import Decoder, Layers, LossReduction

T = TypeVar("T", bound=nn.Module)
Model = Decoder | nn.Sequential
"""What can be cut into stages."""


def num_layers(model: Model) -> int:
    """How many layers a model can be cut into.

    Raises:
        TypeError: not a model that this function knows.
    """
    if isinstance(model, nn.Sequential):
        return len(model)
    if isinstance(model, Decoder):
        return len(model.blocks()) + 2
    raise TypeError(
        f"a Decoder of anychip.train.models or an nn.Sequential expected, got "
        f"{type(model).__name__}; write a module per stage yourself, and give it to Pipeline"
    )


def on_paper(model: Model) -> AbstractContextManager[object]:
    """Entered where tensors without data go through a model or its stages."""
    return model.on_paper() if isinstance(model, Decoder) else nullcontext()


def make_stage(
    model: Model, layers: range, *, reduction: LossReduction = "mean"
) -> Stage | SequentialStage:
    """Some layers of a model, sharing its parameters; see :class:`Stage`.

    Args:
        model: whole, on any device. What the stage does not share can be dropped with it.
        layers: consecutive, within ``range(num_layers(model))``.
        reduction: of a decoder's loss, where the stage has it.

    Raises:
        ValueError: no layers, or layers that the model does not have; a decoder's parameter that
            is in no part, or in several that cannot be tied.
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

    Where what is above the blocks is tied to what is below, and another stage has that, it is a
    copy above.

    Attributes:
        layers: of the whole model, which has ``num_layers``.
        reduction: of the loss, over its targets.
    """

    _whole: Decoder
    reduction: LossReduction

    def __init__(self, model: Decoder, layers: range, *, reduction: LossReduction = "mean") -> None:
        super().__init__()
        count, paths = num_layers(model), _paths(model)
        tied = _tied(model, paths, last=count - 1)
        is_first, is_last = layers.start == 0, layers.stop == count
        self._tied = tied[0 if is_first else -1] if is_first != is_last else ()
        whole = _part(model, {path: layer in layers for path, layer in paths.items()})
        for path in model.parts.above if is_last else ():
            if any(name.startswith(f"{path}.") for name in self._tied):
                holder, _, name = path.rpartition(".")
                copied = copy.deepcopy(model.get_submodule(path))
                whole.get_submodule(holder)._modules[name] = copied
        # Norms add up parameters in this order: what is a part by itself, then what holds parts.
        whole._modules = dict(sorted(whole._modules.items(), key=lambda item: item[0] not in paths))
        blocks = range(max(layers.start, 1) - 1, min(layers.stop, count - 1) - 1)
        whole.become_part(Layers(is_first, blocks, is_last))
        self.layers, self.num_layers, self.reduction = layers, count, reduction
        # The modules are this one's own, under the decoder's names; whole runs them.
        self._modules = whole._modules
        object.__setattr__(self, "_whole", whole)

    @property
    def tied(self) -> tuple[nn.Parameter, ...]:
        """The parameters below on the first stage, the copies of them above on the last.

        Empty where both are on one stage, on stages that have neither, and of what is frozen. To be
        asked again after a move to another device, which may make other parameters.
        """
        found = (self.get_parameter(name) for name in self._tied)
        return tuple(param for param in found if param.requires_grad)

    @property
    def needs_tokens(self) -> bool:
        """It is to be called with ``tokens`` (B, S) as well, though layers before it have them."""
        return self.layers.start > 0 and self._whole.needs_tokens

    def forward(
        self, x: Tensor, targets: Tensor | None = None, *, tokens: Tensor | None = None
    ) -> Tensor:
        return self._whole.run_part(x, targets, tokens=tokens, reduction=self.reduction)


@torch.no_grad()
def check_cut(model: Decoder, stages: Sequence[Stage], tokens: Tensor) -> None:
    """That all stages one after the other are the model, bit by bit.

    Of a model of another library where its parts are is read off, and what is computed between two
    blocks is not known.

    Args:
        tokens: (B, S) of a few sequences.

    Raises:
        UnsupportedError: they are not, or one does not run.
    """
    every = [module for top in (model, *stages) for module in top.modules()]
    modes, mode, why = [module.training for module in every], model.training, ""
    for top in (model, *stages):
        top.eval()
    try:
        x = tokens
        for stage in stages:
            x = stage(x, tokens=tokens)
        if not torch.equal(x, model(tokens)):
            why = "it computes something else than the whole"
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
        why = f"it fails: {error}"
    finally:
        model.train(mode)
        for module, was in zip(every, modes, strict=True):
            module.training = was
    if why:
        raise UnsupportedError(
            f"the model cannot be cut into these {len(stages)} stages, in which {why}; leave "
            "parallel.pipeline at 1, and share weights out by optimizer.stage=3"
        )


class Stages(nn.Module):
    """Several stages of one rank as one module, under the names of the whole model.

    Its forward is not called: a pipeline runs ``parts``, whose modules and parameters these are.

    Args:
        parts: in ascending order.
    """

    def __init__(self, parts: Sequence[Stage]) -> None:
        super().__init__()
        # Not registered: the modules are this one's own, under the model's names.
        object.__setattr__(self, "parts", tuple(parts))
        self._modules = _joined(list(parts))._modules

    parts: tuple[Stage, ...]

    @property
    def tied(self) -> tuple[nn.Parameter, ...]:
        """Those of the first stage, where it is here, then those of the last one."""
        return tuple(param for part in self.parts for param in part.tied)


def _joined(modules: Sequence[nn.Module]) -> nn.Module:
    """One module with the submodules of several that are parts of one."""
    first, *others = modules
    if all(other is first for other in others):
        return first
    whole = copy.copy(first)
    names = dict.fromkeys(name for module in modules for name in module._modules)
    whole._modules = {}
    for name in names:
        found = [child for m in modules if (child := m._modules.get(name)) is not None]
        whole._modules[name] = _joined(found) if found else None
    return whole


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


def _paths(model: Decoder) -> dict[str, int]:
    """The layer of each of a decoder's parts, by its path."""
    below, blocks, above = model.parts
    names = [f"{blocks}.{name}" for name in model.get_submodule(blocks)._modules]
    layers = {path: number for number, path in enumerate(names, 1)}
    return dict.fromkeys(below, 0) | layers | dict.fromkeys(above, len(names) + 1)


def _tied(
    model: Decoder, paths: Mapping[str, int], last: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parameters that are both below the blocks and above them: their names there and there."""
    found: dict[nn.Parameter, dict[int, str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        path = name
        while path and path not in paths:
            path = path.rpartition(".")[0]
        if not path:
            raise ValueError(f"{name} of {type(model).__name__} is in none of its parts")
        found.setdefault(param, {}).setdefault(paths[path], name)
    shared = [names for names in found.values() if len(names) > 1]
    for names in shared:
        if set(names) != {0, last}:
            raise ValueError(
                f"{' and '.join(names.values())} are one parameter; what is above the blocks may "
                "be tied to what is below them, and nothing else"
            )
    return tuple(names[0] for names in shared), tuple(names[last] for names in shared)


def _part(module: T, is_kept: Mapping[str, bool], path: str = "") -> T:
    """A module like another one, without those parts of it that are not kept."""
    part = copy.copy(module)
    part._parameters, part._buffers, part._modules = {}, dict(module._buffers), {}
    for name, child in module._modules.items():
        inner = f"{path}{name}"
        if child is not None and any(other.startswith(f"{inner}.") for other in is_kept):
            child = _part(child, is_kept, f"{inner}.")
        if is_kept.get(inner, True):
            part._modules[name] = child
    return part
