"""The loss: ``nn.CrossEntropyLoss``, and the loss function of a transformers decoder."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from anychip import ops
from anychip.fusion.fused import (
    FLOATS,
    HOST,
    Args,
    Call,
    Forward,
    Fusion,
    Named,
    autocast_is_on,
    call_operator,
    label_of,
    own_code,
)
from anychip.fusion.probe import UNIT, Roundings


@dataclass(frozen=True)
class CrossEntropy(Fusion):
    """``nn.CrossEntropyLoss`` with class indices; the classes are dim 1, as torch has it."""

    kind, operator = "loss", "cross_entropy"
    unless = "class weights, class probabilities, other dtypes"

    def run(self, module: Any, forward: Forward, args: Args, kwargs: Named) -> Any:
        given = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        if len(args) > 2 or given.keys() != {"input", "target"}:
            return forward(module, *args, **kwargs)  # torch says what is wrong with the call
        logits, target = given["input"], given["target"]
        why = _refusal(module, logits, target)
        if why is not None:
            own_code(self.operator, label_of(forward), why, id(module))
            return forward(module, *args, **kwargs)
        loss = ops.cross_entropy(
            logits.movedim(1, -1) if logits.dim() > 2 else logits,
            target,
            ignore_index=module.ignore_index,
            label_smoothing=module.label_smoothing,
            reduction=module.reduction,
        )
        return loss if autocast_is_on(logits) else loss.to(logits.dtype)


def _refusal(module: Any, logits: Tensor, target: Tensor) -> str | None:
    if module.weight is not None:
        return "classes have weights"
    if logits.dtype not in FLOATS:
        return f"logits are {logits.dtype}"
    if target.dtype != torch.int64:
        return f"targets are {target.dtype}"
    rest = () if logits.dim() == 1 else (*logits.shape[:1], *logits.shape[2:])
    if not logits.dim() or tuple(target.shape) != rest:
        return f"logits are {tuple(logits.shape)} and targets {tuple(target.shape)}"
    return None


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

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        **rest: Any,
    ) -> Tensor:
        """Mean over the labels that count, or their sum over ``num_items_in_batch``: float32."""
        why = self._refusal(logits, rest)
        if why is None:
            target = self.targets(labels, rest.get("shift_labels"), ignore_index)
            given = (logits, target, vocab_size, num_items_in_batch, ignore_index)
            return language_model_loss(call_operator, *given)
        own_code("cross_entropy", self.label, why, id(self))
        result: Tensor = self.original(
            logits=logits,
            labels=labels,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            **rest,
        )
        return result

    def _refusal(self, logits: Tensor, rest: Named) -> str | None:
        known = {"shift_labels"} if self.shift else set()
        unknown = [name for name in rest if rest[name] is not None and name not in known]
        if unknown:
            return f"arguments {', '.join(unknown)}"
        return None if logits.dtype in FLOATS else f"logits are {logits.dtype}"

    def targets(self, labels: Tensor, shifted: Tensor | None, ignore_index: int) -> Tensor:
        """The label that each position is compared with."""
        if not self.shift:
            return labels
        if shifted is not None:
            return shifted
        return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]


def language_model_loss(
    call: Call,
    logits: Tensor,
    target: Tensor,
    vocab_size: int,
    num_items: Tensor | int | None,
    ignore_index: int,
) -> Tensor:
    """The loss of targets that are already in their places; the operator is called by ``call``."""
    flat = (logits.reshape(-1, vocab_size), target.reshape(-1).to(logits.device))
    attrs = {"ignore_index": ignore_index, "reduction": "mean" if num_items is None else "sum"}
    total: Tensor = call(ops.cross_entropy, flat, attrs)
    if num_items is None:
        return total
    return total / (num_items.to(total.device) if isinstance(num_items, Tensor) else num_items)


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
    for shift in (True, False):
        made = LanguageModelLoss(original, shift=shift)
        if _same_loss(made):
            return made
    return None


def _same_loss(made: LanguageModelLoss) -> bool:
    generator = torch.Generator(HOST).manual_seed(3)
    logits = torch.randn(2, 7, 13, generator=generator, dtype=torch.float32, device=HOST) * 4
    labels = torch.randint(13, (2, 7), generator=generator, device=HOST)
    labels[0, 3] = labels[1, 0] = -100
    with torch.inference_mode(False), torch.enable_grad():
        for items in (None, 9, torch.tensor(5, device=HOST)):
            ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
            roundings = Roundings()
            target = made.targets(labels, None, -100)
            got = language_model_loss(roundings.call, ours, target, 13, items, -100)
            given = {"num_items_in_batch": items, "ignore_index": -100}
            want = made.original(logits=theirs, labels=labels, vocab_size=13, **given)
            grads = [torch.autograd.grad(y, x)[0] for y, x in ((got, ours), (want, theirs))]
            # Sums over 14 rows of losses below the largest logit, and one division.
            limit = 2 * (roundings.forward + labels.numel() + 1) * UNIT
            if float((got - want).detach().abs()) > limit * float(want.detach().abs()):
                return False
            limit = 2 * (roundings.backward + 1) * UNIT
            if bool(((grads[0] - grads[1]).abs() > limit * grads[1].abs().max()).any()):
                return False
    return True
