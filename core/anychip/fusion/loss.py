"""Losses by ``ops.cross_entropy``, from logits as they are: torch's, and those of transformers.

Both call ``torch.nn.functional.cross_entropy``, and run with the operator in its place. A loss of
transformers makes float32 of its logits before: the operator needs no such copy.
"""

from __future__ import annotations

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
from anychip.fusion.stand_ins import FLOATS, Forward, StandIn, autocast_is_on, placed, served
from anychip.fusion.swaps import CallsTorch, Rerouted

_UNLESS = "class weights, class probabilities, other dtypes"


def _float32(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | str:
    """torch's function of the same arguments, the classes dim 1, in float32."""
    if weight is not None or size_average is not None or reduce is not None:
        return "classes have weights, or the reduction has an old name"
    if input.dtype not in FLOATS:
        return f"logits are {input.dtype}"
    if target.dtype != torch.int64:
        return f"targets are {target.dtype}"
    rest = () if input.dim() == 1 else (*input.shape[:1], *input.shape[2:])
    if not input.dim() or tuple(target.shape) != rest:
        return f"logits are {tuple(input.shape)} and targets {tuple(target.shape)}"
    attrs: Any = {"label_smoothing": label_smoothing, "reduction": reduction}
    rows = input.movedim(1, -1) if input.dim() > 2 else input
    loss: Tensor = call(ops.cross_entropy, rows, target, ignore_index=ignore_index, **attrs)
    return loss


def _as_torch(input: Tensor, *args: Any, **kwargs: Any) -> Tensor | str:
    made = _float32(input, *args, **kwargs)
    return made if isinstance(made, str) or autocast_is_on(input) else made.to(input.dtype)


@functools.wraps(cross_entropy)
def _in_float32(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return cross_entropy(input.float(), *args, **kwargs)


@dataclass(frozen=True)
class TorchLoss(CallsTorch):
    """``nn.CrossEntropyLoss``."""

    kind, operator, unless = "loss", "cross_entropy", _UNLESS
    routes: ClassVar[dict[Any, Forward]] = {
        cross_entropy: served("cross_entropy", cross_entropy, _as_torch)
    }


def of_torch(module: Any) -> Iterator[TorchLoss]:
    """The one proposal for torch's loss."""
    if module.weight is None:
        yield TorchLoss()


@dataclass(frozen=True, eq=False)
class ModelLoss(StandIn):
    """Stands for the loss function of a transformers model, as an attribute of the model.

    Attributes:
        original: the function, which calls torch's.
    """

    original: Callable[..., Any]

    kind, operator, unless = "loss", "cross_entropy", _UNLESS
    routes: ClassVar[dict[Any, Forward]] = {
        cross_entropy: served("cross_entropy", _in_float32, _float32),
        Tensor.float: Tensor.contiguous,
    }

    def unfit(self, module: nn.Module) -> str | None:
        takes = inspect.signature(self.original).parameters
        return None if "vocab_size" in takes else "not the cross entropy of a language model"

    def subject(self, module: nn.Module) -> Any:
        return self.original

    def onto(self, module: Any) -> object:
        module.loss_function = self
        return self

    def comparisons(self, module: nn.Module) -> Iterator[Comparison]:
        labels = torch.randint(13, (2, 7), device=HOST)
        labels[0, 3] = labels[1, 0] = -100
        for dtype in (torch.float32, torch.bfloat16):
            for items in (None, 9, torch.tensor(5, device=HOST)):
                logits = (normal(2, 7, 13) * 4).to(dtype).requires_grad_()
                args = {"logits": logits, "labels": labels}
                given = {"vocab_size": 13, "num_items_in_batch": items}
                yield Comparison(self.original, self, args, given, whole=True)

    @placed
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with Rerouted(self.routes):
            return self.original(*args, **kwargs)


def loss_of(module: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a transformers model with labels; None when it has none of its own."""
    described = inspect.getattr_static(type(module), "loss_function", None)
    if not isinstance(described, property) or described.fset is None:
        return None
    found = module.loss_function
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    return found if callable(found) and takes_labels else None
