"""Attention and loss of Hugging Face transformers, by the ways that it has for extensions.

An attention function is registered with its ``AttentionInterface`` and named in the model's config;
the loss is the model's ``loss_function``. transformers is never imported: a model that comes from
it has already been. Positions have no such way: see ``rope``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anychip.fusion import attention
from anychip.fusion.fused import label_of, own_code
from anychip.fusion.loss import LanguageModelLoss, language_model_loss
from anychip.fusion.probe import UNIT, Roundings

NAME = "anychip"
REPLACES = "sdpa"
"""The implementation, by transformers' name for it, that masks and meaning are taken from."""


class AttentionName(str):
    """The name in a config. Loaded in another process, it registers what it names."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return registered, ()


def registered() -> AttentionName:
    """Registers the attention function with transformers, and gives the name of it.

    Raises:
        LookupError: this version of transformers has no place for it.
    """
    attentions, masks = _interface("AttentionInterface"), _interface("AttentionMaskInterface")
    if REPLACES not in attentions.keys() or REPLACES not in masks.keys():
        raise LookupError(f"transformers has no attention {REPLACES!r} to take its meaning from")
    original = attentions[REPLACES]
    meant = frozenset({*inspect.signature(original).parameters, "softcap"})
    # The masks of an implementation of another name would be left out without this.
    type(masks).register(NAME, masks[REPLACES])
    type(attentions).register(NAME, functools.partial(attend, original, label_of(original), meant))
    return AttentionName(NAME)


def _interface(name: str) -> Any:
    package = sys.modules.get("transformers")
    made = getattr(package, name, None)
    if made is None:
        raise LookupError(f"this version of transformers has no {name}")
    return made()


def attend(
    original: Callable[..., Any],
    label: str,
    meant: Collection[str],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """What transformers' sdpa computes: (B, H, S, D) in, (B, S, H, D) out, no weights.

    Args:
        original: the function of sdpa, which serves what the operator cannot.
        label: its name.
        meant: arguments that mean something to it; it ignores the others.
    """
    wanted = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(wanted) and query.shape[2] > 1
    why = None if attention_mask is None else _mask(key, rest)
    why = why or _argument(meant, rest)
    why = why or attention.refusal(query, key, value, causal=causal, dropout=dropout)
    if why is None:
        given: Any = {"causal": causal, "scale": scaling, "dropout": dropout}
        y = attention.attention(query, key, value, **given)
        return y.transpose(1, 2), None
    own_code("attention", label, why)
    result: tuple[Tensor, None] = original(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **rest,
    )
    return result


def _mask(key: Tensor, rest: Mapping[str, Any]) -> str:
    """What a mask is for: of a window when there are more keys than it is wide."""
    window = rest.get("sliding_window")
    return f"a mask, of a window of {window}" if window and key.shape[2] > window else "a mask"


def _argument(meant: Collection[str], rest: Mapping[str, Any]) -> str | None:
    if rest.get("output_attentions"):
        return "output_attentions"
    return next((f"argument {n}" for n in rest if n in meant and rest[n] is not None), None)


def is_attention(module: nn.Module) -> bool:
    """Whether a module asks transformers' interface for its attention function."""
    named = hasattr(getattr(module, "config", None), "_attn_implementation")
    return named and attention.calls(module, "ALL_ATTENTION_FUNCTIONS")


def implementation(module: Any) -> str | None:
    """The name of the attention function that a module would ask for."""
    found: str | None = module.config._attn_implementation
    return found


def supports(model: nn.Module, config: Any) -> bool:
    """Whether the models of a config know the attention that is replaced."""
    models = [m for m in model.modules() if vars(m).get("config") is config]
    return all(getattr(each, f"_supports_{REPLACES}", True) for each in models)


def fuse_attention(model: nn.Module, modules: Iterable[Any]) -> None:
    """Lets the modules' configs name our function; the model gets configs of its own.

    So another model that was made from the same config stays as it is.

    Raises:
        LookupError: as :func:`registered`.
    """
    name = registered()
    shared: dict[int, Any] = {}
    renewed: dict[int, Any] = {}
    for module in modules:
        config = module.config
        renewed[id(config)] = copy.deepcopy(config, shared)
        renewed[id(config)]._attn_implementation = name
    for holder in model.modules():
        mine = vars(holder).get("config")
        if id(mine) in renewed:
            holder.config = renewed[id(mine)]


def loss_of(module: nn.Module) -> Callable[..., Any] | None:
    """The loss function of a transformers model that can be changed; None when it has none."""
    described = inspect.getattr_static(type(module), "loss_function", None)
    if not isinstance(described, property) or described.fset is None:
        return None
    found = module.loss_function
    return found if callable(found) else None


def has_head(module: Any) -> bool:
    """Whether a model computes a loss: its forward takes labels."""
    return "labels" in inspect.signature(module.forward).parameters


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
    host = torch.device("cpu")
    generator = torch.Generator(host).manual_seed(3)
    logits = torch.randn(2, 7, 13, generator=generator, dtype=torch.float32, device=host) * 4
    labels = torch.randint(13, (2, 7), generator=generator, device=host)
    labels[0, 3] = labels[1, 0] = -100
    with torch.inference_mode(False), torch.enable_grad():
        for items in (None, 9, torch.tensor(5, device=host)):
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
