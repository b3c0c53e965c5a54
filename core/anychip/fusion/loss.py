"""Losses by ``ops.cross_entropy``, from logits as they are: torch's, and those of transformers.

Both call ``torch.nn.functional.cross_entropy``, and run with the operator in its place. A loss of
transformers makes float32 of its logits before: the operator needs no such copy.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from anychip import ops
from anychip.fusion.probe import HOST, Comparison, call, normal
from anychip.fusion.stand_ins import FLOATS, Forward, StandIn, autocast_is_on
from anychip.fusion.swaps import Reroutes, placed, rerouted, served

_UNLESS = "class weights, class probabilities, other dtypes"
_KNOWN = {"ignore_index", "label_smoothing", "reduction"}


def _float32(x: Tensor, target: Tensor, *args: Any, **given: Any) -> Tensor | str:
    """torch's function of the same arguments, the classes dim 1, in float32."""
    attrs = {name: value for name, value in given.items() if value is not None}
    if args or attrs.keys() - _KNOWN:
        return f"arguments {', '.join(attrs.keys() - _KNOWN) or 'without names'}"
    if x.dtype not in FLOATS:
        return f"logits are {x.dtype}"
    if target.dtype != torch.int64:
        return f"targets are {target.dtype}"
    if not x.dim() or tuple(target.shape) != (() if x.dim() == 1 else (*x.shape[:1], *x.shape[2:])):
        return f"logits are {tuple(x.shape)} and targets {tuple(target.shape)}"
    loss: Tensor = call(ops.cross_entropy, x.movedim(1, -1) if x.dim() > 2 else x, target, **attrs)
    return loss


def _as_torch(x: Tensor, *args: Any, **given: Any) -> Tensor | str:
    made = _float32(x, *args, **given)
    return made if isinstance(made, str) or autocast_is_on(x) else made.to(x.dtype)


@functools.wraps(cross_entropy)
def _of_float32(x: Tensor, *args: Any, **given: Any) -> Tensor:
    return cross_entropy(x.float(), *args, **given)


@dataclass(frozen=True)
class TorchLoss(Reroutes):
    """``nn.CrossEntropyLoss``."""

    kind, operator, unless = "loss", "cross_entropy", _UNLESS
    routes: ClassVar[dict[Any, Forward]] = {
        cross_entropy: served("cross_entropy", cross_entropy, _as_torch)
    }

    def unfit(self, module: nn.Module) -> str | None:
        return super().unfit(module) if module.weight is None else "it weighs its classes"


@dataclass(frozen=True, eq=False)
class ModelLoss(StandIn):
    """Stands for the loss function of a transformers model, as an attribute of the model.

    Attributes:
        original: the function, which calls torch's.
    """

    original: Callable[..., Any]

    kind, operator, unless = "loss", "cross_entropy", _UNLESS
    routes: ClassVar[dict[Any, Forward]] = {
        cross_entropy: served("cross_entropy", _of_float32, _float32),
        Tensor.float: Tensor.contiguous,
    }

    def unfit(self, module: nn.Module) -> str | None:
        takes = inspect.signature(self.original).parameters
        return None if "vocab_size" in takes else "not the cross entropy of a language model"

    def subject(self, module: nn.Module) -> Any:
        return self.original

    def comparisons(self, module: nn.Module) -> Iterator[Comparison]:
        labels = torch.randint(13, (2, 7), device=HOST)
        labels[0, 3] = labels[1, 0] = -100
        full, low, five = torch.float32, torch.bfloat16, torch.tensor(5, device=HOST)
        for dtype, items in ((full, None), (low, 9), (full, five)):
            logits = (normal(2, 7, 13) * 4).to(dtype).requires_grad_()
            given = {"vocab_size": 13, "num_items_in_batch": items}
            theirs, ours = (functools.partial(f, **given) for f in (self.original, self))
            yield Comparison(theirs, ours, {"logits": logits, "labels": labels}, whole=True)

    def onto(self, module: Any) -> object:
        module.loss_function = self
        return self

    @placed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return rerouted(self.original, self.routes)(*args, **kwargs)


def loss_of(module: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a transformers model with labels; None when it has none of its own."""
    described = inspect.getattr_static(type(module), "loss_function", None)
    if not isinstance(described, property) or described.fset is None:
        return None
    # A model without labels says that it has no loss when it is asked for it.
    if "labels" not in inspect.signature(module.forward).parameters:
        return None
    found = module.loss_function
    return found if callable(found) else None
