"""The loss function of a transformers model by ``ops.cross_entropy``, from logits as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import FLOATS, Candidate, label_of, own_code
from anychip.fusion.layers import example
from anychip.fusion.probe import HOST, Comparison, call

IGNORED = -100
"""The label that torch leaves out by default."""


@dataclass(frozen=True, eq=False)
class LanguageModelLoss(Candidate):
    """Stands for the loss function of a model, as an attribute of the model.

    Attributes:
        original: the function, which serves what this does not know.
        shift: position i is compared with label i + 1, as for a decoder; or with label i.
    """

    original: Callable[..., Any]
    shift: bool

    kind, operator, unless = "loss", "cross_entropy", "logits of other dtypes, other arguments"

    def unfit(self, module: nn.Module) -> str | None:
        return None

    def subject(self, module: nn.Module) -> Any:
        return None

    def onto(self, module: Any) -> object:
        """The model has this loss from now on."""
        module.loss_function = self
        return self

    def comparisons(self, module: nn.Module) -> Iterator[Comparison]:
        logits, labels = example(IGNORED)
        given: Any = {"vocab_size": logits.shape[-1], "ignore_index": IGNORED}
        for items in (None, 9, torch.tensor(5, device=HOST)):
            args = {"logits": logits, "labels": labels}
            given = {**given, "num_items_in_batch": items}
            yield Comparison(self.original, self.compute, args, given, whole=True)

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **rest: Any) -> Tensor:
        """Mean over the labels that count, or their sum over ``num_items_in_batch``: float32."""
        made = self.compute(logits, labels, vocab_size, **rest)
        if not isinstance(made, str):
            return made
        own_code("cross_entropy", label_of(self.original), made, id(self))
        given = {"logits": logits, "labels": labels, "vocab_size": vocab_size}
        result: Tensor = self.original(**given, **rest)
        return result

    def compute(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        **rest: Any,
    ) -> Tensor | str:
        """The loss by the operator; or why it cannot serve the call."""
        shifted = rest.pop("shift_labels", None) if self.shift else None
        unknown = [name for name in rest if rest[name] is not None]
        if unknown:
            return f"arguments {', '.join(unknown)}"
        if logits.dtype not in FLOATS:
            return f"logits are {logits.dtype}"
        if self.shift:
            labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = (labels if shifted is None else shifted).reshape(-1).to(logits.device)
        items, rows = num_items_in_batch, logits.reshape(-1, vocab_size)
        attrs = {"ignore_index": ignore_index, "reduction": "mean" if items is None else "sum"}
        total: Tensor = call(ops.cross_entropy, rows, target, **attrs)
        if items is None:
            return total
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def loss_of(module: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a transformers model with labels; None when it has none of its own."""
    described = inspect.getattr_static(type(module), "loss_function", None)
    if not isinstance(described, property) or described.fset is None:
        return None
    found = module.loss_function
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    return found if callable(found) and takes_labels else None


def candidates(original: Callable[..., Any]) -> Iterator[LanguageModelLoss | str]:
    """What a loss function may compute."""
    if "vocab_size" not in inspect.signature(original).parameters:
        yield "not the cross entropy of a language model"
    else:
        yield from (LanguageModelLoss(original, shift) for shift in (True, False))
