"""The loss: ``nn.CrossEntropyLoss``, and the loss function of a transformers decoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import (
    FLOATS,
    HOST,
    Call,
    Computed,
    autocast_is_on,
    call_operator,
    label_of,
    own_code,
)
from anychip.fusion.probe import difference, undisturbed

IGNORED = -100
"""The label that torch leaves out by default."""


@dataclass(frozen=True)
class CrossEntropy(Computed):
    """``nn.CrossEntropyLoss`` with class indices; the classes are dim 1, as torch has it."""

    kind, operator, takes = "loss", "cross_entropy", 2
    unless = "class weights, class probabilities, other dtypes"

    def samples(self, module: Any) -> Iterator[dict[str, Tensor]]:
        logits, labels = _example(module.ignore_index)
        yield {"logits": logits.flatten(0, 1), "labels": labels.flatten()}

    def compute(self, module: Any, call: Call, logits: Any, target: Any) -> Tensor | str:
        if module.weight is not None:
            return "classes have weights"
        if logits.dtype not in FLOATS:
            return f"logits are {logits.dtype}"
        if target.dtype != torch.int64:
            return f"targets are {target.dtype}"
        rest = () if logits.dim() == 1 else (*logits.shape[:1], *logits.shape[2:])
        if not logits.dim() or tuple(target.shape) != rest:
            return f"logits are {tuple(logits.shape)} and targets {tuple(target.shape)}"
        names = ("ignore_index", "label_smoothing", "reduction")
        rows = logits.movedim(1, -1) if logits.dim() > 2 else logits
        attrs = {name: getattr(module, name) for name in names}
        loss: Tensor = call(ops.cross_entropy, (rows, target), attrs)
        return loss if autocast_is_on(logits) else loss.to(logits.dtype)


def cross_entropy(module: Any) -> Iterator[CrossEntropy]:
    """The one candidate for torch's loss."""
    if module.weight is None:
        yield CrossEntropy()


class LanguageModelLoss:
    """The loss function of a transformers model by ``ops.cross_entropy``.

    Args:
        original: the function that it stands for, which serves what it does not know.
        shift: position i is compared with label i + 1, as for a decoder; or with label i.
    """

    kind, operator, unless = "loss", "cross_entropy", "logits of other dtypes, other arguments"

    def __init__(self, original: Callable[..., Any], *, shift: bool) -> None:
        self.original, self.shift = original, shift
        self.label = label_of(original)

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **rest: Any) -> Tensor:
        """Mean over the labels that count, or their sum over ``num_items_in_batch``: float32."""
        made = self.compute(call_operator, logits, labels, vocab_size, **rest)
        if not isinstance(made, str):
            return made
        own_code("cross_entropy", self.label, made, id(self))
        given = {"logits": logits, "labels": labels, "vocab_size": vocab_size}
        result: Tensor = self.original(**given, **rest)
        return result

    def compute(
        self,
        call: Call,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORED,
        **rest: Any,
    ) -> Tensor | str:
        """The loss by the operator, called by ``call``; or why it cannot serve the call."""
        shifted = rest.pop("shift_labels", None) if self.shift else None
        unknown = [name for name in rest if rest[name] is not None]
        if unknown:
            return f"arguments {', '.join(unknown)}"
        if logits.dtype not in FLOATS:
            return f"logits are {logits.dtype}"
        if self.shift:
            labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        target = labels if shifted is None else shifted
        flat = (logits.reshape(-1, vocab_size), target.reshape(-1).to(logits.device))
        reduction = "mean" if num_items_in_batch is None else "sum"
        attrs = {"ignore_index": ignore_index, "reduction": reduction}
        total: Tensor = call(ops.cross_entropy, flat, attrs)
        if num_items_in_batch is None:
            return total
        items: Any = num_items_in_batch
        return total / (items.to(total.device) if isinstance(items, Tensor) else items)


def loss_of(module: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a transformers model with labels; None when it has none of its own."""
    described = inspect.getattr_static(type(module), "loss_function", None)
    if not isinstance(described, property) or described.fset is None:
        return None
    found = module.loss_function
    takes_labels = "labels" in inspect.signature(module.forward).parameters
    return found if callable(found) and takes_labels else None


def recognized_loss(original: Callable[..., Any]) -> LanguageModelLoss | None:
    """The loss that computes the same as a loss function, gradient included; None: neither does."""
    if "vocab_size" not in inspect.signature(original).parameters:
        return None
    both = (LanguageModelLoss(original, shift=shift) for shift in (True, False))
    return next((made for made in both if _same_loss(made)), None)


def _same_loss(made: LanguageModelLoss) -> bool:
    with undisturbed():
        logits, labels = _example(IGNORED)
        args = {"logits": logits, "labels": labels}
        given = {"vocab_size": logits.shape[-1], "ignore_index": IGNORED}
        return not any(
            difference(
                made.original, made.compute, args, {**given, "num_items_in_batch": n}, whole=True
            )
            for n in (None, 9, torch.tensor(5, device=HOST))
        )


def _example(ignored: int) -> tuple[Tensor, Tensor]:
    """Logits (2, 7, 13) and labels, of which some do not count."""
    logits = torch.randn(2, 7, 13, dtype=torch.float32, device=HOST) * 4
    labels = torch.randint(13, (2, 7), device=HOST)
    labels[0, 3] = labels[1, 0] = ignored
    return logits.requires_grad_(), labels
